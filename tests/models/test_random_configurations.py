"""Random small models of every family have transformers' logits and greedy tokens.

Heads, groups, windows, ties, biases, rotations and numbers of experts are drawn; what a drawn
model shows and the chosen ones of `checkpoints` do not, becomes one of those.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.models.checkpoints import VOCAB_SIZE, load, randomize_vectors
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_against_transformers import TOLERANCE
from tests.support.examples import examples

from headrace_model_folder import ModelFolder

Draw = np.random.Generator
# How many times as far from fp64 as transformers' fp32 ours may be, where that is far.
_ROUNDING = 4.0
Fields = dict[str, Any]


def pick(draw: Draw, *choices: Any) -> Any:
    return choices[draw.integers(len(choices))]


def sizes(draw: Draw) -> Fields:
    kv_heads, group = pick(draw, 1, 2, 3), pick(draw, 1, 2, 3, 5)
    heads = kv_heads * group
    return {
        "vocab_size": VOCAB_SIZE,
        # transformers wants hidden sizes that heads divide, and of experts rows of 16 bytes. Norms
        # of few elements blow rounding up: of 4, its fp32 is 5e-3 from its fp64.
        "hidden_size": heads * (pick(draw, 4, 8, 12) if heads > 4 else pick(draw, 24, 32)),
        "intermediate_size": pick(draw, 24, 40, 68),
        "num_hidden_layers": pick(draw, 1, 2, 3, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": pick(draw, True, False),
    }


def rope(draw: Draw, share: float = 1.0, *types: str) -> Fields:
    kind = pick(draw, *(types or ("default", "linear", "dynamic", "llama3", "yarn")))
    own: Fields = {
        "default": {},
        "linear": {"factor": pick(draw, 2.0, 5.5)},
        "dynamic": {"factor": 2.0},
        "llama3": {
            "factor": pick(draw, 4.0, 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": pick(draw, 2.0, 4.0),
            "original_max_position_embeddings": pick(draw, 32, 64),
        },
        "yarn": {
            "factor": pick(draw, 2.0, 16.0),
            "original_max_position_embeddings": pick(draw, 16, 64),
            "beta_fast": pick(draw, 32.0, 8.0),
            "beta_slow": pick(draw, 1.0, 2.0),
            "truncate": pick(draw, True, False),
            **pick(draw, {}, {"attention_factor": 1.25}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": 2.0}),
        },
    }[kind]
    return {"rope_type": kind, "rope_theta": pick(draw, 300.0, 10_000.0, 1e6), "partial_rotary_factor": share, **own}


def kinds(draw: Draw, count: int, other: str = "sliding_attention") -> list[str]:
    return [pick(draw, "full_attention", other) for _ in range(count)]


def with_window(draw: Draw, base: Fields) -> Fields:
    return {**base, "sliding_window": pick(draw, 2, 5, 17, 33), "layer_types": kinds(draw, base["num_hidden_layers"])}


def head_dim(draw: Draw) -> Fields:
    return {"head_dim": pick(draw, 4, 6, 10, 16)}


def experts(draw: Draw, count: str = "num_experts") -> Fields:
    number = pick(draw, 1, 2, 3, 6, 8)
    return {
        count: number,
        "num_experts_per_tok": int(draw.integers(1, number + 1)),
        "moe_intermediate_size": pick(draw, 12, 20, 36),
    }


def llama(draw: Draw) -> Any:
    return transformers.LlamaConfig(
        **sizes(draw), **pick(draw, {}, head_dim(draw)), rope_parameters=rope(draw),
        attention_bias=pick(draw, True, False), mlp_bias=pick(draw, True, False), rms_norm_eps=pick(draw, 1e-6, 1e-2),
    )  # fmt: skip


def mistral(draw: Draw) -> Any:
    return transformers.MistralConfig(
        **sizes(draw), **pick(draw, {}, head_dim(draw)), rope_parameters=rope(draw),
        sliding_window=pick(draw, None, 2, 9, 40),
    )  # fmt: skip


def qwen(draw: Draw) -> Any:
    base = sizes(draw)
    if pick(draw, True, False):
        base = with_window(draw, base) | {"use_sliding_window": True}
    elif pick(draw, True, False):
        base |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": int(draw.integers(0, 4))}
    if pick(draw, True, False):
        return transformers.Qwen2Config(**base, rope_parameters=rope(draw))
    bias = pick(draw, True, False)
    return transformers.Qwen3Config(**base, **head_dim(draw), attention_bias=bias, rope_parameters=rope(draw))


def phi3(draw: Draw) -> Any:
    base = sizes(draw)
    # transformers takes the size of a head from the hidden size here.
    per_head = base["hidden_size"] // base["num_attention_heads"]
    share = pick(draw, 1.0, 0.5)
    rotated = int(per_head * share) // 2
    if int(per_head * share) % 2:
        share, rotated = 1.0, per_head // 2
    original: Fields = {}
    parameters = rope(draw, share, "default")
    if pick(draw, True, False):
        # transformers takes the long factors beyond 2 tokens, and we for all.
        original = {"original_max_position_embeddings": 2}
        parameters |= {
            "rope_type": "longrope",
            "short_factor": [1.0] * rotated,
            "long_factor": [1.0 + 3.5 * place for place in range(rotated)],
            **original,
            **pick(draw, {}, {"attention_factor": 1.5}, {"factor": 3.0}),
        }
    return transformers.Phi3Config(
        **base, **original, rope_parameters=parameters, sliding_window=pick(draw, None, 9, 40, 255, 256)
    )


def smollm3(draw: Draw) -> Any:
    base = sizes(draw)
    order = pick(draw, {}, {"no_rope_layer_interval": pick(draw, 1, 2, 3)})
    if pick(draw, True, False):
        order = {"no_rope_layers": [pick(draw, 0, 1) for _ in range(base["num_hidden_layers"])]}
    windows = pick(draw, {}, {"use_sliding_window": True, "sliding_window": pick(draw, 3, 30)})
    return transformers.SmolLM3Config(
        **base, **order, **windows, rope_parameters=rope(draw), attention_bias=pick(draw, True, False),
        mlp_bias=pick(draw, True, False),
    )  # fmt: skip


def olmo(draw: Draw) -> Any:
    base, bias = sizes(draw), pick(draw, True, False)
    if pick(draw, True, False):
        return transformers.Olmo2Config(**base, attention_bias=bias, rope_parameters=rope(draw))
    # transformers reads `truncate` beside the kinds of layers, where no file has it.
    full = rope(draw)
    full.pop("truncate", None)
    sliding = {"rope_type": "default", "rope_theta": 500.0}
    parameters = {"full_attention": full, "sliding_attention": sliding}
    return transformers.Olmo3Config(**with_window(draw, base), attention_bias=bias, rope_parameters=parameters)


def seed_oss(draw: Draw) -> Any:
    return transformers.SeedOssConfig(
        **sizes(draw), **head_dim(draw), rope_parameters=rope(draw), attention_bias=pick(draw, True, False),
        attention_out_bias=pick(draw, True, False), mlp_bias=pick(draw, True, False),
    )  # fmt: skip


def exaone4(draw: Draw) -> Any:
    base = sizes(draw)
    window = pick(draw, None, 5, 17)
    types = kinds(draw, base["num_hidden_layers"]) if window else ["full_attention"] * base["num_hidden_layers"]
    return transformers.Exaone4Config(**base, sliding_window=window, layer_types=types, rope_parameters=rope(draw))


def ministral3(draw: Draw) -> Any:
    parameters = rope(draw, 1.0, "yarn") | {"original_max_position_embeddings": 128}
    scaled = {**parameters, "llama_4_scaling_beta": pick(draw, 0.1, 0.5)}
    return transformers.Ministral3Config(**sizes(draw), **head_dim(draw), rope_parameters=scaled)


def glm4(draw: Draw) -> Any:
    share = pick(draw, 0.5, 1.0)
    config = transformers.Glm4Config(
        **sizes(draw), head_dim=pick(draw, 4, 8, 12), attention_bias=pick(draw, True, False),
        rope_parameters=rope(draw, share, "default", "linear"),
    )  # fmt: skip
    config.eos_token_id = None
    return config


def glm4_moe(draw: Draw) -> Any:
    groups, per_group = pick(draw, 1, 2, 3), pick(draw, 2, 3)
    top = int(draw.integers(1, groups + 1))
    config = transformers.Glm4MoeConfig(
        **sizes(draw), head_dim=pick(draw, 4, 8, 12), attention_bias=pick(draw, True, False),
        use_qk_norm=pick(draw, True, False), n_routed_experts=groups * per_group, n_group=groups, topk_group=top,
        num_experts_per_tok=int(draw.integers(1, top * per_group + 1)), n_shared_experts=pick(draw, 1, 2),
        moe_intermediate_size=pick(draw, 12, 20), first_k_dense_replace=pick(draw, 0, 1, 2),
        norm_topk_prob=pick(draw, True, False), routed_scaling_factor=pick(draw, 1.0, 2.5),
        rope_parameters=rope(draw, pick(draw, 0.5, 1.0), "default", "yarn"),
    )  # fmt: skip
    config.eos_token_id = None
    return config


def gemma3(draw: Draw) -> Any:
    base = with_window(draw, sizes(draw))
    parameters = {
        "full_attention": rope(draw, 1.0, "default", "linear"),
        "sliding_attention": rope(draw, 1.0, "default"),
    }
    return transformers.Gemma3TextConfig(
        **base, **head_dim(draw), query_pre_attn_scalar=pick(draw, 4, 24, 100), attention_bias=pick(draw, True, False),
        rope_parameters=parameters,
    )  # fmt: skip


def gemma4(draw: Draw) -> Any:
    base = with_window(draw, sizes(draw))
    base["layer_types"] = [*base["layer_types"], "full_attention"]
    base["num_hidden_layers"] += 1
    base["layer_types"][0] = pick(draw, "full_attention", "sliding_attention")
    shared = 0
    for count in range(1, len(base["layer_types"])):
        kept = set(base["layer_types"][:-count])
        if kept == set(base["layer_types"]) and pick(draw, True, False):
            shared = count
    mixture = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20}
    # transformers wants inputs by layer where layers share keys.
    per_layer = 6 if shared else pick(draw, 0, 6)
    return transformers.Gemma4TextConfig(
        **base, **head_dim(draw), global_head_dim=pick(draw, 8, 12, 16),
        attention_k_eq_v=pick(draw, True, False), num_global_key_value_heads=pick(draw, None, 1),
        num_kv_shared_layers=shared, use_double_wide_mlp=pick(draw, True, False),
        hidden_size_per_layer_input=per_layer, vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=pick(draw, None, 3.0), attention_bias=pick(draw, True, False),
        **pick(draw, {}, mixture),
    )  # fmt: skip


def gpt_oss(draw: Draw) -> Any:
    own = experts(draw, "num_local_experts")
    own.pop("moe_intermediate_size")
    return transformers.GptOssConfig(
        **with_window(draw, sizes(draw)), **head_dim(draw), **own, attention_bias=pick(draw, True, False),
        swiglu_limit=pick(draw, 1.0, 7.0), swiglu_alpha=pick(draw, 1.702, 1.0),
        rope_parameters=rope(draw, 1.0, "default", "yarn"),
    )  # fmt: skip


def qwen3_moe(draw: Draw) -> Any:
    base = sizes(draw)
    dense = [layer for layer in range(base["num_hidden_layers"]) if pick(draw, True, False, False)]
    return transformers.Qwen3MoeConfig(
        **base, **head_dim(draw), **experts(draw), norm_topk_prob=pick(draw, True, False), mlp_only_layers=dense,
        decoder_sparse_step=pick(draw, 1, 2), attention_bias=pick(draw, True, False), rope_parameters=rope(draw),
        use_sliding_window=pick(draw, True, False), sliding_window=pick(draw, 5, 30),
    )  # fmt: skip


def mixtral(draw: Draw) -> Any:
    own = experts(draw, "num_local_experts")
    own.pop("moe_intermediate_size")
    return transformers.MixtralConfig(
        **sizes(draw), **head_dim(draw), **own, sliding_window=pick(draw, None, 9, 30), rope_parameters=rope(draw)
    )


def qwen3_5(draw: Draw) -> Any:
    base = sizes(draw) | {"initializer_range": 0.1}
    base["num_hidden_layers"] = max(base["num_hidden_layers"], 2)
    types = kinds(draw, base["num_hidden_layers"], "linear_attention")
    types[draw.integers(len(types))] = "full_attention"
    keys = pick(draw, 1, 2, 3)
    own: Fields = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * pick(draw, 1, 2, 3),
        "linear_key_head_dim": pick(draw, 8, 12),
        "linear_value_head_dim": pick(draw, 8, 20),
        "linear_conv_kernel_dim": pick(draw, 2, 3, 4),
        "layer_types": types,
        "head_dim": pick(draw, 8, 16),
        "attention_bias": pick(draw, True, False),
        "rope_parameters": rope(draw, pick(draw, 0.25, 0.5, 1.0), "default", "yarn"),
    }
    if pick(draw, True, False):
        return transformers.Qwen3_5TextConfig(**base, **own)
    base.pop("intermediate_size")
    shared = pick(draw, 12, 30)
    return transformers.Qwen3_5MoeTextConfig(**base, **own, **experts(draw), shared_expert_intermediate_size=shared)


FAMILIES: dict[str, Callable[[Draw], Any]] = {
    family.__name__: family
    for family in (
        llama, mistral, ministral3, qwen, phi3, smollm3, olmo, glm4, seed_oss, exaone4, gemma3, gemma4, gpt_oss,
        qwen3_moe, mixtral, glm4_moe, qwen3_5
    )
}  # fmt: skip


def tried(path: pathlib.Path, config: Any, seed: int) -> None:
    """Compares a random model of a configuration, read from its folder."""
    torch.manual_seed(seed)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize_vectors(theirs)
    theirs.save_pretrained(path)
    compare(theirs, path, PagedDriver(load(path)), np.random.default_rng(seed))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def exact_logits(path: pathlib.Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of transformers in fp64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    logits: torch.Tensor = model.eval()(tokens).logits[0]
    return logits


@torch.inference_mode()
def compare(theirs: transformers.PreTrainedModel, path: pathlib.Path, driver: PagedDriver, draw: Draw) -> None:
    """Compares logits of two prompts in chunks, and greedy tokens behind one."""
    rows = [Row(draw.integers(0, VOCAB_SIZE, length).tolist()) for length in (70, 41)]
    found: list[list[torch.Tensor]] = [[], []]
    while active := [place for place, row in enumerate(rows) if row.num_computed < len(row.tokens)]:
        counts = [min(int(draw.integers(1, 30)), len(rows[i].tokens) - rows[i].num_computed) for i in active]
        for place, logits in zip(active, driver.step([rows[i] for i in active], counts), strict=True):
            found[place].append(logits)
    for row, logits in zip(rows, found, strict=True):
        tokens, ours = torch.tensor([row.tokens]), torch.cat(logits)
        expected = theirs(tokens).logits[0]
        limit = TOLERANCE * max(float(expected.abs().max()) / 10, 1.0)
        if distance(ours, expected) > limit:
            # Norms of few elements blow rounding up, in theirs too, by how threads share the sums.
            exact = exact_logits(path, tokens)
            limit = max(limit, _ROUNDING * distance(expected, exact))
            assert distance(ours, exact) < limit
    prompt = torch.tensor([rows[1].tokens])
    mask = torch.ones_like(prompt)
    expected = theirs.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    row = Row(prompt[0].tolist())
    for count in (len(row.tokens), *([1] * 5)):
        row.tokens.append(int(driver.step([row], [count])[0][-1].argmax()))
    assert row.tokens == expected[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_have_the_logits_and_tokens_of_transformers(family: str, tmp_path: pathlib.Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for seed in range(examples(30)):
        config = FAMILIES[family](np.random.default_rng(seed))
        path = tmp_path / str(seed)
        try:
            tried(path, config, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {config}") from error
        assert ModelFolder.open(path)
