"""What is known of a GPU by its name and compute capability: whether it will do, and how well.

Owns the oldest generation that kernels run on, the cards on which something was measured, the
generations that kernels are compiled for in tests, and the words for all three. No torch, so that
`headrace doctor` says the same as a worker. What launch rules ask of a card is
`headrace_kernels.card`'s: they go by its memory, multiprocessors and instructions, and know no
card by its name.
"""

from __future__ import annotations

from typing import NamedTuple

# Below it the kernels' instructions are missing (bf16 arithmetic, asynchronous copies).
_OLDEST = (8, 0)
# From here on tensor cores multiply e4m3.
_OLDEST_WITH_FP8 = (8, 9)
# The only one whose library multiplies FP8 in blocks of 128 by 128.
_WITH_FP8_IN_BLOCKS = (9, 0)
# The cards that launch rules were chosen on, by parts of their names, and those that were measured
# with them.
_RULES_OF = "H200"
_MEASURED = ("H200", "H100")
# Generations that all kernels which they would launch are compiled for, without the card: A100; A10
# and RTX 3090; L40S, L4 and RTX 4090; H100 and H200.
_COMPILED = ((8, 0), (8, 6), (8, 9), (9, 0))


class Card(NamedTuple):
    """A GPU as its driver describes it."""

    name: str
    capability: tuple[int, int]

    @property
    def generation(self) -> str:
        """Its compute capability in words."""
        return "compute capability {}.{}".format(*self.capability)


def why_too_old(card: Card) -> str | None:
    """Why a card can't be used; None if it can."""
    if card.capability >= _OLDEST:
        return None
    return f"{card.name} has {card.generation}, the kernels need {_OLDEST[0]}.{_OLDEST[1]} or more"


def has_fp8_products(card: Card) -> bool:
    """Whether it multiplies FP8; other cards store it and multiply in 16 bits."""
    return card.capability >= _OLDEST_WITH_FP8


def unmeasured(card: Card) -> str | None:
    """What to expect of a card that nobody has measured; None for those that were."""
    if any(name in card.name for name in _MEASURED):
        return None
    tried = "compiled for it and not run on it" if card.capability in _COMPILED else "not tried on its generation"
    return (
        f"not measured on this card: {card.name}, {card.generation}; launch rules are those of {_RULES_OF}, kernels "
        f"are {tried}"
    )


def in_words(card: Card) -> str:
    """What an operator is to know of a card that is new enough: what was measured, and its FP8."""
    if _RULES_OF in card.name:
        measured = "launch rules were chosen on this card"
    elif unmeasured(card) is None:
        measured = f"measured with the launch rules of {_RULES_OF}"
    elif card.capability in _COMPILED:
        measured = "not measured on this card; kernels are compiled for it in tests"
    else:
        measured = "not measured on this card, nor compiled for its generation in tests"
    fp8 = "FP8 weights are multiplied as FP8" if has_fp8_products(card) else "FP8 weights are multiplied in 16 bits"
    if has_fp8_products(card) and card.capability != _WITH_FP8_IN_BLOCKS:
        fp8 += ", those in blocks in 16 bits"
    return f"{measured}; {fp8}"
