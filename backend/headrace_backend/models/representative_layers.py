"""Which layers of a model are enough to launch every kernel that all of them launch.

Owns the choice, alike on all ranks. A layer's place in the model counts beside its kind: nothing is
pending before the first, and the last may leave tokens out. So a layer of each kind is taken from
between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from headrace_backend.parallel.collectives import Collectives, agreed_any


def representative_places(kinds: Sequence[Hashable], together: Collectives | None) -> list[int]:
    """The first layer, the last, and of those between one of each kind; in order.

    Args:
        kinds: `DecoderLayer.launch_kind` of every layer, on this rank.
        together: The ranks' collectives; None: one rank. All ranks must ask: a layer that any of
            them needs is taken by all, as they compute it together.
    """
    last = len(kinds) - 1
    # Of places with the same kind the dictionary keeps the one that comes last.
    between = {kinds[place]: place for place in range(last - 1, 0, -1)}
    taken = {0, last, *between.values()}
    needed = agreed_any(together, [place in taken for place in range(len(kinds))])
    return [place for place, is_needed in enumerate(needed) if is_needed]
