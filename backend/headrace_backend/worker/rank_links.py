"""What a worker gets of its server and of the ranks that share its model, as arguments: without
torch.
"""

from __future__ import annotations

from typing import NamedTuple


class RankLinks(NamedTuple):
    """Which rank a worker is, and the descriptors that it inherits as such."""

    rank: int = 0
    # The board on which it reports how far it is (`rank_board`); None: nobody looks.
    board: int | None = None
    # The anonymous file in which several ranks find each other; None: there is one.
    store: int | None = None
