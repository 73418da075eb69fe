"""Metadata of a step beside its tokens, which layers pass on to attention.

It says which tokens belong to which row, and where each row's context lies.

A runner for CPUs makes the one, a runner for GPUs the other; of a step in pieces, one for each
piece. Both are defined beside the kernels that read them.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from headrace_kernels.attention.paged import AttentionMetadata, PagedAttentionStep

StepMetadata: TypeAlias = AttentionMetadata | PagedAttentionStep


@dataclasses.dataclass(frozen=True, slots=True)
class StepPieces:
    """A step in two pieces of its tokens; the second sees the first (`layers.cut_step`)."""

    # Tokens of the first.
    first: int
    metadata: tuple[StepMetadata, StepMetadata]
