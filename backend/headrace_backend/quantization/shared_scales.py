"""Scales of whole rows of int8 and fp8 weights whose columns are shared out over ranks.

    first pass, over those layers alone -> LargestMagnitudes -maximum over the ranks->
    QuantizedRows.magnitudes, before the pass that quantizes

Owns which tensors are concerned and the meeting between the passes. Numbers and scales of a rank
are then to the bit its columns of what one rank has. Readers are threads and come in any order, so
ranks meet once, for all layers at a time. Nothing is read twice where all scales belong to what a
rank has: one rank, groups, layers shared out by outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace_backend.quantization.low_bit_weight import QuantizedRows
from headrace_backend.weights.destination import Destination
from headrace_backend.weights.placement import Shard, WeightTarget


class LargestMagnitudes(Destination):
    """Keeps nothing of a row but its largest magnitude."""

    def __init__(self, rows: Destination) -> None:
        """Takes what another destination will take."""
        self.shape, self.dtype, self.device = rows.shape, rows.dtype, rows.device
        # [num_rows]
        self.found = torch.zeros(self.shape[0], dtype=torch.float32, device=self.device)

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        self.found[first : first + len(rows)] = rows.to(self.device).abs().amax(1)


def share_scales(
    targets: Mapping[str, WeightTarget],
    shapes: Mapping[str, tuple[int, ...]],
    shard: Shard,
    fill: Callable[[Mapping[str, WeightTarget]], None],
) -> None:
    """Gives the parts of rows whose scales hold for whole rows the magnitudes of the whole.

    All ranks call it at the same place.

    Args:
        targets: Checkpoint tensor name -> where it goes; nothing has come there yet. The order is
            that of the model's modules, so the same on all ranks.
        shapes: Checkpoint tensor name -> its whole shape.
        shard: This rank.
        fill: Fills some targets from the tensors of their names. To be called outside of inference
            mode: readers' threads write what is made here, and are in none.

    Raises:
        PeerLost: Another rank is gone.
    """
    parts = {
        name: rows for name, target in targets.items() if (rows := _part_of_rows(target, shapes[name])) is not None
    }
    if not parts:
        return
    largest = {name: LargestMagnitudes(rows) for name, rows in parts.items()}
    fill({name: dataclasses.replace(targets[name], destination=into) for name, into in largest.items()})
    shared = shard.together.maximum(torch.cat([into.found for into in largest.values()]))
    sizes = [len(into.found) for into in largest.values()]
    for rows, magnitudes in zip(parts.values(), torch.split(shared, sizes), strict=True):
        rows.magnitudes = magnitudes


def _part_of_rows(target: WeightTarget, shape: tuple[int, ...]) -> QuantizedRows | None:
    """What a target fills, if it has a scale for rows of which the target is but some columns."""
    rows = target.destination
    if not isinstance(rows, QuantizedRows) or rows.weight.is_grouped:
        return None
    return rows if target.columns is not None and len(target.columns) < shape[1] else None
