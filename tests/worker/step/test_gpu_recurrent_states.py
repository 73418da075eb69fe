"""Recurrent layers in the runner for GPUs, padded to captured shapes and launched as it is."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.models.checkpoints import CONFIGS
from tests.support.engine_on_runner import greedy
from tests.worker.step.test_cache_groups import Made, prompt_of
from tests.worker.step.test_gpu_cache_groups import device, gpu_runner

from headrace_backend.engine.scheduling import checkpoint_places

__all__ = ["device"]


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["exact", "padded"])
def test_tokens_are_those_of_transformers(
    device: str, batch_sizes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Decodes, chunks and both, in rows that are used again; states of others' rows are NaN."""
    made = Made(tmp_path_factory.mktemp("recurrent"), CONFIGS["qwen3.5-order-tied"](), device)
    lengths, count = ((23, 3, 5), 4) if device == "cpu" else ((150, 3, 111, 21, 90), 24)
    prompts = [prompt_of(length, length) for length in lengths]
    make = functools.partial(gpu_runner, batch_sizes)
    engine = made.engine(38, make=make, max_num_seqs=2, max_num_batched_tokens=32)
    found = engine.outputs([greedy(prompt, count) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), count)] for prompt in prompts]
    captured = engine.worker.runner.num_captured
    assert (captured > 0) == bool(batch_sizes and device != "cpu")


def test_outputs_go_on_from_their_prompts_state(device: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Made(tmp_path_factory.mktemp("recurrent"), CONFIGS["qwen3.5-order-tied"](), device)
    asked = {"temperature": 0.9, "seed": 7, "n": 3}
    make = functools.partial(gpu_runner, (1, 2, 4))
    found = [
        made.engine(40, make=each, max_num_batched_tokens=32).outputs([greedy(prompt_of(19), 4, **asked)])
        for each in (make, functools.partial(gpu_runner, ()))
    ]
    assert found[0] == found[1] and len(set(map(tuple, found[0][0]))) == 3


def test_prompts_begin_behind_kept_states(
    device: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are copied between lines that captured steps have, and those that no step has."""
    monkeypatch.setattr(checkpoint_places, "LEAST_STOP_TOKENS", 16)
    made = Made(tmp_path_factory.mktemp("recurrent"), CONFIGS["qwen3.5-order-tied"](), device)
    make = functools.partial(gpu_runner, (1, 2, 4))
    engine = made.engine(40, make=make, max_num_batched_tokens=32, num_checkpoints=2)
    for prompt, hits in ((prompt_of(19), 0), ([*prompt_of(18), 5], 16)):
        before = engine.engine._scheduler.stats.num_prefix_hit_tokens
        assert engine.outputs([greedy(prompt, 2)]) == [[made.expected(tuple(prompt), 2)]]
        assert engine.engine._scheduler.stats.num_prefix_hit_tokens - before == hits


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["exact", "padded"])
def test_drafts_change_no_tokens(
    device: str, batch_sizes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Drafts from the row's own tokens, of which some are right, beside prompts in chunks."""
    made = Made(tmp_path_factory.mktemp("recurrent"), CONFIGS["qwen3.5-order-tied"](), device)
    lengths, count = ((6, 3), 8) if device == "cpu" else ((30, 3, 21, 9), 40)
    prompts = [prompt_of(length, length) * 3 for length in lengths]
    settings = {"tokens_per_row": 4, "speculate": "ngram", "speculate_tokens": "3"}
    make = functools.partial(gpu_runner, batch_sizes)
    engine = made.engine(60, make=make, max_num_seqs=2, max_num_batched_tokens=32, **settings)
    readers = engine.readers_of([greedy(prompt, count) for prompt in prompts])
    assert [reader.tokens[0] for reader in readers] == [made.expected(tuple(prompt), count) for prompt in prompts]
    accepted = [(reader.done.draft_tokens, reader.done.accepted_tokens) for reader in readers if reader.done]
    assert sum(drafts for drafts, _ in accepted) > sum(right for _, right in accepted) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_worker_of_a_card_has_states_in_its_graphs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The runner that start-up makes: chunks, a preemption, and outputs that share a prompt."""
    made = Made(tmp_path_factory.mktemp("recurrent"), CONFIGS["qwen3.5"](), "cuda:0")
    sampled = {"temperature": 0.9, "seed": 3, "n": 3}

    def outputs(**changes: object) -> list[list[list[int]]]:
        asked = [greedy(prompt_of(60, seed), 60) for seed in range(4)] + [greedy(prompt_of(37), 20, **sampled)]
        return made.engine(max_num_seqs=8, max_num_batched_tokens=64, num_checkpoints=4, **changes).outputs(asked)

    found = outputs(num_blocks=34)
    assert found == outputs(num_blocks=200)
    assert found[:4] == [[made.expected(tuple(prompt_of(60, seed)), 60)] for seed in range(4)]
