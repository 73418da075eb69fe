"""How a model's file has its weights: which modules are in blocks.

Whose rows come in another order.

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


def block_kinds(records: Mapping[str, TensorRecord]) -> dict[str, BlockKind]:
    """Name of each matrix that is in blocks, without its last word -> the kind of its blocks.

    Args:
        records: Checkpoint tensor name -> where it lies.
    """
    return {
        name.removesuffix(".weight"): _KINDS[record.dtype]
        for name, record in records.items()
        if name.endswith(".weight") and len(record.shape) == 2 and record.dtype in _KINDS
    }


def with_rotated_rows(
    targets: Mapping[str, WeightTarget], records: Mapping[str, TensorRecord]
) -> dict[str, WeightTarget]:
    """Returns the targets, made to take rows in the order in which the file has them.

    Targets without a record of their own name stay as they are.
    """
    head_rows = {name: records[name].head_rows for name in targets if name in records}
    return {name: _ordered(target, head_rows.get(name, 0)) for name, target in targets.items()}


def _ordered(target: WeightTarget, head_rows: int) -> WeightTarget:
    if not head_rows:
        return target
    assert target.rows.start % head_rows == 0
    return dataclasses.replace(target, destination=RotatedRows(target.destination, head_rows))
