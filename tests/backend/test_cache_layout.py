"""How layers are divided into cache groups, and how many blocks a sequence takes in them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.harness import Harness, request
from tests.support.examples import examples
from tests.support.instant_worker import InstantWorker

from headrace_backend.cache_groups import (
    ONE_GROUP,
    WHOLE_CONTEXTS,
    CacheGroup,
    CacheLayout,
    SequenceBlocks,
    cache_layout,
)
from headrace_backend.config import EngineConfig
from headrace_backend.engine.request import TenantLimits
from headrace_backend.pp_rules import stages
from headrace_model_folder import ModelConfig
from headrace_model_folder.config import parse_config

FULL, SLIDING = "full_attention", "sliding_attention"
GPT_OSS = [SLIDING, FULL] * 12
GEMMA_27B = [*([SLIDING] * 5 + [FULL]) * 10, SLIDING, SLIDING]


def model(types: Sequence[str], window: int = 128) -> ModelConfig:
    """A model with these kinds of layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return parse_config(
        {
            "architectures": ["Qwen2ForCausalLM"],
            **sizes,
            "num_hidden_layers": len(types),
            "vocab_size": 100,
            "max_position_embeddings": 32_768,
            "use_sliding_window": True,
            "sliding_window": window,
            "layer_types": list(types),
            "torch_dtype": "bfloat16",
        }
    )


def config(**values: object) -> EngineConfig:
    return EngineConfig.model_validate({"model": pathlib.Path("model"), **values})


def shape(layout: CacheLayout) -> tuple[list[int | None], int]:
    return [group.window for group in layout.groups], layout.num_places


def test_a_model_whose_layers_look_alike_has_one_group_of_all() -> None:
    assert cache_layout(config(), model([FULL] * 6)) == WHOLE_CONTEXTS
    assert shape(cache_layout(config(), model([SLIDING] * 6))) == ([128], 6)
    # A window that no sequence outgrows is none.
    assert cache_layout(config(max_model_len=128), model(GPT_OSS)) == WHOLE_CONTEXTS


def test_blocks_have_as_many_places_as_the_smallest_kind_has_layers() -> None:
    assert shape(cache_layout(config(), model(GPT_OSS))) == ([None, 128], 12)
    assert shape(cache_layout(config(), model(GEMMA_27B, 1024))) == ([None, *[1024] * 6], 10)


def test_groups_that_save_nothing_are_not_made() -> None:
    # Places for both kinds in every block would cost more than the window saves.
    assert shape(cache_layout(config(), model([FULL] * 23 + [SLIDING], 4096))) == ([None], 0)


def test_stages_have_the_same_groups() -> None:
    asked, described = config(pp=2), model(GPT_OSS)
    layouts = [cache_layout(asked, described, stage) for stage in stages(asked, described)]
    assert [shape(layout) for layout in layouts] == [([None, 128], 6)] * 2
    # One stage would have room for the window's blocks and none of their layers: nothing is saved.
    apart = model([FULL] * 12 + [SLIDING] * 12)
    assert [cache_layout(asked, apart, stage) for stage in stages(asked, apart)] == [WHOLE_CONTEXTS] * 2


def test_a_drafting_model_lies_over_a_group_that_keeps_whole_contexts() -> None:
    drafting = config(speculate="draft", draft_model=pathlib.Path("draft"))
    assert cache_layout(drafting, model(GPT_OSS)).groups[0] == CacheGroup()
    assert cache_layout(drafting, model([SLIDING] * 4)) == WHOLE_CONTEXTS
    assert cache_layout(config(), model([SLIDING] * 4), has_draft=True) == WHOLE_CONTEXTS


@hypothesis.settings(max_examples=examples(200), deadline=None)
@hypothesis.given(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=40), st.integers(1, 4))
def test_every_layer_has_a_place_of_its_own_in_its_group(types: list[str], pp: int) -> None:
    hypothesis.assume(pp <= len(types))
    asked, described = config(pp=pp), model(types)
    parts = stages(asked, described)
    layouts = [cache_layout(asked, described, stage) for stage in parts]
    assert len({layout.groups for layout in layouts}) == 1
    for stage, layout in zip(parts, layouts, strict=True):
        own = types[stage.first_layer : stage.end_layer]
        if layout.groups == ONE_GROUP:
            assert layout == WHOLE_CONTEXTS
            continue
        assert len(layout.layer_groups) == len(own)
        for kind, group in zip(own, layout.layer_groups, strict=True):
            assert layout.groups[group].window == (128 if kind == SLIDING else None)
        places = list(zip(layout.layer_groups, layout.layer_places(), strict=True))
        assert len(set(places)) == len(places)
        assert max(place for _, place in places) < layout.num_places


