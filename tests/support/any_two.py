"""Combinations of parameters in which any two values meet, instead of all combinations.

A fault that two values make together shows; of three at a time only those that happen to be in the
list. Five values with four and three take 20 tests instead of 60.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def any_two_meet(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns combinations, one value of each parameter, in the order of the whole product.

    Each pair of values of two parameters is in at least one of them. The choice is equal in every
    process: of combinations that bring equally many new pairs, the first.
    """
    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    missing = {pair for combination in every for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(every, key=lambda combination: len(missing & _pairs(combination)))
        chosen.append(best)
        missing -= _pairs(best)
    return [tuple(values[i] for values, i in zip(parameters, places, strict=True)) for places in sorted(chosen)]


def _pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (parameter, value), each of another parameter."""
    return set(itertools.combinations(enumerate(combination), 2))
