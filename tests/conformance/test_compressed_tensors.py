"""Folders of compressed-tensors, read by transformers with the package of that name.

What `headrace quantize` writes is compared with the weights that we dequantize from it ourselves,
and folders whose inputs are rounded with what we make of them.

`slow`: needs the package, which CONFORMANCE_DOWNLOADS=1 allows to be had.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import pytest
import torch
from tests.conformance.programs import HERE, compressed_tensors, require_downloads, run
from tests.models.checkpoints import write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_quantized_folders import RECIPES, load
from tests.quantize.dequantized_folder import dequantized, transformers_model
from tests.quantize.quantize_parts import DRAFT, quantize, request, write_text
from tests.support.quantized_folders import Quantized, quantize_folder

from headrace_quantize.rounding.numbers import NumberFormat

pytestmark = pytest.mark.slow

# Name -> family of a random model, or the trained draft; options; whether it has to be dequantized
# while it is loaded.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gptq": ("draft", {"method": "gptq"}, False),
    "gptq-act-order": ("draft", {"method": "gptq", "act_order": True}, False),
    "awq": ("draft", {"method": "awq"}, False),
    "awq-kept": ("draft", {"method": "awq", "keep": ("down_proj", "model.layers.0.*")}, False),
    "int8": ("draft", {"method": "gptq", "bits": 8, "group_size": "channel"}, False),
    "int8-groups": ("draft", {"method": "rtn", "bits": 8}, False),
    "llama-biases-channel": ("llama-biases", {"method": "rtn", "group_size": "channel"}, False),
    "qwen2-channel": ("qwen2", {"method": "rtn", "group_size": "channel"}, False),
    "qwen3-tied-kept": ("qwen3-tied-bias", {"method": "rtn", "keep": ("down_proj",)}, False),
    "wide": ("llama-wide", {"method": "rtn"}, False),
    # The package leaves zero points unpacked where it lays out an empty model, and then finds those
    # of the file to be of another shape.
    "zeros": ("draft", {"method": "gptq", "symmetric": False}, True),
    "zeros-awq": ("draft", {"method": "awq", "symmetric": False}, True),
    "zeros-channel": ("qwen2", {"method": "rtn", "symmetric": False, "group_size": "channel"}, True),
    "zeros-int8": ("llama-wide", {"method": "rtn", "symmetric": False, "bits": 8}, True),
    # Otherwise activations are rounded, too.
    "fp8": ("draft", {"method": "rtn", "scheme": "fp8", "group_size": None}, True),
    "fp8-qwen3": ("qwen3", {"method": "rtn", "scheme": "fp8", "group_size": None}, True),
}
IDS = torch.randint(0, 96, (3, 50), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """All cases, quantized, with the logits of transformers beside them."""
    require_downloads()
    root = tmp_path_factory.mktemp("folders")
    text = str(write_text(root, 100))
    for name, (model, options, _) in CASES.items():
        if model != "draft" and not (root / model).exists():
            write_checkpoint(root / model, model)
        calibration = (text,) if model == "draft" else ()
        original = DRAFT if model == "draft" else root / model
        quantize(request(original, root / name, calibration=calibration, **options))
    torch.save(IDS, root / "ids")
    named = [f"dequantize:{root / name}" if late else str(root / name) for name, (_, _, late) in CASES.items()]
    search = os.pathsep.join([str(compressed_tensors()), *sys.path])
    run(sys.executable, HERE / "transformers_logits.py", root / "ids", *named, PYTHONPATH=search)
    return root


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_transformers_finds_the_logits_of_the_dequantized_weights(folders: pathlib.Path, name: str) -> None:
    model, options, _ = CASES[name]
    original = DRAFT if model == "draft" else folders / model
    is_float = options.get("scheme") == "fp8"
    bits = 8 if is_float else options.get("bits", 4)
    form = NumberFormat(bits, options.get("symmetric", True), is_float, torch.float32)
    expected = transformers_model(original, dequantized(folders / name, form))(IDS).logits
    found = torch.load(folders / f"{name}.logits")
    plain = transformers_model(original, None)(IDS).logits
    # It dequantizes in the type of the scales, in the draft model bf16: 2^-9 of each weight.
    # Quantizing changes more by far, which shows that the bound tells one from the other.
    assert (found - expected).norm() < 0.1 * (plain - expected).norm()
    if model != "draft":
        assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3)


ROUNDING = (
    "int8",
    "int8 static",
    "int8 dynamic with zero points",
    "int8 static with zero points",
    "int8 groups dynamic",
    "fp8 rows",
    "fp8 static",
    "fp8 blocks dynamic",
)
# Of the 150 tokens that follow the rows of ids.
_LEAST_EQUAL = 0.95


@pytest.fixture(scope="module")
def rounding_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Quantized]:
    """Folders of random models that round inputs, with the logits of transformers beside them."""
    require_downloads()
    root = tmp_path_factory.mktemp("rounding")
    # Inputs of all layers are multiples of a group of 128: the package takes no part of one.
    write_checkpoint(root / "source", "llama-whole-blocks")
    made = {}
    for name in ROUNDING:
        (root / name).mkdir()
        made[name] = quantize_folder(root / "source", root / name, RECIPES[name])
    torch.save(IDS, root / "ids")
    search = os.pathsep.join([str(compressed_tensors()), *sys.path])
    paths = [str(folder.path) for folder in made.values()]
    run(sys.executable, HERE / "transformers_logits.py", root / "ids", *paths, PYTHONPATH=search)
    return made


def served_logits(folder: pathlib.Path) -> torch.Tensor:
    model = load(folder)
    return torch.stack([PagedDriver(model).step([Row(row.tolist())], [len(row)])[0] for row in IDS])


@pytest.mark.parametrize("name", ROUNDING)
def test_inputs_are_rounded_as_the_package_rounds_them(rounding_folders: dict[str, Quantized], name: str) -> None:
    folder = rounding_folders[name]
    theirs = torch.load(f"{folder.path}.logits")
    found, kept = served_logits(folder.path), served_logits(folder.plain)
    # Sums are in another order, so a few inputs are rounded to the next number; in random models
    # one of them moves all that follow.
    assert (found - theirs).norm() < 0.5 * (kept - theirs).norm()
    assert (found.argmax(-1) == theirs.argmax(-1)).float().mean() > _LEAST_EQUAL
