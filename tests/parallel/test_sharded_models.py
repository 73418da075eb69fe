"""Models shared by several ranks compute what one rank computes.

Logits up to the order of additions, greedy tokens exactly, and every rank the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.models.checkpoints import ignore_progress, write_checkpoint
from tests.support.model_builds import load_model, weight_memory
from tests.support.rank_threads import ThreadCollectives, on_ranks
from tests.worker.driver import BLOCK_SIZE, Entry, admission, execute, id_bytes, make_model_runner, step

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_kernels.weight_formats.quantized_weight import QuantKind
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
# One model per thing that is shared out in its own way: biases, head norms, tied embeddings,
# one key/value head for all ranks, as many as query heads, windows, fused projections, experts,
# layers without rotation.
NAMES = (
    "llama-biases", "qwen3-tied-bias", "qwen2-window-tied", "llama-group-8", "llama-mha", "phi3-partial", "qwen3-moe",
    "smollm3-window-tied", "glm4-moe", "llama-uneven-tied",
)  # fmt: skip
# Layers that are not plain, whose steps are never cut: norms of outputs, of all heads together;
# layers that differ in their heads, inputs by layer; states.
NAMES_OF_WHOLE_STEPS = (
    "olmo2", "olmo3", "glm4", "gemma3-part", "gemma4", "gemma4-small", "gemma4-moe-wide", "qwen3.5",
    "qwen3.5-order-tied", "gemma4-uneven",
)  # fmt: skip
PROMPT = [17 * index % 89 + 3 for index in range(37)]
NUM_TOKENS = 8


@functools.cache
def _folder(base: pathlib.Path, name: str) -> ModelFolder:
    path = base / name
    write_checkpoint(path, name)
    return ModelFolder.open(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[ModelFolder]:
    return functools.partial(_folder, tmp_path_factory.mktemp("sharded"))


def load(
    folder: ModelFolder, shard: Shard = ALONE, scheme: Scheme | None = None, head: Scheme | None = None
) -> CausalLM:
    about = (folder, folder.config, torch.float32, CPU, "folder", 0, ignore_progress)
    return load_model(*about, scheme=scheme, shard=shard, head=head)  # type: ignore[arg-type]


class Run(NamedTuple):
    tokens: list[int]
    results: list[StepResult]
    # Of the first step.
    logits: torch.Tensor


def plans(**options: object) -> list[StepPlan]:
    """A prompt in two chunks, then tokens one by one.

    A second row beside it that starts later, on the prompt's first blocks (a prefix hit).
    """
    row = [admission(0, **options)]
    first = step([Entry(0, 0, PROMPT[:20])], row, {0: list(range(6))})
    second = step([Entry(0, 20, PROMPT[20:], (0,))])
    shared = step(
        [Entry(0, len(PROMPT), None, (0,), 1), Entry(1, BLOCK_SIZE, PROMPT[BLOCK_SIZE:], (1,))],
        [admission(1, **options)],
        {1: [0, 10, 11, 12, 13, 14]},
    )
    later = [
        step([Entry(0, len(PROMPT) + i, None, (0,), i + 1), Entry(1, len(PROMPT) + i - 1, None, (1,), i)])
        for i in range(1, NUM_TOKENS)
    ]
    return [first, second, shared, *later]


def run(
    folder: ModelFolder,
    scheme: Scheme | None,
    options: dict[str, object],
    shard: Shard = ALONE,
    head: Scheme | None = None,
) -> Run:
    model = load(folder, shard, scheme, head)
    runner = make_model_runner(model)
    hidden = runner.forward(step([Entry(7, 0, PROMPT[:5], (7,))], [admission(7)], {7: [20]}))
    with torch.inference_mode():
        logits = model.logits(hidden)
    results = [execute(runner, plan) for plan in plans(**options)]
    return Run([token for result in results for token in result.tokens.tolist()], results, logits)


def on_all_ranks(folder: ModelFolder, world_size: int, scheme: Scheme | None = None, **options: object) -> list[Run]:
    return on_ranks(world_size, lambda shard: run(folder, scheme, options, shard))


# Four ranks share out everything that two do.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 4) for name in (*NAMES, *NAMES_OF_WHOLE_STEPS)),
        (NAMES[0], 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in (*NAMES[1:], *NAMES_OF_WHOLE_STEPS)),
    ],
)
def test_ranks_draw_the_tokens_of_one(folders: functools.partial[ModelFolder], name: str, world_size: int) -> None:
    folder = folders(name)
    alone, ranks = run(folder, None, {}), on_all_ranks(folder, world_size)
    for rank in ranks:
        assert rank.tokens == alone.tokens
        # fp32, sums in another order.
        torch.testing.assert_close(rank.logits, alone.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rank.logits, ranks[0].logits, rtol=0, atol=0)


def whole_experts(shard: Shard) -> Shard:
    return dataclasses.replace(shard, whole_experts=True)


# Four ranks with one expert each; layers with and without experts, and a tied output layer.
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("qwen3-moe-dense-layers", 2),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("mixtral-wide", "glm4-moe", "gemma4-moe-wide")),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("gpt-oss-wide", "qwen3.5-moe-wide")),
    ],
)
def test_ranks_with_whole_experts_draw_the_tokens_of_one(
    folders: functools.partial[ModelFolder], name: str, world_size: int
) -> None:
    folder = folders(name)
    alone = run(folder, None, {})
    ranks = on_ranks(world_size, lambda shard: run(folder, None, {}, whole_experts(shard)))
    for rank in ranks:
        assert rank.tokens == alone.tokens
        # fp32, sums in another order.
        torch.testing.assert_close(rank.logits, alone.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rank.logits, ranks[0].logits, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", [None, "int4"])
def test_whole_experts_are_those_of_one_rank(folders: functools.partial[ModelFolder], scheme: str | None) -> None:
    """Their bytes are planned, and their numbers a slice of all experts' also where rounded."""
    folder, bits = folders("mixtral-wide"), SCHEMES[scheme] if scheme else None
    alone = load(folder, scheme=bits)
    for rank in range(2):
        shard = whole_experts(Shard(rank, 2))
        model = load(folder, shard, bits)
        planned = weight_memory(folder.config, torch.float32, bits, CPU, shard).weights
        assert planned == model.weight_bytes < 0.7 * alone.weight_bytes
        for name in ("gate_up_proj", "down_proj"):
            own, whole = (getattr(each.model.layers[1].mlp, name).weight.experts for each in (model, alone))
            for index in range(2):
                assert torch.equal(own.expert(index), whole.expert(2 * rank + index))


