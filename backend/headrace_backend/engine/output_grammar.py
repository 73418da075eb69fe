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
from typing import Protocol


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
    # The grammar can't go on. `MaskOutcome.error` says why.
    FAILED = enum.auto()


class MaskOutcome:
    """What came of one job."""

    __slots__ = ("error", "forced", "next_masked", "state")

    def __init__(
        self, state: MaskState, error: str = "", next_masked: int = 0, forced: array[int] | None = None
    ) -> None:
        """Takes what is to be known of a job.

        Args:
            state: What came of it.
            error: For the caller; "" unless the grammar failed.
            next_masked: Position of the next draw that may have a mask.
            forced: Tokens that must be drawn, from the job's draw on, which the place follows
                already; None: it may be one of several.
        """
        self.state = state
        self.error = error
        self.next_masked = next_masked
        self.forced = forced


MASKED = MaskOutcome(MaskState.MASKED)
COMPLETE = MaskOutcome(MaskState.COMPLETE)
