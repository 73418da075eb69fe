"""Search for the most likely outputs instead of sampling.

Owns the values as they travel, with unit, range and default. Ranges, and what beams cannot be
combined with, are checked by `selection_rules`; the search itself is the engine's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

EarlyStopping = Literal["heuristic", "full", "never"]
"""When a search ends whose hypotheses could still become longer.

    heuristic   when no running hypothesis would be better than the finished ones if it ended now
    full        as soon as as many hypotheses are finished as the search is wide
    never       when no running hypothesis can become better than the finished ones, at any length
"""


class BeamSearch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How wide a search is, and when it ends.

    Crosses to the engine by the order of its fields (`request.LAYOUT`).
    """

    # Hypotheses kept at each step. 1 to 16, or to the rows of the batch.
    width: int
    # Exponent of the length in tokens by which a hypothesis' log probability is divided. -10 to 10.
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "heuristic"