def test_a_shared_prefix_gives_the_same_tokens(folders: functools.partial[ModelFolder]) -> None:
    rank, _ = on_all_ranks(folders("llama-biases"), 2)
    tokens = [result.tokens.tolist() for result in rank.results]
    first = [step_tokens[0] for step_tokens in tokens[1:]]
    second = [step_tokens[1] for step_tokens in tokens[2:]]
    assert second == first[: len(second)]


EVERY_OPTION = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.01,
    "seed": 7,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "num_logprobs": 3,
    "min_tokens": 2,
    "stop_token_ids": id_bytes(5),
    "logit_bias_ids": id_bytes(9, 70),
    "logit_bias_values": np.array([2.0, -3.0], np.float32).tobytes(),
    "bad_words": (id_bytes(11), id_bytes(12, 13)),
    "prompt_ids": id_bytes(*PROMPT),
}
OPTIONS = {
    "temperature": {"temperature": 1.0, "seed": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "every": EVERY_OPTION,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_draws_are_those_of_one_rank(folders: functools.partial[ModelFolder], option: str) -> None:
    folder = folders("qwen3-tied-bias")
    alone, ranks = run(folder, None, OPTIONS[option]), on_all_ranks(folder, 2, **OPTIONS[option])
    for rank in ranks:
        assert rank.tokens == alone.tokens
        for found, expected in zip(rank.results, alone.results, strict=True):
            np.testing.assert_array_equal(found.logprob_ranks, expected.logprob_ranks)
            np.testing.assert_allclose(found.logprob_sampled, expected.logprob_sampled, atol=1e-4)
            np.testing.assert_array_equal(found.top_token_ids, expected.top_token_ids)


def test_prompt_logprobs_are_alike(folders: functools.partial[ModelFolder]) -> None:
    folder = folders("llama-mha")
    plan = step([Entry(0, 0, PROMPT, reported=PROMPT[1:], num_top=2)], [admission(0)], {0: list(range(6))})

    def reported(shard: Shard = ALONE) -> StepResult:
        model = load(folder, shard)
        return execute(make_model_runner(model), plan)

    alone = reported()
    for rank in on_ranks(2, reported):
        np.testing.assert_allclose(rank.prompt_sampled, alone.prompt_sampled, atol=1e-4)
        np.testing.assert_array_equal(rank.prompt_ranks, alone.prompt_ranks)


def test_only_candidates_travel_for_greedy_rows(folders: functools.partial[ModelFolder]) -> None:
    def num_calls(shard: Shard) -> tuple[int, int]:
        assert isinstance(shard.collectives, ThreadCollectives)
        model = load(folders("llama-mha"), shard)
        hidden = torch.ones(3, model.hidden_size)
        before = shard.collectives.num_calls
        tokens, finite = model.most_likely(hidden)
        calls = shard.collectives.num_calls - before
        assert finite.all() and tokens.tolist() == model.logits(hidden).argmax(dim=1).tolist()
        return calls, int(tokens[0])

    first, second = on_ranks(2, num_calls)
    assert first == second and first[0] == 1


@pytest.mark.parametrize("not_finite", [float("nan"), float("inf")])
def test_a_rank_with_logits_that_are_not_finite_spoils_the_row_on_all(
    folders: functools.partial[ModelFolder], not_finite: float
) -> None:
    def finite(shard: Shard) -> tuple[list[bool], list[bool]]:
        model = load(folders("llama-mha"), shard)
        if shard.rank == 1:
            model.lm_head.weight[5, 3] = not_finite
        hidden = torch.zeros(2, model.hidden_size)
        hidden[1, 3] = 1.0
        hidden[1, 4] = 1.0
        logits = model.logits(hidden[1:])
        assert not logits.isfinite().all()
        return model.most_likely(hidden)[1].tolist(), model.most_likely(hidden[1:])[1].tolist()

    for both, second in on_ranks(2, finite):
        assert both[1] is False and second == [False]


SCHEMES = {
    "int8": Scheme(QuantKind.INT8),
    "int4": Scheme(QuantKind.INT4, 32),
    "fp8": Scheme(QuantKind.FP8),
    "nf4": Scheme(BlockKind.NF4, 64),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("scheme", "world_size"), [(scheme, 2) for scheme in SCHEMES] + [(scheme, 4) for scheme in ("int8", "fp8")]
)
def test_quantized_weights_are_shared_out(
    folders: functools.partial[ModelFolder], scheme: str, world_size: int
) -> None:
    folder = folders("llama-wide-heads")
    alone, ranks = run(folder, SCHEMES[scheme], {}), on_all_ranks(folder, world_size, SCHEMES[scheme])
    assert all(rank.tokens == ranks[0].tokens for rank in ranks)
    if scheme == "nf4":
        # A nested scale per rank, which moves few numbers (1% of the weights' norm, of the 9% that
        # rounding costs either way).
        assert (ranks[0].logits - alone.logits).norm() < 0.06 * alone.logits.norm()
        return
    assert ranks[0].tokens == alone.tokens
    # The numbers are the same; fp32, sums in another order.
    torch.testing.assert_close(ranks[0].logits, alone.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES_OF_WHOLE_STEPS)
def test_layers_with_other_norms_are_quantized_and_planned_as_others(
    folders: functools.partial[ModelFolder], name: str
) -> None:
    folder, scheme = folders(name), SCHEMES["int8"]
    alone, ranks = run(folder, scheme, {}), on_all_ranks(folder, 2, scheme)
    for rank in ranks:
        assert rank.tokens == alone.tokens
        # The numbers are the same; fp32, sums in another order.
        torch.testing.assert_close(rank.logits, alone.logits, rtol=1e-4, atol=1e-4)
    for shard in (ALONE, Shard(0, 2), Shard(1, 2)):
        planned = weight_memory(folder.config, torch.float32, None, CPU, shard).weights
        assert planned == load(folder, shard).weight_bytes


@pytest.mark.parametrize("head", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen3-tied-bias", "llama-mha"])
def test_an_output_layer_of_8_bits_is_shared_out_by_tokens(
    folders: functools.partial[ModelFolder], name: str, head: str
) -> None:
    """A scale belongs to a token.

    So every rank's part is a slice of the whole, and logits are those of one rank.
    """
    folder, scheme = folders(name), SCHEMES[head]
    alone = run(folder, None, {}, head=scheme)
    ranks = on_ranks(2, lambda shard: run(folder, None, {}, shard, scheme))
    for rank in ranks:
        assert rank.tokens == alone.tokens
        # fp32, sums in another order in the layers.
        torch.testing.assert_close(rank.logits, alone.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rank.logits, ranks[0].logits, rtol=0, atol=0)
    for shard in (Shard(0, 2), Shard(1, 2)):
        planned = weight_memory(folder.config, torch.float32, None, CPU, shard, head=scheme).weights
        assert planned == load(folder, shard, head=scheme).weight_bytes


@pytest.mark.parametrize("scheme", [None, SCHEMES["int4"], SCHEMES["nf4"]])
def test_the_plan_knows_a_ranks_bytes(folders: functools.partial[ModelFolder], scheme: Scheme | None) -> None:
    folder = folders("llama-wide-heads")
    for rank in range(2):
        shard = Shard(rank, 2)
        planned = weight_memory(folder.config, torch.float32, scheme, CPU, shard).weights
        assert planned == load(folder, shard, scheme).weight_bytes < 0.6 * load(folder, scheme=scheme).weight_bytes


def test_rows_of_no_token_are_never_drawn(folders: functools.partial[ModelFolder]) -> None:
    """101 tokens on four ranks: the last one has three rows too many, whose numbers are 0."""
    folder = folders("llama-uneven-tied")

    def best(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        head = load(folder, shard).lm_head
        head.weight[: len(head._tokens)] = -1.0
        hidden = torch.ones(2, head.weight.shape[1])
        return head(hidden), head.most_likely(hidden)[0]

    for logits, tokens in on_ranks(4, best):
        assert logits.shape == (2, 101) and bool((logits == -64.0).all())
        assert bool((tokens < 101).all())
