"""How a model's file has its weights: which modules are in blocks, and whose rows come in another
order.

Owns the way from the records of tensors, by checkpoint names, to what modules are made as and what
fills them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace_backend.weights.destination import RotatedRows
from headrace_backend.weights.placement import WeightTarget
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_model_folder import TensorRecord

_KINDS = {kind.value: kind for kind in BlockKind}


def block_kinds(
    records: Mapping[str, TensorRecord], stacked_params: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[BlockKind | None, ...]]:
    """Path of each module with a matrix -> how the file has the projections in it; None: plain.

    Args:
        records: By checkpoint name.
        stacked_params: A merged weight of ours -> the checkpoint's projections in it, in order.
    """
    merged_names = {part: (name, parts) for name, parts in stacked_params.items() for part in parts}
    kinds: dict[str, tuple[BlockKind | None, ...]] = {}
    for name, record in records.items():
        path, _, parameter = name.rpartition(".")
        if parameter != "weight" or len(record.shape) != 2:
            continue
        parent, _, last = path.rpartition(".")
        merged, parts = merged_names.get(last, (last, (last,)))
        names = [f"{parent}.{part}.weight" if parent else f"{part}.weight" for part in parts]
        kinds[f"{parent}.{merged}" if parent else merged] = tuple(_kind(records.get(name)) for name in names)
    return kinds


def _kind(record: TensorRecord | None) -> BlockKind | None:
    # A layer in the format of another tool has no weight of its own name.
    return None if record is None else _KINDS.get(record.dtype)


def with_rotated_rows(
    targets: Mapping[str, WeightTarget], records: Mapping[str, TensorRecord]
) -> dict[str, WeightTarget]:
    """The same targets, taking rows in the order in which the file has them."""
    return {name: _ordered(target, records[name].head_rows) for name, target in targets.items()}


def _ordered(target: WeightTarget, head_rows: int) -> WeightTarget:
    if not head_rows:
        return target
    assert target.rows.start % head_rows == 0
    return dataclasses.replace(target, destination=RotatedRows(target.destination, head_rows))
