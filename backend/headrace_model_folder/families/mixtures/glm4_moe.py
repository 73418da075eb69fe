"""GLM-4.5: a mixture of experts with sigmoid scores and a shared expert behind dense layers.

The first half of each head is rotated. Queries, keys and values may have biases, and heads norms.
Published folders have a layer behind the last one, for predicting several tokens at once (MTP). It
is a layer as the others, of the model's last state and the next token, and its copies of embedding
and output layer are not read: training shares them.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import (
    Experts,
    Layer,
    Linear,
    Mlp,
    ModelDescription,
    Norm,
    SharedExpert,
    SigmoidScores,
    StateFusion,
)
from headrace_model_folder.errors import shown
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.mixtures.experts import ExpertNames, Routing, read_routing, with_experts
from headrace_model_folder.fields import Fields

_NAMES = ExpertNames("mlp", "gate", gate="gate_proj", up="up_proj", down="down_proj")
_MAX_SHARED = 64
_MAX_MTP_LAYERS = 16
# What related families choose with these fields; here there is one way alone.
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def describe(fields: Fields) -> ModelDescription:
    """The first `first_k_dense_replace` layers have a dense MLP, the others experts."""
    for name, value in _ONLY.items():
        if fields.get(name) not in (None, value):
            raise fields.error(name, f"must be {value!r} or absent, is {shown(fields.get(name))}")
    sizes = read_sizes(fields, rotates_parts=True)
    switches = Switches(
        qkv_bias=fields.boolean("attention_bias", False), head_norms=fields.boolean("use_qk_norm", False)
    )
    num_mtp = fields.integer("num_nextn_predict_layers", 0, _MAX_MTP_LAYERS)
    model = decoder(sizes, [None] * (sizes.num_layers + num_mtp), switches)
    is_renormalized = fields.boolean("norm_topk_prob", True)
    routing = read_routing(fields, "n_routed_experts", "moe_intermediate_size", sizes.num_layers, is_renormalized)
    scores, num_shared = _read_scores(fields, routing), fields.integer("n_shared_experts", 1, _MAX_SHARED)
    num_dense = fields.integer("first_k_dense_replace", 0, 1 << 20)
    layers = tuple(
        layer if index < num_dense else _sparse(layer, routing, scores, num_shared * routing.inner)
        for index, layer in enumerate(model.layers)
    )
    model, behind = dataclasses.replace(model, layers=layers[: sizes.num_layers]), layers[sizes.num_layers :]
    # Where there are several, each predicts what the one before it does not: such are not read.
    mtp = _mtp(model, behind[0]) if num_mtp == 1 else None
    return dataclasses.replace(model, unused=tuple(f"{layer.name}." for layer in behind), mtp=mtp)


def _mtp(model: ModelDescription, layer: Layer) -> ModelDescription:
    """The layer behind a model's last one as a model of its own."""
    size, eps = model.hidden_size, model.norm.eps
    fusion = StateFusion(
        embedding_norm=Norm(f"{layer.name}.enorm", size, eps),
        state_norm=Norm(f"{layer.name}.hnorm", size, eps),
        projection=Linear(f"{layer.name}.eh_proj", size, 2 * size, keeps_dtype=True),
    )
    norm = Norm(f"{layer.name}.shared_head.norm", size, eps)
    return dataclasses.replace(model, layers=(layer,), norm=norm, fusion=fusion)


def _read_scores(fields: Fields, routing: Routing) -> SigmoidScores:
    """How experts are chosen, without the name of a layer's correction."""
    num_groups = fields.integer("n_group", 1, routing.num_experts)
    if routing.num_experts % num_groups or routing.num_experts < 2 * num_groups:
        raise fields.error(
            "n_group", f"must divide n_routed_experts ({routing.num_experts}) into groups of 2 or more, is {num_groups}"
        )
    top_groups = fields.integer("topk_group", 1, num_groups)
    most = top_groups * (routing.num_experts // num_groups)
    if routing.per_token > most:
        raise fields.error(
            "num_experts_per_tok", f"must be at most the {most} experts of topk_group groups, is {routing.per_token}"
        )
    scale = fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0)
    return SigmoidScores("", routing.num_experts, num_groups, top_groups, scale)


def _sparse(layer: Layer, routing: Routing, scores: SigmoidScores, shared_inner: int) -> Layer:
    sparse = with_experts(layer, routing, _NAMES)
    experts, name = sparse.mlp, f"{layer.name}.mlp"
    assert isinstance(experts, Experts)
    hidden = experts.router.inputs
    shared = SharedExpert(
        Mlp(
            Linear(f"{name}.shared_experts.gate_proj", shared_inner, hidden),
            Linear(f"{name}.shared_experts.up_proj", shared_inner, hidden),
            Linear(f"{name}.shared_experts.down_proj", hidden, shared_inner),
        )
    )
    own = dataclasses.replace(scores, correction=f"{experts.router.name}.e_score_correction_bias")
    return dataclasses.replace(sparse, mlp=dataclasses.replace(experts, scores=own, shared=shared))


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    describe,
    knows=frozenset(
        {
            "attention_bias",
            "use_qk_norm",
            "norm_topk_prob",
            "routed_scaling_factor",
            "n_group",
            "topk_group",
            "scoring_func",
            "topk_method",
            "moe_layer_freq",
        }
    ),
    gguf=GgufNaming("glm4moe", has_experts=True, has_sigmoid_scores=True, post_attention="post_attention_norm"),
)
