"""LongRoPE's two sets of factors.

A server takes the short ones where no request may go beyond the original context, else the long
ones for all.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from tests.models.checkpoints import LONGROPE, ignore_progress, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.support.model_builds import load_model
from transformers import AutoModelForCausalLM

from headrace_model_folder import ModelFolder

ORIGINAL = 64
# fp32, with sums in another order.
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=[{}, {"attention_factor": 1.25}, {"factor": 3.0}], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("longrope")
    write_checkpoint(path, "llama-longrope")
    config = json.loads((path / "config.json").read_text())
    # As Phi-3's folders have it: the original context beside the factors, not among them.
    config |= {"rope_scaling": {"type": "longrope", **LONGROPE, **request.param}, "rope_theta": 1000.0}
    config["original_max_position_embeddings"] = ORIGINAL
    del config["rope_parameters"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def tokens(count: int) -> list[int]:
    return [(11 * index) % 89 + 1 for index in range(count)]


@torch.inference_mode()
def transformers_logits(path: pathlib.Path, count: int) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found: torch.Tensor = model(torch.tensor([tokens(count)])).logits[0]
    return found


def served_logits(path: pathlib.Path, count: int, max_position: int | None) -> torch.Tensor:
    opened = ModelFolder.open(path)
    about = (torch.float32, torch.device("cpu"), "folder", 0, ignore_progress, max_position)
    driver = PagedDriver(load_model(opened, opened.config, *about))  # type: ignore[arg-type]
    return driver.step([Row(tokens(count))], [count])[0]


def test_beyond_the_original_context_the_long_factors_rotate(folder: pathlib.Path) -> None:
    for max_position in (None, ORIGINAL + 40):
        found = served_logits(folder, ORIGINAL + 30, max_position)
        torch.testing.assert_close(found, transformers_logits(folder, ORIGINAL + 30), atol=TOLERANCE, rtol=0)


def test_a_server_of_the_original_context_takes_the_short_factors(folder: pathlib.Path) -> None:
    expected = transformers_logits(folder, 50)
    torch.testing.assert_close(served_logits(folder, 50, ORIGINAL), expected, atol=TOLERANCE, rtol=0)
    # One that allows longer requests rotates all alike.
    assert float((served_logits(folder, 50, ORIGINAL + 1) - expected).abs().max()) > 100 * TOLERANCE
