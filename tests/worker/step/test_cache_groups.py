"""Models whose layers look back differently far: engine and runner together, against transformers.

Blocks behind a window go back and are used again, and no token ever shows it.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tests.support.engine_on_runner import EngineOnRunner, greedy, layout_of
from tests.support.examples import examples
from tests.support.model_builds import load_model

from headrace_backend.cache_groups import WHOLE_CONTEXTS, CacheGroup, CacheLayout
from headrace_backend.engine.request import AbortCause
from headrace_backend.models.causal_lm import CausalLM
from headrace_model_folder import ModelFolder

# When a block is full, a step of its next token is in flight; the one after that is planned behind
# what goes back, and reaches with such a window just to the last token of another block.
BLOCK_SIZE, VOCAB_SIZE, WINDOW = 16, 96, 19
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Random models with small weights hardly depend on their context, and would forgive a wrong
    # mask.
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "sliding_window": WINDOW,
}


class Made:
    """A random model of transformers, and ours of the same weights."""

    def __init__(self, path: pathlib.Path, config: Any, device: str = "cpu") -> None:
        import transformers

        torch.manual_seed(0)
        self.theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        self.theirs.save_pretrained(path)
        folder = ModelFolder.open(path)
        where = torch.device(device)
        self.config = folder.config
        self.ours: CausalLM = load_model(folder, folder.config, torch.float32, where, "folder", 0, lambda *_: None)
        self.layout = layout_of(folder.config)

    @functools.cache  # noqa: B019  # lives as long as the process
    def expected(self, prompt: tuple[int, ...], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            generated = self.theirs.generate(
                ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return [int(token) for token in generated[0, len(prompt) :]]

    def engine(self, num_blocks: int = 200, layout: CacheLayout | None = None, **changes: Any) -> EngineOnRunner:
        values = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 16, "max_num_seqs": 4} | changes
        return EngineOnRunner(self.ours, layout or self.layout, num_blocks, **values)


def qwen2(num_layers: int) -> Any:
    """Half of the layers see everything, the others, the first among them, have the window."""
    import transformers

    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"][:num_layers]
    return transformers.Qwen2Config(**_SIZES, num_hidden_layers=num_layers, use_sliding_window=True, layer_types=types)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("mixed"), qwen2(4))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Every layer has the window."""
    import transformers

    return Made(tmp_path_factory.mktemp("windowed"), transformers.MistralConfig(**_SIZES, num_hidden_layers=2))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, length).tolist()


def test_layers_are_grouped_by_how_far_they_look(mixed: Made, windowed: Made) -> None:
    assert mixed.layout == CacheLayout((CacheGroup(), CacheGroup(WINDOW)), (1, 0, 0, 1), 2)
    assert mixed.layout.layer_places() == (0, 0, 1, 1)
    assert windowed.layout == CacheLayout((CacheGroup(WINDOW),), (0, 0), 2)
    # Nothing goes back where no sequence outgrows the window.
    assert layout_of(mixed.config, WINDOW) == layout_of(windowed.config, WINDOW) == WHOLE_CONTEXTS


@pytest.mark.parametrize("kind", ["mixed", "windowed"])
def test_tokens_are_those_of_transformers_in_blocks_that_are_used_again(
    kind: str, request: pytest.FixtureRequest
) -> None:
    made: Made = request.getfixturevalue(kind)
    prompts = [prompt_of(length, length) for length in (150, 3, 111, 21)]
    # They would take 22 blocks in each group. Without prefixes what goes back is overwritten at
    # once.
    engine = made.engine(num_blocks=32 if kind == "mixed" else 14, enable_prefix_cache=False)
    found = engine.outputs([greedy(prompt, 12) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), 12)] for prompt in prompts]


def test_a_prefix_is_found_where_the_windows_tail_is_left(mixed: Made) -> None:
    engine = mixed.engine()
    shared = prompt_of(100)
    for own, num_hits in (([1, 2], 0), ([3, 4, 5], 96), ([6], 96)):
        before = engine.engine._scheduler.stats.num_prefix_hit_tokens
        prompt = shared + own
        assert engine.outputs([greedy(prompt, 8)]) == [[mixed.expected(tuple(prompt), 8)]]
        assert engine.engine._scheduler.stats.num_prefix_hit_tokens - before == num_hits


def test_outputs_share_a_prompt_and_copy_a_block_of_each_group(mixed: Made) -> None:
    prompt = prompt_of(53)
    engine = mixed.engine()
    asked = greedy(prompt, 12, n=3, temperature=0.9, seed=7)
    [outputs] = engine.outputs([asked])
    assert len(set(map(tuple, outputs))) == 3
    whole = mixed.engine(layout=WHOLE_CONTEXTS)
    assert whole.outputs([greedy(prompt, 12, n=3, temperature=0.9, seed=7)]) == [outputs]


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_quantized_cache_gives_the_same_tokens_in_groups(mixed: Made, kv_dtype: str) -> None:
    prompts = [prompt_of(length, length) for length in (70, 40, 25)]
    found = mixed.engine(18, kv_dtype=kv_dtype).outputs([greedy(prompt, 8) for prompt in prompts])
    whole = mixed.engine(layout=WHOLE_CONTEXTS, kv_dtype=kv_dtype)
    assert found == whole.outputs([greedy(prompt, 8) for prompt in prompts])


