"""How a model's file has its weights: which modules are in blocks, whose rows are in another order.

Owns the way from the records of tensors, by checkpoint names, to what modules are made as and what
fills them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace_backend.weights.destination import OrderedRows
from headrace_backend.weights.mxfp4_rows import Mxfp4Rows
from headrace_backend.weights.placement import WeightTarget
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_model_folder import LayerFormat, TensorRecord
from headrace_model_folder.formats.mxfp4_config import MXFP4_FORMAT
from headrace_model_folder.gguf.header import MXFP4_TYPE

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


def mxfp4_formats(records: Mapping[str, TensorRecord]) -> dict[str, LayerFormat]:
    """Name of each projection that a GGUF file has in MXFP4, without its last word -> its format.

    Args:
        records: Checkpoint tensor name -> where it lies.
    """
    return {
        name.removesuffix(".weight"): MXFP4_FORMAT for name, record in records.items() if record.dtype == MXFP4_TYPE
    }


def as_in_file(targets: Mapping[str, WeightTarget], records: Mapping[str, TensorRecord]) -> dict[str, WeightTarget]:
    """Returns the targets, made to take rows in the order and form in which the file has them.

    Targets without a record of their own name stay as they are.
    """
    return {name: _as_in_file(target, records.get(name)) for name, target in targets.items()}


def _as_in_file(target: WeightTarget, record: TensorRecord | None) -> WeightTarget:
    if record is None:
        return target
    if record.dtype == MXFP4_TYPE:
        assert isinstance(target.destination, Mxfp4Rows), "experts alone are in MXFP4"
        return dataclasses.replace(target, destination=target.destination.file_blocks)
    if record.order is None:
        return target
    rows = OrderedRows(target.destination, record.order, target.rows, record.shape[0])
    return dataclasses.replace(target, destination=rows, rows=rows.read)