@hypothesis.settings(max_examples=examples(200), deadline=None)
@hypothesis.given(
    st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 500),
    st.integers(0, 200),
)
def test_the_longest_sequence_is_the_longest_that_fits(
    windows: list[int | None], step_tokens: int, limit: int, num_blocks: int
) -> None:
    blocks = SequenceBlocks(16, tuple(map(CacheGroup, windows)), 50 * step_tokens)
    most = blocks.most_tokens(num_blocks, limit)
    assert blocks.most_blocks(most) <= num_blocks or most == 0
    assert most == limit or blocks.most_blocks(most + 1) > num_blocks


class Job(NamedTuple):
    """A request, and the steps before the next one comes."""

    num_prompt_tokens: int
    max_tokens: int
    n: int
    pause: int


@hypothesis.settings(max_examples=examples(150), deadline=None)
@hypothesis.given(
    groups=st.lists(st.none() | st.integers(1, 70), min_size=1, max_size=3),
    budget=st.sampled_from([16, 17, 40, 100]),
    pp=st.sampled_from([1, 1, 2, 3]),
    prefix_cache=st.booleans(),
    share=st.sampled_from([0.0, 0.5]),
    jobs=st.lists(
        st.builds(Job, st.integers(1, 150), st.integers(1, 60), st.integers(1, 3), st.integers(0, 4)),
        min_size=1,
        max_size=8,
    ),
)
def test_every_request_ends_in_the_cache_that_is_said_to_hold_its_longest_output(
    groups: list[int | None], budget: int, pp: int, prefix_cache: bool, share: float, jobs: list[Job]
) -> None:
    """Prompts begin alike, and a tenant's share may hold no more than that output either."""
    made = tuple(map(CacheGroup, groups))
    blocks = SequenceBlocks(16, made, budget)
    most = max(blocks.most_blocks(job.num_prompt_tokens + job.max_tokens - 1) for job in jobs)
    settings = {"max_num_batched_tokens": budget, "enable_prefix_cache": prefix_cache, "max_num_seqs": 3, "pp": pp}
    harness = Harness(max(most, 1) * (2 if share else 1), groups=made, worker=InstantWorker(), **settings)
    readers = []
    for job in jobs:
        asked = request(job.num_prompt_tokens, job.max_tokens, n=job.n, limits=TenantLimits(kv_cache_share=share))
        readers.append(harness.add(asked))
        for _ in range(job.pause):
            harness.checked_step()
    harness.run()
    for job, reader in zip(jobs, readers, strict=True):
        assert [len(reader.tokens[index]) for index in range(job.n)] == [job.max_tokens] * job.n
    assert harness.engine.load().used_blocks == 0


@pytest.mark.parametrize("step_tokens", [2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_a_window_of_128_in_half_of_the_layers_takes_at_most_55_percent_of_whole_contexts(step_tokens: int) -> None:
    """32 sequences of 8,192 tokens; a block of two groups has half of the layers."""
    used = {}
    for groups in (ONE_GROUP, (CacheGroup(), CacheGroup(128))):
        worker = InstantWorker()
        settings = {"max_num_seqs": 32, "max_num_batched_tokens": step_tokens}
        harness = Harness(40_000, model_len=8400, groups=groups, worker=worker, **settings)
        for number in range(32):
            # Answers that go on until the last prompt is computed.
            harness.add(request(np.random.default_rng(number).integers(1, 24, 8192).tolist(), 200))
        most = 0
        while harness.engine.has_work:
            harness.plan()
            most = max(most, harness.engine._scheduler.kv.pool.num_used)
            if worker.plans:
                harness.settle()
        used[len(groups)] = most
    assert used[1] >= 32 * 8192 // 16
    assert 0.5 < used[2] / 2 / used[1] <= 0.55, f"{used[2] / 2 / used[1]:.1%}"