@pytest.mark.slow
def test_drafts_from_the_own_context_change_no_tokens(mixed: Made) -> None:
    """Rejected drafts leave garbage behind the settled tokens, in every group."""
    prompts = [prompt_of(30, seed) * 3 for seed in range(3)]
    engine = mixed.engine(tokens_per_row=4, speculate="ngram", speculate_tokens="3")
    found = engine.outputs([greedy(prompt, 40) for prompt in prompts])
    assert found == [[mixed.expected(tuple(prompt), 40)] for prompt in prompts]


@pytest.mark.slow
def test_a_draft_model_keeps_whole_contexts_over_the_first_groups_blocks(mixed: Made) -> None:
    """The model drafts for itself: what it finds in its own cache makes every draft right."""
    prompts = [prompt_of(length, length) for length in (60, 35, 90)]
    drafting = {"speculate": "draft", "draft_model": pathlib.Path("draft"), "speculate_tokens": "3"}
    engine = mixed.engine(34, draft=mixed.ours, tokens_per_row=4, **drafting)
    readers = engine.readers_of([greedy(prompt, 40) for prompt in prompts])
    for prompt, reader in zip(prompts, readers, strict=True):
        assert reader.tokens[0] == mixed.expected(tuple(prompt), 40)
        assert reader.done is not None
        assert reader.done.draft_tokens == reader.done.accepted_tokens > 20


class Schedule(NamedTuple):
    """A request: when it comes, and after how many of its tokens it is cancelled, if at all."""

    length: int
    shared: int
    max_tokens: int
    pause: int
    cancelled_after: int | None


schedules = st.builds(
    Schedule,
    length=st.integers(1, 60),
    shared=st.sampled_from([0, 0, 20, 50, 100]),
    max_tokens=st.integers(1, 24),
    pause=st.integers(0, 6),
    cancelled_after=st.none() | st.integers(0, 5),
)


def check_schedule(made: Made, jobs: list[Schedule], num_blocks: int, **settings: Any) -> None:
    engine = made.engine(num_blocks, **settings)
    prompts = [prompt_of(job.shared) + prompt_of(job.length, 100 + number) for number, job in enumerate(jobs)]
    asked = [greedy(prompt, job.max_tokens) for prompt, job in zip(prompts, jobs, strict=True)]
    readers = []
    for job, one in zip(jobs, asked, strict=True):
        readers.append(engine.add(one))
        for _ in range(job.pause):
            engine.checked_step()
    for _ in range(1000):
        for job, one, reader in zip(jobs, asked, readers, strict=True):
            if reader.done is None and len(reader.tokens.get(0, ())) == job.cancelled_after:
                engine.engine.abort(one.request_id, one.tenant, AbortCause.CANCELLED)
                engine.read()
        if not engine.engine.has_work:
            break
        engine.checked_step()
    while engine.worker.plans:
        engine.settle()
    engine.engine.check_integrity()
    again = [greedy(prompt, job.max_tokens) for prompt, job in zip(prompts, jobs, strict=True)]
    expected = made.engine(layout=WHOLE_CONTEXTS).outputs(again)
    for job, reader, [tokens] in zip(jobs, readers, expected, strict=True):
        found = reader.tokens.get(0, [])
        assert reader.done is not None
        assert found == tokens[: len(found)]
        assert job.cancelled_after is not None or len(found) == job.max_tokens


@pytest.mark.parametrize("kind", ["mixed", pytest.param("windowed", marks=pytest.mark.slow)])
@hypothesis.settings(
    max_examples=examples(30, least=5), deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(
    jobs=st.lists(schedules, min_size=1, max_size=6),
    num_blocks=st.integers(26, 40),
    budget=st.sampled_from([16, 23, 50]),
    prefix_cache=st.booleans(),
)
def test_no_block_is_read_after_it_went_back(
    kind: str,
    request: pytest.FixtureRequest,
    jobs: list[Schedule],
    num_blocks: int,
    budget: int,
    prefix_cache: bool,
) -> None:
    """Free blocks are full of NaN: chunks, preemptions, prefix hits and cancels in any order.

    Without a prefix cache all that go back are free.
    """
    settings = {"max_num_batched_tokens": budget, "enable_prefix_cache": prefix_cache}
    check_schedule(request.getfixturevalue(kind), jobs, num_blocks, **settings)


@pytest.mark.slow
def test_the_schedules_preempt(mixed: Made) -> None:
    """What the property above is about does happen."""
    engine = mixed.engine(26, max_num_batched_tokens=16)
    prompts = [prompt_of(60, seed) for seed in range(4)]
    found = engine.outputs([greedy(prompt, 60) for prompt in prompts])
    assert found == [[mixed.expected(tuple(prompt), 60)] for prompt in prompts]
    assert engine.engine._scheduler.stats.num_preemptions > 0
