"""Logits of one rank against those of two and four, with weights and caches of few bits too.

Token for token in fp32 on a CPU, and on cards no further from the exact ones than one card's are.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from benchmarks import rank_processes
from tests.parallel.forced_logits import CASES, Case, forced

from headrace_backend.weights.placement import ALONE
from headrace_model_folder import ModelFolder

# Two key/value heads: of four ranks, two have the same one.
_SIZES: dict[str, Any] = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8)
_SIZES |= dict(head_dim=64, num_key_value_heads=2, vocab_size=2048, max_position_embeddings=512)
_SIZES |= dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
# Sums of a layer are rounded once more, of several parts.
_SLACK = 1.25


class Answers(NamedTuple):
    """Logits of one case and number of ranks."""

    logits: np.ndarray
    tokens: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("logits") / "llama"
    torch.manual_seed(0)
    # Larger than usual: random models with small weights hardly depend on their context.
    config = transformers.LlamaConfig(**_SIZES, initializer_range=0.08)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Qwen3-MoE whose experts two and four ranks divide."""
    path = tmp_path_factory.mktemp("logits") / "experts"
    torch.manual_seed(0)
    experts = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=128)
    config = transformers.Qwen3MoeConfig(**_SIZES, **experts, initializer_range=0.08)
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def answers(folder: pathlib.Path, device: str, tp: int, cases: Sequence[str]) -> dict[str, Answers]:
    """All cases by one group of so many ranks."""
    arguments = ["--device", device, "--folder", str(folder), "--cases", ",".join(cases), "--out", str(folder.parent)]
    found = list(rank_processes.results("tests.parallel.forced_logits", tp, arguments))
    assert [line["case"] for line in found] == list(cases)
    return {
        line["case"]: Answers(np.load(folder.parent / f"{tp}-{line['case']}.npy"), line["tokens"]) for line in found
    }


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# Two plain ranks are processes in test_rank_processes, ranks of all formats threads in
# test_shared_folders, test_sharded_models and test_cut_steps.
@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_of_a_cpu_draw_the_tokens_of_one(folder: pathlib.Path, tp: int) -> None:
    cases = ["plain", "kv-fp8", "kv-int8", "fp8-kv-fp8"] if tp == 2 else ["int4-32-kv-int8", "int8-kv-int8"]
    shared, opened, device = answers(folder, "cpu", tp, cases), ModelFolder.open(folder), torch.device("cpu")
    alone = {name: Answers(*forced(CASES[name], opened, device, ALONE)) for name in cases}
    for name in cases:
        # Every rank's numbers are a slice of one's: groups, scales of whole outputs, and of a token
        # and head.
        assert shared[name].tokens == alone[name].tokens, name
        # A number of the cache that lies between two of its type may become the other one.
        limit = 1e-2 if CASES[name].kv_dtype != "auto" else 1e-4
        assert distance(shared[name].logits, alone[name].logits) < limit, name


def each_alone(folder: pathlib.Path, device: str, cases: Sequence[str]) -> dict[str, Answers]:
    """Each case by one rank, a process for each case.

    Most of their time is compiling kernels, for which each has a core; on a card they are small.
    """
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        found = pool.map(lambda name: answers(folder, device, 1, [name]), cases)
    return {name: answer for each in found for name, answer in each.items()}


def on_cards(
    folder: pathlib.Path, alone: Sequence[str], shared: Sequence[str]
) -> tuple[np.ndarray, dict[int, dict[str, Answers]]]:
    """Exact logits of the plain case, and those of one card and of two.

    One card and two are asked at once where there are three, and the CPU meanwhile.
    """
    has_third = torch.cuda.device_count() > 2
    with concurrent.futures.ThreadPoolExecutor(2 if has_third else 1) as pool:
        one = pool.submit(each_alone, folder, "cuda:2" if has_third else "cuda", alone)
        two = pool.submit(answers, folder, "cuda", 2, shared)
        exact, _ = forced(Case(), ModelFolder.open(folder), torch.device("cpu"), ALONE)
    return exact, {1: one.result(), 2: two.result()}


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA GPUs")
@pytest.mark.timeout(900)
def test_cards_are_as_exact_as_one(folder: pathlib.Path) -> None:
    # Caches of few bits alone are among these, and this model has no experts.
    most = [name for name in CASES if name not in ("kv-fp8", "kv-int8", "experts")]
    has_four = torch.cuda.device_count() >= 4
    exact, found = on_cards(folder, most, ["plain", "int4", "fp8-kv-fp8"] if has_four else most)
    if has_four:
        found[4] = answers(folder, "cuda", 4, most)
    rounding = distance(found[1]["plain"].logits, exact)
    shared_cases = [(tp, name) for tp, cases in found.items() if tp > 1 for name in cases]
    wrong = []
    for tp, name in shared_cases:
        shared, alone = found[tp][name], found[1][name]
        error, own = distance(shared.logits, exact), distance(alone.logits, exact)
        apart = distance(shared.logits, alone.logits)
        equal = sum(map(int.__eq__, shared.tokens, alone.tokens)) / len(alone.tokens)
        # What is a slice of the same numbers differs by the rounding of sums, however far the
        # numbers are from the exact ones.
        limit = 4 * rounding if name in ("plain", "int4") else own
        is_wrong = error > _SLACK * own or apart > limit
        figures = (
            f"off by {error:.2e}, tp 1 by {own:.2e}; apart {apart:.2e}, limit {limit:.2e}; {equal:.0%} of the tokens"
        )
        print(f"tp {tp} {name}: {figures}{' WRONG' if is_wrong else ''}")
        wrong += [f"tp {tp} {name}"] if is_wrong else []
    assert not wrong


# Ranks as threads are in test_sharded_models.
@pytest.mark.slow
def test_ranks_of_a_cpu_with_whole_experts_draw_the_tokens_of_one(mixture: pathlib.Path) -> None:
    shared = answers(mixture, "cpu", 2, ["plain", "experts"])
    alone = Answers(*forced(Case(), ModelFolder.open(mixture), torch.device("cpu"), ALONE))
    for found in shared.values():
        assert found.tokens == alone.tokens
        assert distance(found.logits, alone.logits) < 1e-4


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA GPUs")
@pytest.mark.timeout(600)
def test_cards_with_whole_experts_are_as_exact_as_one(mixture: pathlib.Path) -> None:
    exact, found = on_cards(mixture, ["plain"], ["plain", "experts"])
    own = distance(found[1]["plain"].logits, exact)
    for name, shared in found[2].items():
        error = distance(shared.logits, exact)
        print(f"tp 2 {name}: off by {error:.2e}, tp 1 by {own:.2e}")
        # Two experts that are nearly as likely may change places on either side.
        assert error < 2 * own, name
