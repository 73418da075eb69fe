"""Streams that enter layers are the same on one rank, on several, and in steps cut into pieces."""

from __future__ import annotations

import pytest
import torch
from tests.models.checkpoints import write_checkpoint
from tests.parallel.test_cut_steps import EVERY_STEP, late
from tests.parallel.test_sharded_models import load
from tests.support.rank_threads import on_ranks
from tests.worker.driver import Entry, admission, make_runner, step

from headrace_backend.parallel.collectives import PieceRule
from headrace_backend.weights.placement import ALONE, Shard
from headrace_model_folder import ModelFolder

PROMPT = [17 * index % 89 + 3 for index in range(21)]
LAYERS = (0, 2, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("taps") / "llama"
    write_checkpoint(path, "llama-biases")
    return ModelFolder.open(path)


def streams(folder: ModelFolder, shard: Shard, fuses: bool = False) -> torch.Tensor:
    """What a rank's model leaves of a prompt; in layers of four products if it fuses."""
    model = load(folder, shard)
    model.model.fuses = lambda num_tokens: fuses  # type: ignore[method-assign]  # decided by the card
    found = model.tap_streams(LAYERS, 32)
    runner = make_runner(model, model.num_layers, model.num_kv_heads, model.head_dim)
    with torch.inference_mode():
        runner.forward(step([Entry(0, 0, PROMPT, (0,))], [admission(0)], {0: [0, 1]}))
    assert not found[len(PROMPT) :].any()
    return found[: len(PROMPT)]


@pytest.fixture(scope="module")
def expected(folder: ModelFolder) -> torch.Tensor:
    """What transformers computes; its first hidden state is the embedding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer][0] for layer in LAYERS], dim=-1)


@pytest.mark.parametrize("fuses", [False, True])
def test_one_rank_leaves_what_enters_its_layers(folder: ModelFolder, expected: torch.Tensor, fuses: bool) -> None:
    torch.testing.assert_close(streams(folder, ALONE, fuses), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [None, EVERY_STEP], ids=["whole", "cut"])
def test_each_of_several_ranks_leaves_the_whole_streams(
    folder: ModelFolder, expected: torch.Tensor, rule: PieceRule | None
) -> None:
    def of_rank(shard: Shard) -> torch.Tensor:
        rank, collectives = late(shard, rule)
        found = streams(folder, rank)
        assert bool(collectives.begun_rows) == (rule is not None)
        return found

    for found in on_ranks(2, of_rank):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
