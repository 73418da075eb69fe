"""What the engine knows of a grammar: each output has a place in it, from which masks come.

A grammar may begin late: while an output reasons, its draws need none, or one now and then.

Owns the two interfaces and the words that cross. The engine is given a compiled grammar with a
request and looks into none: which tokens an output may draw is computed elsewhere, in threads
(`headrace_backend.structured_output`), from what the engine says has been drawn
(`scheduling.masks`).
"""

from __future__ import annotations

import enum
from array import array
from typing import NamedTuple, Protocol

from headrace_request.rule_kinds import Violation


class OutputGrammar(Protocol):
    """One output's place in its grammar. The engine only hands it on."""


class Grammar(Protocol):
    """A compiled grammar, which any number of outputs follow."""

    # Position in an output of the first draw that may have a mask.
    first_masked: int
    # Whether every draw has one, which says where the output may end.
    decides_ends: bool

    def new_output(self) -> OutputGrammar:
        """An output's place at the grammar's beginning."""


class MaskState(enum.Enum):
    """What came of asking for an output's mask."""

    # There is one.
    MASKED = enum.auto()
    # Any token may be drawn, here and before the position `MaskOutcome.next_masked`.
    OPEN = enum.auto()
    # The grammar allows no further token, nor a stop token: the output is whole.
    COMPLETE = enum.auto()
    # The output can't go on. `MaskOutcome.broken` says why where the request asks for what can't
    # be, else `MaskOutcome.error`.
    FAILED = enum.auto()


class MaskOutcome:
    """What came of one job."""

    __slots__ = ("broken", "end", "error", "forced", "masked_places", "next_masked", "state")

    def __init__(
        self,
        state: MaskState,
        error: str = "",
        next_masked: int = 0,
        forced: array[int] | None = None,
        masked_places: tuple[int, ...] | None = None,
        end: DraftedEnd | None = None,
        broken: Violation | None = None,
    ) -> None:
        """Takes what is to be known of a job.

        Args:
            state: What came of it.
            error: What the server failed at, for the caller; "": at nothing.
            next_masked: Position of the next draw that may have a mask.
            forced: Tokens that must be drawn, from the job's draw on, which the place follows
                already; None: it may be one of several.
            masked_places: Draws that have a mask: 0 is the job's, i the one behind its first i
                drafts; None: the job's alone, if the state says that it has one.
            end: End of the output if the job's drafts are right; None: it does not end there.
            broken: The rule that the request turned out to break; None: none.
        """
        self.state = state
        self.broken = broken
        self.error = error
        self.next_masked = next_masked
        self.forced = forced
        self.masked_places = masked_places if masked_places is not None else _masked_alone(state)
        self.end = end

    def along(self, masked_places: tuple[int, ...], end: DraftedEnd | None) -> MaskOutcome:
        """This outcome with what is known of the draws behind the job's drafts.

        Args:
            masked_places: Draws that have a mask, as of the constructor.
            end: End of the output if the drafts are right; None: it does not end there.
        """
        return MaskOutcome(self.state, self.error, self.next_masked, self.forced, masked_places, end)

    def followed(self, forced: array[int]) -> MaskOutcome:
        """This outcome with the tokens that must be drawn, from the job's draw on."""
        return MaskOutcome(self.state, self.error, self.next_masked, forced, self.masked_places, self.end)


class DraftedEnd(NamedTuple):
    """An output that ends behind drafts, where these are right: nothing can be drawn there."""

    # So many drafts.
    num_drafts: int
    # It is whole, or can't go on.
    outcome: MaskOutcome


def _masked_alone(state: MaskState) -> tuple[int, ...]:
    return (0,) if state is MaskState.MASKED else ()


MASKED = MaskOutcome(MaskState.MASKED)
COMPLETE = MaskOutcome(MaskState.COMPLETE)
