"""Reads and checks the group of each input of a quantized layer, where they are in any order.

Owns the reading of g_idx, some KB a layer, which is looked at before torch is loaded: how weights
are stored side by side, and so how much memory they take, depends on whether their inputs are in
the same order. numpy takes a tenth of a second to import, for which only who opens such a folder
waits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.formats.layer_format import LayerFormat, Role
from headrace_model_folder.formats.quantization_config import FolderQuantization
from headrace_model_folder.safetensors_header import TensorRecord, read_tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def with_input_orders(
    folder: pathlib.Path, quantization: FolderQuantization, tensors: Mapping[str, TensorRecord]
) -> FolderQuantization:
    """Returns the quantization with the order of each layer's inputs noted in its format.

    Args:
        folder: The model folder.
        quantization: What config.json says of its layers; the tensors agree with it.
        tensors: Name -> where the tensor lies.

    Raises:
        InvalidModelFolder: A g_idx names a group that there is not, groups are not of their size,
            or inputs are in an order though config.json says that they are not; file and tensor are
            named.
    """
    layers = {
        layer: dataclasses.replace(form, order_digest=_order(folder, layer, form, tensors))
        for layer, form in quantization.layers.items()
    }
    return dataclasses.replace(quantization, layers=layers)


def _order(folder: pathlib.Path, layer: str, form: LayerFormat, tensors: Mapping[str, TensorRecord]) -> str:
    """A digest of the order; "" where inputs of a group are neighbours."""
    # The sizes are the folder's own by now, and only the tensor's name is asked for.
    suffixes = [tensor.suffix for tensor in form.tensors(32, 32) if tensor.role is Role.ORDER]
    name = f"{layer}.{suffixes[0]}" if suffixes else ""
    if name not in tensors:
        return ""
    import numpy as np

    record = tensors[name]
    groups = np.frombuffer(read_tensor(folder, name, record), np.dtype("<i4"))
    group_size = form.group_size or len(groups)
    if (groups == np.arange(len(groups)) // group_size).all() or (groups == -1).all():
        return ""
    if not form.is_ordered:
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(name)} puts inputs into other groups than their neighbours', config.json "
            "says that none are"
        )
    _check(name, record, groups, group_size)
    return hashlib.sha256(groups.tobytes()).hexdigest()[:16]


def _check(name: str, record: TensorRecord, groups: npt.NDArray[np.int32], group_size: int) -> None:
    import numpy as np

    num_groups = len(groups) // group_size
    outside = groups[(groups < 0) | (groups >= num_groups)]
    if len(outside):
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(name)} names group {int(outside[0])}, there are 0 to {num_groups - 1}"
        )
    counts = np.bincount(groups, minlength=num_groups)
    wrong = np.flatnonzero(counts != group_size)
    if len(wrong):
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(name)} has {int(counts[wrong[0]])} inputs in group {int(wrong[0])}, groups "
            f"have {group_size}"
        )
