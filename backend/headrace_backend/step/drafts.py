"""Drafts that a step verifies, as the engine hears of them: those of rows with a grammar.

Which tokens may be drawn behind a draft depends on the draft. So at the head of a step whose draws
wait for masks (`masks`) the reporting worker says what its rows with a grammar have drafted, while
the device goes on with the forward pass; drafts of other rows never leave the device.

Owns the column and its byte form.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Self

import numpy as np

from headrace_backend.step.plan import Int32Column

_HEADER = struct.Struct("<QI")


@dataclasses.dataclass(slots=True, eq=False)
class StepDrafts:
    """Drafts of one step."""

    step_id: int
    # [num_drafts] ids, entry by entry in the order of the plan: as many as each entry computes, of
    # those entries whose rows have a grammar.
    tokens: Int32Column

    def encode(self) -> bytes:
        """Encodes the drafts as bytes: a header, then the column."""
        return _HEADER.pack(self.step_id, self.tokens.size) + self.tokens.tobytes()

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Reads what `encode` wrote. Raises struct.error, or ValueError, on anything else."""
        step_id, num_tokens = _HEADER.unpack_from(data)
        return cls(step_id, np.frombuffer(data, np.int32, num_tokens, _HEADER.size))
