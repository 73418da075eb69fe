"""What a worker gets of the ranks that share its model, as arguments: without torch."""

from __future__ import annotations

from typing import NamedTuple


class RankLinks(NamedTuple):
    """Of a worker that is one of several."""

    rank: int
    # Descriptor of the anonymous file in which ranks find each other.
    store: int
    # Descriptor of the board on which ranks tell how far they are (`rank_board`).
    board: int
