"""Logits and greedy tokens equal transformers' for folders that it wrote.

They do so however a prompt is cut and whatever else is in the batch.
"""

import numpy as np
import pytest
import torch
from tests.models.checkpoints import CONFIGS, VOCAB_SIZE, Pair, write_pair
from tests.models.paged_driver import PagedDriver, Row

# fp32 with sums in another order, over three layers with weights of standard deviation 0.2; logits
# are of order 10. A wrong mask, window or frequency is off by more than 0.1.
TOLERANCE = 2e-4


# They differ from others in their sizes alone, which blocks of quantized weights are to divide.
SIZES = (
    "llama-wide", "mixtral-wide", "gpt-oss-wide", "llama-blocks", "phi3-blocks", "llama-whole-blocks", "llama-long",
    "llama-wide-heads", "qwen3-moe-blocks", "qwen3-moe-wide", "glm4-moe-wide",
    "gemma4-moe-wide", "qwen3-moe-long", "gemma3-file",
    "smollm3-file", "qwen3.5-moe-wide", "exaone4-file",
)  # fmt: skip
# What they have is in others of their family too.
VARIANTS = (
    "smollm3", "olmo2-bias-tied", "glm4-tied", "gemma3", "gemma4-part", "gemma4-unified", "glm4-moe-bias-tied",
    "qwen3.5", "qwen3-window", "qwen3-moe-window", "seed-oss-biases-tied", "exaone4-tied",
    "ministral3",
    "llama-uneven-tied", "gemma4-uneven",
)  # fmt: skip
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SIZES + VARIANTS else ()) for name in CONFIGS]


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    # Every other folder comes in many shards.
    shards = {"max_shard_size": "40KB"} if list(CONFIGS).index(request.param) % 2 else {}
    return write_pair(tmp_path_factory.mktemp(request.param), request.param, **shards)


def prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


@torch.inference_mode()
def reference_logits(pair: Pair, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = pair.theirs(torch.tensor([tokens])).logits[0]
    return logits


# 7 is no part of a block, 150 the whole prompt; chunks of any size stand in the next test's batch.
@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunk", [7, 150, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16, 64))])
def test_logits_do_not_depend_on_the_chunk_size(pair: Pair, chunk: int) -> None:
    (tokens,) = prompts(150)
    if chunk == 1:
        tokens = tokens[:50]
    driver, row = PagedDriver(pair.ours), Row(tokens)
    logits = []
    while row.num_computed < len(tokens):
        logits += driver.step([row], [min(chunk, len(tokens) - row.num_computed)])
    torch.testing.assert_close(torch.cat(logits), reference_logits(pair, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(2)
def test_logits_do_not_depend_on_the_batch(pair: Pair) -> None:
    rows = [Row(tokens) for tokens in prompts(90, 3, 41, 150, 17, 16, 60)]
    driver, generator = PagedDriver(pair.ours), np.random.default_rng(2)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    while active := [i for i, row in enumerate(rows) if row.num_computed < len(row.tokens)]:
        # Decodes and chunks mixed: most rows take one token, some many.
        counts = [
            min(int(generator.choice([1, 1, 1, 9, 30])), len(rows[i].tokens) - rows[i].num_computed) for i in active
        ]
        for i, logits in zip(active, driver.step([rows[i] for i in active], counts), strict=True):
            found[i].append(logits)
    for row, logits in zip(rows, found, strict=True):
        torch.testing.assert_close(torch.cat(logits), reference_logits(pair, row.tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(2)
def test_greedy_tokens_equal_those_of_generate(pair: Pair) -> None:
    rows = [Row(tokens) for tokens in prompts(40, 5, 22)]
    expected = []
    for row in rows:
        prompt = torch.tensor([row.tokens])
        output = pair.theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        expected.append(output[0].tolist())
    driver = PagedDriver(pair.ours)
    counts = [len(row.tokens) for row in rows]
    for step in range(12):
        if step == 5:  # preemption: the cache is lost, everything is computed again
            driver.release(rows[1])
            counts[1] = len(rows[1].tokens)
        for row, logits in zip(rows, driver.step(rows, counts), strict=True):
            row.tokens.append(int(logits[-1].argmax()))
        counts = [1] * len(rows)
    assert [row.tokens for row in rows] == expected
