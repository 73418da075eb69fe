"""Layers of files in blocks (GGUF, NF4) that are packed in another way than stated are named.

Correctly packed ones never are, whatever their type.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import torch
from tests.support.bitsandbytes_folder import write
from tests.support.gguf_numbers import BLOCK_KINDS, KINDS, quantize
from tests.support.gguf_writer import Gguf, from_folder
from tests.support.running_server import DEMO

from headrace_backend.packing.__main__ import examined
from headrace_backend.packing.faults import packing_faults
from headrace_backend.packing.findings import block_findings
from headrace_kernels.weight_formats.block_weight import NF4_KINDS, BlockKind, allocate
from headrace_kernels.weight_formats.gguf_blocks import FILE_BLOCKS, store_file_rows
from headrace_kernels.weight_formats.nf4 import quantize_rows

Bytes = npt.NDArray[np.uint8]
LAYER = "model.layers.3.mlp.down_proj"
IN_FILE = "blk.3.ffn_down.weight"


def nibbles_exchanged(packed: Bytes) -> Bytes:
    return packed >> 4 | packed << 4


def nibbles_in_sequence(packed: Bytes) -> Bytes:
    """Neighbours share a byte, where inputs i and i + 16 should."""
    numbers = np.concatenate([packed & 15, packed >> 4], -1)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def one_more(packed: Bytes) -> Bytes:
    return np.minimum((packed >> 4) + 1, 15) << 4 | np.minimum((packed & 15) + 1, 15)


def rows_below(values: Bytes) -> Bytes:
    return np.roll(values, 1, 0)


Change = Callable[[Bytes], Bytes]


@pytest.fixture(scope="module")
def files() -> dict[str, Gguf]:
    return {kind: from_folder(DEMO, kind)[0] for kind in ("Q4_0", "Q4_1", "Q8_0")}


def damaged(gguf: Gguf, part: slice, change: Change) -> Gguf:
    """With some bytes of each block of one tensor changed."""
    kind, shape, data = gguf.tensors[IN_FILE]
    blocks = np.frombuffer(data, np.uint8).reshape(shape[0], -1, KINDS[kind].num_bytes).copy()
    blocks[:, :, part] = change(blocks[:, :, part])
    return dataclasses.replace(gguf, tensors={**gguf.tensors, IN_FILE: (kind, shape, blocks.tobytes())})


@pytest.mark.slow  # Gaussian layers are let pass below.
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_trained_model_is_let_pass(files: dict[str, Gguf], kind: str, tmp_path: pathlib.Path) -> None:
    answer = examined(files[kind].write(tmp_path / "model.gguf"), "cpu")
    assert answer.num_layers and (answer.faults, answer.refused) == ([], "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "part", "change", "said"),
    [
        ("Q4_0", slice(2, 18), nibbles_exchanged, "if inputs of a block are in another order, the upper halves"),
        ("Q4_0", slice(2, 18), nibbles_in_sequence, "if inputs of a block are in another order, from neighbours"),
        ("Q4_0", slice(2, 18), one_more, "steps off their zero points on average, more than 0.5"),
        ("Q4_0", slice(0, 2), rows_below, "its scales"),
        ("Q4_1", slice(4, 20), nibbles_exchanged, "if inputs of a block are in another order, the upper halves"),
        ("Q4_1", slice(4, 20), one_more, "steps off their zero points on average, more than 0.5"),
        ("Q4_1", slice(2, 4), np.zeros_like, "steps off their zero points on average, more than 0.5"),
        ("Q8_0", slice(0, 2), rows_below, "its scales"),
    ],
)
def test_layers_of_a_file_that_are_packed_wrongly_are_named(
    files: dict[str, Gguf], kind: str, part: slice, change: Change, said: str, tmp_path: pathlib.Path
) -> None:
    file = damaged(files[kind], part, change).write(tmp_path / "model.gguf")
    answer = examined(file, "cpu")
    assert not answer.refused
    assert any(f"layer '{LAYER}'" in fault and said in fault for fault in answer.faults), answer.faults


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, pathlib.Path]:
    """The demo model in NF4, by whether scales are in 8 bits."""
    made = {double: tmp_path_factory.mktemp("nf4") for double in (True, False)}
    for double, folder in made.items():
        write(DEMO, folder, double)
    return made


@pytest.mark.slow  # Gaussian layers are let pass below.
@pytest.mark.parametrize("double", [True, False])
def test_a_trained_model_in_nf4_is_let_pass(folders: dict[bool, pathlib.Path], double: bool) -> None:
    answer = examined(folders[double], "cpu")
    assert answer.num_layers and (answer.faults, answer.refused) == ([], "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("double", "end", "change", "said"),
    [
        (True, "", nibbles_exchanged, f"layer '{LAYER}': the sizes of its inputs go with those of gate_proj and up"),
        (False, "", one_more, f"layer '{LAYER}': its numbers are +"),
        (True, ".absmax", rows_below, f"layer '{LAYER}': its scales"),
        (False, ".absmax", rows_below, f"layer '{LAYER}': its scales"),
        (True, ".nested_absmax", np.negative, f"tensor '{LAYER}.weight' holds a scale that is negative"),
        (True, ".absmax", np.zeros_like, f"tensor '{LAYER}.weight' holds a scale that is negative"),
        (False, ".absmax", np.negative, f"tensor '{LAYER}.weight' holds a scale that is negative"),
    ],
)
def test_layers_of_a_folder_that_are_packed_wrongly_are_named(
    folders: dict[bool, pathlib.Path],
    double: bool,
    end: str,
    change: Callable[[Any], Any],
    said: str,
    tmp_path: pathlib.Path,
) -> None:
    for file in folders[double].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = dict(safetensors.numpy.load_file(folders[double] / "model.safetensors"))
    tensors[f"{LAYER}.weight{end}"] = change(tensors[f"{LAYER}.weight{end}"])
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    answer = examined(tmp_path, "cpu")
    # What can't be a scale no server loads either.
    assert bool(answer.refused) == said.startswith("tensor")
    assert any(said in line for line in (*answer.faults, answer.refused)), answer


@pytest.mark.parametrize("kind", [BlockKind[name] for name in BLOCK_KINDS] + [BlockKind.NF4])
@pytest.mark.parametrize("shift", [0.0, 0.05])
def test_gaussian_layers_are_let_pass(kind: BlockKind, shift: float) -> None:
    draw = np.random.default_rng(2)
    weight = (draw.normal(shift, 1.0, (256, 512)) * np.exp(draw.normal(0, 0.3, (1, 512)))).astype(np.float32)
    target = allocate(kind, 256, 512, torch.float32, torch.device("cpu"))
    if kind in NF4_KINDS:
        quantize_rows(torch.from_numpy(weight), target, 0)
    else:
        store_file_rows(torch.from_numpy(quantize(kind.value, weight).reshape(256, -1)), target, 0)
    found = block_findings(target, range(256))
    assert found is not None and found.num_groups >= 256 * 512 / 64
    assert (
        packing_faults(
            {"model.layers.0.mlp.up_proj": found}, {"model.layers.0.post_attention_layernorm.weight": torch.rand(512)}
        )
        == []
    )


@pytest.mark.parametrize("kind", FILE_BLOCKS)
def test_bytes_without_any_meaning_are_let_pass(kind: BlockKind) -> None:
    """Files of random bits, as tests of formats have them: nothing can be said of them."""
    draw = np.random.default_rng(1)
    target = allocate(kind, 128, 512, torch.float32, torch.device("cpu"))
    inputs, num_bytes = FILE_BLOCKS[kind]
    rows = draw.integers(0, 256, (128, 512 // inputs * num_bytes), dtype=np.uint8)
    store_file_rows(torch.from_numpy(rows), target, 0)
    target.scales.fill_(0.01)
    if target.mins is not None:
        target.mins.fill_(0.02)
    found = block_findings(target, range(128))
    assert found is not None
    assert packing_faults({"model.layers.0.self_attn.o_proj": found}, {}) == []
