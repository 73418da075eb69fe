"""A section of an output in which the model reasons before it answers.

Owns the value as it travels: the tokens by which such a section is known, and how long it may be.
Services find the markers in a model's folder; the engine counts the section's tokens and ends it
when its budget is spent. What the value must be is `reasoning_rules`.
"""

from __future__ import annotations

import msgspec


class Reasoning(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The markers of a model's reasoning, and the budget of a request for it.

    An output has one section, or several where it `repeats`: from a start marker, or from the
    output's beginning where the prompt ends inside one, to an end marker. A structured output
    begins behind the first.
    """

    # Tokens that begin a section, 1 to 32; may be empty where the prompt ends inside one.
    start_ids: tuple[int, ...]
    # Tokens that end a section, 1 to 32. They are forced when the budget is spent.
    end_ids: tuple[int, ...]
    # Most tokens of the section, markers not counted: 0 to the context less 1; None: no budget.
    max_tokens: int | None = None
    # Whether the prompt ends inside a section.
    begins_inside: bool = False
    # Tokens that are forced behind an end marker that was forced, 0 to 32: how the answer begins.
    # Nothing is a section any more behind them.
    closing_ids: tuple[int, ...] = ()
    # Whether sections may follow each other in one output; the budget is that of all. Before a
    # structured output there is one all the same.
    repeats: bool = False
