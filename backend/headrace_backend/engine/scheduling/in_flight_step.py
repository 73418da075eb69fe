"""The record of a planned step, by which its result is read.

Owns what is remembered of a step while it is in flight. Does not own how it is read (`settlement`).
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import NamedTuple

from headrace_backend.engine.output_grammar import MaskOutcome
from headrace_backend.engine.requests.prompt_log import PromptRun
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.scheduling.step_time import StepLoad


class MaskedDraw(NamedTuple):
    """A draw whose tokens a grammar restricts, and those behind its drafts."""

    # Which of the step's samples it is.
    sample: int
    sequence: Sequence
    # Position of the drawn token in its output, as planned: at most as many tokens come before it.
    bound: int
    # Tokens that its sequence had not settled when it was planned (`Sequence.num_forgotten`).
    num_forgotten: int
    # Its drafts, among those that the worker reports (`step.drafts`), and how many.
    first_draft: int
    num_drafts: int

    @property
    def position(self) -> int:
        """Most tokens that come before it; exact once all steps before have been read."""
        return self.bound - (self.sequence.num_forgotten - self.num_forgotten)


@dataclasses.dataclass(slots=True)
class InFlightStep:
    """What the engine remembers of a planned step to read its result.

    It names sequences, never rows, which may have changed hands meanwhile.
    """

    step_id: int
    planned_at_ns: int
    num_tokens: int
    # Its prefill tokens are those of prompts, and those computed again after a preemption.
    load: StepLoad
    # In the order of the plan's sample columns.
    samples: list[Sequence]
    # Sequences that computed without sampling: with their epoch, and the tokens computed after the
    # step.
    chunks: list[tuple[Sequence, int, int]]
    # In the order of the plan's checked hidden states: whose they are.
    checked: list[Sequence]
    num_sequences: int
    # Samples whose log probabilities were asked for.
    num_logprobs: int
    # In the order of the plan's runs of prompt tokens.
    prompt_runs: list[tuple[LiveRequest, PromptRun]]
    # Sequences that computed tokens of their prompts, or tokens again: with the first of these, and
    # how many.
    entries: list[tuple[Sequence, int, int]]
    # When it was planned (`step_log`): blocks, those not held by anybody, requests that waited;
    # whether it was tried alone; requests of the sequences that lost their row for it; sequences
    # that had a token to decode, and found no room.
    num_blocks: int = 0
    free_blocks: int = 0
    num_waiting: int = 0
    isolated: bool = False
    # Drafted tokens that each decode computes, which are as many as it may settle beside one;
    # empty: no decode computes any.
    draft_counts: list[int] = dataclasses.field(default_factory=list)
    preempted: list[int] = dataclasses.field(default_factory=list)
    stalled: list[Sequence] = dataclasses.field(default_factory=list)
    # Tokens that must come before the draw of a sequence, and were computed with it.
    forced: dict[Sequence, array[int]] = dataclasses.field(default_factory=dict)
    # Draws that wait for masks.
    masked: list[MaskedDraw] = dataclasses.field(default_factory=list)
    # Drafts that the worker reports before the masks can be computed.
    num_reported_drafts: int = 0
    # Sequences whose state is kept, for so many tokens, if the step settles the last of them.
    unsure_states: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    # Sequences with a grammar of which nobody knows how many of their drafts it settles.
    unsure: list[Sequence] = dataclasses.field(default_factory=list)
    # Known before its result: tokens that sequences will not settle of those planned, and outputs
    # that end within what it settles, at so many tokens.
    forgotten: dict[Sequence, int] = dataclasses.field(default_factory=dict)
    ends: dict[Sequence, tuple[int, MaskOutcome]] = dataclasses.field(default_factory=dict)

    @property
    def num_forced(self) -> int:
        """Tokens that the step settles beside those that it draws."""
        return sum(map(len, self.forced.values())) if self.forced else 0
