"""A step of the engine in 112 bytes: when it was planned, computed and read, and what was in it.

Owns the layout, which is the same on the engine's wire (`StepOutputs.step_records`) and in facts
(`facts.Steps`), so that nobody decodes what it only passes on. Times are CLOCK_MONOTONIC
nanoseconds of the backend's machine. Ids count settled steps over all lives of workers, from 1.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt

RECORD: Final = np.dtype(
    [
        ("step_id", "<u8"),
        # When the scheduler decided it; when the device began and ended it (as far as known: one
        # that was launched ahead begins when the one before ends); when its tokens were read.
        ("planned_at_ns", "<u8"),
        ("started_at_ns", "<u8"),
        ("finished_at_ns", "<u8"),
        ("settled_at_ns", "<u8"),
        # Tokens of context that its decodes read, and pairs of query and key of its prompt chunks.
        ("context_tokens", "<u8"),
        ("attention_pairs", "<u8"),
        # Sequences in it; tokens of prompts (also those computed again); sequences that decode;
        # tokens sampled.
        ("num_sequences", "<u4"),
        ("num_prefill_tokens", "<u4"),
        ("num_decodes", "<u4"),
        ("num_samples", "<u4"),
        # When it was planned: blocks not held by anybody, all blocks, requests that wait.
        ("free_blocks", "<u4"),
        ("num_blocks", "<u4"),
        ("waiting_requests", "<u4"),
        # Sequences that lost their row for this step.
        ("preemptions", "<u4"),
        ("draft_tokens", "<u4"),
        ("accepted_tokens", "<u4"),
        # StepFlag.
        ("flags", "<u4"),
        # Tokens that the device computed, padding included; 0: not reported.
        ("padded_tokens", "<u4"),
        # Drafts that a drafter failed to make, and tokens that were settled without a draw because
        # no other could be drawn; they count as sampled.
        ("lost_drafts", "<u4"),
        ("forced_tokens", "<u4"),
    ]
)
assert RECORD.itemsize == 112

Records = npt.NDArray[np.void]


class StepFlag(enum.IntFlag):
    """What else is to be said of a step."""

    # It ran as a captured graph.
    CAPTURED = 1
    # Something was compiled or captured during it, after warm-up.
    LATE_WORK = 2
    # It was tried alone, because one before failed.
    ISOLATED = 4


def decode(data: bytes) -> Records:
    """Reads records packed side by side, without a copy.

    Raises:
        ValueError: not a whole number of them.
    """
    return np.frombuffer(data, RECORD)
