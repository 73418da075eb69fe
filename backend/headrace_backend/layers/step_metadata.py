"""Metadata of a step beside its tokens, which layers pass on to attention.

It says which tokens belong to which row, and where each row's context lies.

A runner for CPUs makes the one, a runner for GPUs the other; of a step in pieces, one for each
piece. Both are defined beside the kernels that read them. A model with several cache groups is
given one for each group, which differ in block tables and slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from headrace_kernels.attention.paged import AttentionMetadata, PagedAttentionStep
from headrace_kernels.recurrence.entries import RecurrentEntries

# What attention in the layers of one cache group reads.
GroupMetadata: TypeAlias = AttentionMetadata | PagedAttentionStep


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedStep:
    """A step of a model with several cache groups."""

    # Of each group.
    groups: tuple[GroupMetadata, ...]


StepMetadata: TypeAlias = GroupMetadata | GroupedStep


def of_group(metadata: StepMetadata, group: int) -> GroupMetadata:
    """What the layers of a cache group are given; the whole step where there is one group."""
    return metadata.groups[group] if isinstance(metadata, GroupedStep) else metadata


def grouped(groups: Sequence[GroupMetadata]) -> StepMetadata:
    """Puts what each cache group is given together; one group needs nothing around it."""
    return groups[0] if len(groups) == 1 else GroupedStep(tuple(groups))


def recurrent_entries(metadata: StepMetadata) -> RecurrentEntries:
    """What layers are given that keep a state for each row of the batch."""
    step = of_group(metadata, 0)
    assert step.rows is not None, "the runner says which rows the step computes"
    # Entries that are not the prefill kernel's have one token, and in workers that draft some.
    only_decodes = isinstance(step, PagedAttentionStep) and step.prefill is None
    return RecurrentEntries(step.query_start_loc, step.seq_lens, step.rows, only_decodes, step.num_drafts)


@dataclasses.dataclass(frozen=True, slots=True)
class StepPieces:
    """A step in two pieces of its tokens; the second sees the first (`layers.cut_step`)."""

    # Tokens of the first.
    first: int
    metadata: tuple[StepMetadata, StepMetadata]


def of_first_group(metadata: StepMetadata | StepPieces) -> StepMetadata | StepPieces:
    """What a draft model is given, whose blocks have the numbers of the first group's."""
    if isinstance(metadata, StepPieces):
        one, other = metadata.metadata
        return StepPieces(metadata.first, (of_group(one, 0), of_group(other, 0)))
    return of_group(metadata, 0)
