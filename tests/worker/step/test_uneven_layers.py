"""Layers that differ in their heads, or read other layers' keys: Gemma 4 in cache groups.

Layers with a window and layers without have heads of other numbers and sizes in the same memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.engine_on_runner import greedy
from tests.worker.step.test_cache_groups import BLOCK_SIZE, VOCAB_SIZE, WINDOW, Made, prompt_of

from headrace_backend.cache_groups import WHOLE_CONTEXTS, CacheGroup, CacheLayout
from headrace_backend.kv_bytes import kv_heads, place_bytes

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 8.0,
}


def gemma4(**changes: Any) -> Any:
    """Layers with the window have half as many elements of keys as the others."""
    import transformers

    return transformers.Gemma4TextConfig(**_SIZES | changes)


def sharing() -> Any:
    """Two layers read the keys of others, and all have inputs of tokens; full layers are larger."""
    return gemma4(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        num_key_value_heads=1,
        attention_k_eq_v=False,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        use_double_wide_mlp=True,
    )


def mixture() -> Any:
    """Experts stand beside the MLP of each layer."""
    return gemma4(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=16,
    )


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("uneven"), gemma4())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("shared"), sharing())


def test_a_place_is_as_large_as_its_largest_layer(uneven: Made, shared: Made) -> None:
    assert uneven.layout == CacheLayout((CacheGroup(), CacheGroup(WINDOW)), (1, 0, 1, 0), 2)
    # Layers that read other layers' keys have no place.
    assert shared.layout == CacheLayout((CacheGroup(), CacheGroup(WINDOW)), (1, 0, 1, 0), 2)
    heads, places = kv_heads(uneven.config.description), uneven.layout.layer_places()
    assert heads == [(4, 8), (1, 16)] * 2 and places == (0, 0, 1, 1)
    assert place_bytes(heads, places, BLOCK_SIZE, 4, is_quantized=False) == [2 * 4 * 8 * BLOCK_SIZE * 4] * 2
    # Each layer by itself has what it needs, and no more.
    assert place_bytes(heads, (), BLOCK_SIZE, 4, is_quantized=False)[1] == 2 * 16 * BLOCK_SIZE * 4


@pytest.mark.parametrize("kind", ["uneven", "shared"])
def test_tokens_are_those_of_transformers_in_blocks_that_are_used_again(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Chunks, windows that are outgrown, prefix hits, preemptions; free blocks are full of NaN."""
    made: Made = request.getfixturevalue(kind)
    prompts = [prompt_of(length, length) for length in (150, 3, 111, 21)]
    engine = made.engine(num_blocks=30, max_num_batched_tokens=23)
    found = engine.outputs([greedy(prompt, 12) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), 12)] for prompt in prompts]
    again = prompts[2][:96] + [5, 6]
    hits = engine.engine._scheduler.stats.num_prefix_hit_tokens
    assert engine.outputs([greedy(again, 8)]) == [[made.expected(tuple(again), 8)]]
    assert engine.engine._scheduler.stats.num_prefix_hit_tokens > hits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uneven", "shared"])
def test_preemptions_change_no_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    made: Made = request.getfixturevalue(kind)
    prompts = [prompt_of(60, seed) for seed in range(4)]
    engine = made.engine(26)
    found = engine.outputs([greedy(prompt, 60) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), 60)] for prompt in prompts]
    assert engine.engine._scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_outputs_copy_whole_blocks_whatever_layer_they_are_of(uneven: Made, kv_dtype: str) -> None:
    """In groups, and where every layer has memory of its own."""
    asked = [greedy(prompt_of(53), 12, n=3, temperature=0.9, seed=7) for _ in range(2)]
    found, whole = (
        uneven.engine(60, layout=layout, kv_dtype=kv_dtype).outputs([one])
        for layout, one in zip((uneven.layout, WHOLE_CONTEXTS), asked, strict=True)
    )
    assert found == whole and len(set(map(tuple, found[0]))) == 3


@pytest.mark.slow
def test_drafts_from_the_own_context_change_no_tokens(shared: Made) -> None:
    prompts = [prompt_of(30, seed) * 3 for seed in range(3)]
    engine = shared.engine(tokens_per_row=4, speculate="ngram", speculate_tokens="3")
    found = engine.outputs([greedy(prompt, 40) for prompt in prompts])
    assert found == [[shared.expected(tuple(prompt), 40)] for prompt in prompts]
