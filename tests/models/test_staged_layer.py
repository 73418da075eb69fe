"""A layer of a folder that another tool quantized, on its way into the server's layout.

The same in blocks of any size, and in few operations on a device that has to be reported of each.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.models.checkpoints import write_checkpoint
from tests.models.test_quantized_folders import RECIPES, bits, load
from tests.support.quantized_folders import quantize_folder
from torch.utils._python_dispatch import TorchDispatchMode

from headrace_backend.quantization import staged_layer
from headrace_backend.quantization.staged_layer import StagedLayer
from headrace_backend.quantization.stored_weight import StoredWeight
from headrace_backend.weights.checkpoint_files import DTYPES
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_model_folder import LayerFormat, Layout, TensorRecord


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("long")
    # 512 outputs of the largest layer: four blocks of 128.
    write_checkpoint(path, "llama-long")
    return path


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["gptq asymmetric", "gptq ordered", "awq", "packed asymmetric", "int8 groups", "fp8 rows", "fp8 blocks"]
)
def test_weights_are_the_same_in_blocks_of_any_size(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = quantize_folder(source, tmp_path, RECIPES[name])
    whole = bits(load(folder.path))
    monkeypatch.setattr(staged_layer, "_CPU_NUMBERS", 1)
    in_blocks = bits(load(folder.path))
    assert in_blocks.keys() == whole.keys()
    for place, part in whole.items():
        assert torch.equal(in_blocks[place], part), place


class Operations(TorchDispatchMode):
    """Counts what a device would be reported, without looks at the same memory in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not operation.is_view:
            self.counted[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("form", "most"),
    [
        pytest.param(LayerFormat(Layout.WHOLE, "fp8", "channel"), 100, id="fp8"),
        pytest.param(LayerFormat(Layout.WHOLE, "fp8", "block", scale_name="weight_scale_inv"), 100, id="fp8 blocks"),
        pytest.param(LayerFormat(Layout.WHOLE, "int8", "channel"), 600, id="int8"),
        pytest.param(LayerFormat(Layout.GPTQ, "int4", "group", 128, is_less_one=True), 900, id="gptq"),
    ],
)
def test_a_large_layer_takes_a_device_few_operations(form: LayerFormat, most: int) -> None:
    """Decodes half of a 70B model's largest layer on torch's device without memory.

    It is decoded as for a card.

    In blocks of 128 outputs it would be 600 to 4,900.
    """
    shape, inputs = (8192, 28672), range(14336)
    meta = torch.device("meta")
    weight = StoredWeight(form, [range(shape[0])], inputs, Placement(torch.bfloat16, meta))
    target = WeightTarget(weight.destination(range(shape[0])), range(shape[0]), inputs)
    records = {
        f"x.{tensor.suffix}": TensorRecord("f", tensor.dtypes[0], tensor.shapes[0], 0, 1)
        for tensor in form.tensors(*shape)
        if tensor.is_required
    }
    layer = StagedLayer("x", form, shape, target, records)
    with torch.inference_mode(), Operations() as operations:
        for part, to in layer.targets().items():
            rows = torch.empty(to.destination.shape, dtype=DTYPES[records[part].dtype], device=meta)
            to.destination.put(0, rows)
    assert 10 < operations.counted.total() <= most, operations.counted.most_common(5)
