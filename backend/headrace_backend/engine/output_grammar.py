"""What the engine knows of a grammar: each output has a place in it, from which masks come.

Owns the two interfaces and the words that cross. The engine is given a compiled grammar with a
request and looks into none: which tokens an output may draw is computed elsewhere, in threads
(`headrace_backend.structured_output`), from what the engine says has been drawn
(`scheduling.masks`).
"""

from __future__ import annotations

import enum
from typing import Protocol


class OutputGrammar(Protocol):
    """One output's place in its grammar. The engine only hands it on."""


class Grammar(Protocol):
    """A compiled grammar, which any number of outputs follow."""

    def new_output(self) -> OutputGrammar:
        """An output's place at the grammar's beginning."""


class MaskState(enum.Enum):
    """What came of asking for an output's mask."""

    # There is one.
    MASKED = enum.auto()
    # The grammar allows no further token, nor a stop token: the output is whole.
    COMPLETE = enum.auto()
    # The grammar can't go on. `MaskOutcome.error` says why.
    FAILED = enum.auto()


class MaskOutcome:
    """What came of one job."""

    __slots__ = ("error", "state")

    def __init__(self, state: MaskState, error: str = "") -> None:
        """`error` is for the caller; "" unless the grammar failed."""
        self.state = state
        self.error = error


MASKED = MaskOutcome(MaskState.MASKED)
COMPLETE = MaskOutcome(MaskState.COMPLETE)
