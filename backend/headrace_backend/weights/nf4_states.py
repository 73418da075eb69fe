"""The scales that bitsandbytes keeps beside weights in NF4.

Read into the weights before their rows are.

Owns the check that the file's tables of numbers are NF4's. What the tensors are called and how
large they are is `headrace_model_folder`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_backend.weights.checkpoint_files import DTYPES, CheckpointFiles
from headrace_backend.weights.placement import WeightTarget
from headrace_kernels.weight_formats.block_weight import BlockWeight, nf4_numbers, scale_codes
from headrace_kernels.weight_formats.nf4 import BITSANDBYTES_NESTED, GROUP
from headrace_model_folder import InvalidModelFolder, ModelFolder, TensorRecord

_HOST = torch.device("cpu")
# Tables are fp32, written by several versions of the same arithmetic.
_TOLERANCE = 1e-6


def load_nf4_states(folder: ModelFolder, weights: Mapping[str, tuple[BlockWeight, WeightTarget]]) -> None:
    """Fills the scales of weights.

    Args:
        folder: Opened with its weights.
        weights: By checkpoint name, with the rows and columns of that tensor that each holds, and
            no others.

    Raises:
        InvalidModelFolder: A file is shorter than its header says, or a table is another one; file
            and tensor are named.
    """
    files = CheckpointFiles(folder.weights_folder)
    try:
        for name, (weight, target) in weights.items():
            _load(files, name, folder.tensors[name], weight, target)
    finally:
        files.close()


def _load(files: CheckpointFiles, name: str, record: TensorRecord, weight: BlockWeight, target: WeightTarget) -> None:
    state = record.nf4
    assert state is not None and target.columns is not None
    _check_table(files, f"{name}.quant_map", state.table, nf4_numbers(torch.float32, _HOST))
    # Blocks are counted along the rows of the whole tensor.
    in_row = record.shape[1] // GROUP
    first, end = (state.first_row + row for row in (target.rows.start, target.rows.stop))
    blocks = range(first * in_row, end * in_row)
    columns = slice(target.columns.start // GROUP, target.columns.stop // GROUP)
    absmax = _read(files, f"{name}.absmax", state.absmax, blocks).view(-1, in_row)[:, columns].t()
    if state.nested is None or state.nested_table is None:
        weight.scales.copy_(absmax)
        return
    assert weight.group_scales is not None and weight.mins is not None
    _check_table(files, f"{name}.nested_quant_map", state.nested_table, scale_codes(_HOST))
    weight.group_scales.copy_(absmax)
    nested = _read(files, f"{name}.nested_absmax", state.nested)
    firsts = torch.arange(blocks.start, blocks.stop).view(-1, in_row)[:, columns].flatten()[:: weight.nested]
    weight.scales.copy_(nested[firsts // BITSANDBYTES_NESTED])
    weight.mins.fill_(state.offset)


def _read(files: CheckpointFiles, name: str, record: TensorRecord, part: range | None = None) -> Tensor:
    """The numbers of a tensor, flat, or those of a part."""
    kept = range(math.prod(record.shape)) if part is None else part
    out = torch.empty(len(kept), dtype=DTYPES.get(record.dtype, torch.uint8))
    files.read(out, record.offset + kept.start * out.itemsize, record.file, name)
    return out


def _check_table(files: CheckpointFiles, name: str, record: TensorRecord, expected: Tensor) -> None:
    if not torch.allclose(_read(files, name, record), expected, rtol=0, atol=_TOLERANCE):
        raise InvalidModelFolder(f"{record.file}: tensor {name!r} is another table than NF4's")
