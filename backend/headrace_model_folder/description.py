"""A model as data: embedding, parts of each decoder layer, output head, with sizes and tensors.

    config.json -> families/<family>.describe -> ModelDescription -> expected tensors, rules for
    ranks, memory plan, step costs, torch modules

Owns the vocabulary of parts. A family says which parts its layers have; whoever needs a model's
tensors, sizes or modules makes them from here and knows no family. What a part computes is the
backend's `layers`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from headrace_model_folder.parts.linear_attention import GatedDeltaNet
from headrace_model_folder.parts.named_tensors import Fused, Linear, Norm, Shape, Sinks, Vector
from headrace_model_folder.rope_config import NO_ROPE, RopeConfig

__all__ = [
    "Activation",
    "Attention",
    "ClampedGating",
    "Embedding",
    "Experts",
    "Fused",
    "GatedDeltaNet",
    "Head",
    "Layer",
    "Linear",
    "Mlp",
    "ModelDescription",
    "Norm",
    "Rotation",
    "Shape",
    "SharedExpert",
    "Sinks",
    "StackedExperts",
    "StateFusion",
    "Vector",
    "stacked_tensors",
]

# What an MLP's gate passes through: x * sigmoid(x), or GELU in its approximation by tanh.
Activation = Literal["silu", "gelu_tanh"]
# Parameters of a rotary embedding, and the elements of a head that it turns.
Rotation = tuple[RopeConfig, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query self-attention with rotated queries and keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Tokens that a token sees, itself included; None: itself and all before it.
    window: int | None
    rope: RopeConfig
    # Elements of a head that are rotated, from the first on.
    rotary_dim: int
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    # Norms of queries and keys before the rotation, over each head or over all of them together, as
    # their sizes say; None: there are none.
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    # What multiplies products of queries and keys; None: one over the root of head_dim.
    scale: float | None = None
    # Whether neighbours among the rotated elements form a plane, and not those half of them apart.
    interleaved: bool = False
    # None: probabilities of the context add up to 1.
    sinks: Sinks | None = None
    # Whether the query projection has, behind each head's query, as many elements whose sigmoid
    # multiplies the head's output.
    gated: bool = False

    @property
    def query_width(self) -> int:
        """Outputs of the query projection for each head."""
        return 2 * self.head_dim if self.gated else self.head_dim

    @property
    def norms_projections(self) -> bool:
        """Whether the norms of queries and keys are over all heads together."""
        return self.query_norm is not None and self.query_norm.size != self.head_dim

    @property
    def rotation(self) -> Rotation:
        """What a table of cosines and sines is made from; layers with the same one share it."""
        return self.rope, self.rotary_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections in the order of a forward pass."""
        return self.query, self.key, self.value, self.output

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of queries and keys, none or both."""
        return tuple(norm for norm in (self.query_norm, self.key_norm) if norm is not None)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of its tensors, each projection by itself."""
        sinks = () if self.sinks is None else (self.sinks,)
        parts: tuple[Linear | Norm | Sinks, ...] = (*self.linears, *self.norms, *sinks)
        return itertools.chain.from_iterable(part.tensors() for part in parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Activation = "silu"

    @property
    def inner(self) -> int:
        """Elements between the projections."""
        return self.down.inputs

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections in the order of a forward pass."""
        return self.gate, self.up, self.down

    @property
    def size(self) -> int:
        """Number of weights of the projections."""
        return sum(linear.size for linear in self.linears)

    @property
    def multiplied(self) -> int:
        """Number of weights that one token is multiplied by: all of them."""
        return self.size

    @property
    def token_elements(self) -> int:
        """Elements that a step holds for each token: gate, up, and their product."""
        return 3 * self.inner


@dataclasses.dataclass(frozen=True, slots=True)
class ClampedGating:
    """(up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up within +-`limit`."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True, slots=True)
class SigmoidScores:
    """Experts' scores are sigmoids of their logits, each by itself.

    Experts are in groups of as many that follow each other. A correction for each expert is added
    to its score to choose by: first the groups whose two best add up to most, then the best experts
    in those. Weights are the chosen experts' scores without the correction, normed and scaled.
    """

    # The tensor with each expert's correction, its whole name.
    correction: str
    num_experts: int
    num_groups: int
    # Groups that a token's experts are chosen from.
    top_groups: int
    # What a token's weights are multiplied by in the end.
    scale: float

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of the correction."""
        yield self.correction, (self.num_experts,)


@dataclasses.dataclass(frozen=True, slots=True)
class StackedExperts:
    """Tensors of a checkpoint that hold a projection of all experts, gates and ups alternating.

    Plain: `gate_up_proj` [experts, hidden, 2 inner] and `down_proj` [experts, inner, hidden],
    inputs before outputs. In MXFP4: `gate_up_proj_blocks` [experts, 2 inner, hidden / 32, 16] and
    `gate_up_proj_scales` [experts, 2 inner, hidden / 32], and so on. Biases: `gate_up_proj_bias`
    [experts, 2 inner] and `down_proj_bias` [experts, hidden].
    """

    # Path of the tensors without the last word, such as model.layers.0.mlp.experts.
    name: str

    @property
    def gate_up(self) -> str:
        """Name of gates and ups."""
        return f"{self.name}.gate_up_proj"

    @property
    def down(self) -> str:
        """Name of the down projections."""
        return f"{self.name}.down_proj"


@dataclasses.dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that computes every token beside its experts."""

    mlp: Mlp
    # Hidden state -> one logit, whose sigmoid multiplies the output; None: it is added as it is.
    gate: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections in the order of a forward pass."""
        return self.mlp.linears if self.gate is None else (*self.mlp.linears, self.gate)

    @property
    def size(self) -> int:
        """Number of its weights, all of which a token is multiplied by."""
        return sum(linear.size for linear in self.linears)


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: MLPs of one size, a few of which compute each token.

    The router's logits become probabilities by a softmax over all experts, or scores of another
    kind. The likeliest `per_token` of them compute the token, and their outputs are added up with
    those weights. A shared expert computes every token besides.
    """

    # Hidden state -> one logit for each expert.
    router: Linear
    # All alike but for their names; of several ranks those of one, while the router is whole.
    experts: tuple[Mlp, ...]
    # Experts that compute a token.
    per_token: int
    # Whether a token's weights are divided by their sum, so that they add up to 1.
    renormalized: bool
    # None: silu(gate) * up.
    gating: ClampedGating | None = None
    # None: each projection of each expert has tensors of its own.
    stacked: StackedExperts | None = None
    # None: a softmax over all experts.
    scores: SigmoidScores | None = None
    # None: only chosen experts compute a token.
    shared: SharedExpert | None = None
    # Path of tensors that may hold all experts in place of their own, outputs before inputs; None:
    # there are none.
    joined: str | None = None

    @property
    def inner(self) -> int:
        """Elements between the projections of one expert."""
        return self.experts[0].inner

    @property
    def share(self) -> float:
        """Share of the experts that compute one token."""
        return self.per_token / self.router.outputs

    @property
    def down(self) -> Linear:
        """The down projection of the first expert, whose size all have."""
        return self.experts[0].down

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The router, then the projections of each expert and of the shared one."""
        chosen = itertools.chain.from_iterable(expert.linears for expert in self.experts)
        return self.router, *chosen, *(self.shared.linears if self.shared else ())

    @property
    def products(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the projections that one product takes: of gates and ups, and of downs."""
        gates_and_ups = itertools.chain.from_iterable((expert.gate, expert.up) for expert in self.experts)
        return tuple(linear.name for linear in gates_and_ups), tuple(expert.down.name for expert in self.experts)

    @property
    def size(self) -> int:
        """Number of weights of all experts that are chosen from, without the router's."""
        return len(self.experts) * self.experts[0].size

    @property
    def multiplied(self) -> int:
        """Number of weights that one token is multiplied by: the router's and its experts'."""
        shared = self.shared.size if self.shared else 0
        return self.router.size + self.per_token * self.experts[0].size + shared

    @property
    def token_elements(self) -> int:
        """Elements that a step holds for each token.

        These are the inner elements and the output of each of its experts, the logits, which are
        in fp32, and what a shared expert holds with its output.
        """
        shared = self.shared.mlp.token_elements + self.down.outputs if self.shared else 0
        return self.per_token * (self.inner + self.down.outputs) + 2 * self.router.outputs + shared


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer: norm, attention (or a linear form of it), norm, MLP or experts.

    Outputs of attention and MLP are added to the residual stream, some families' behind norms of
    their own. Where there is no norm before a part, it takes the residual stream as it is.
    """

    # Such as model.layers.0.
    name: str
    attention_norm: Norm | None
    attention: Attention | GatedDeltaNet
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    # Norms of both outputs before they are added; None: they are added as they are.
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None

    def __post_init__(self) -> None:
        assert (self.attention_output_norm is None) == (self.mlp_output_norm is None), "both outputs are normed or none"
        has_inputs_normed = self.attention_norm is not None and self.mlp_norm is not None
        assert has_inputs_normed or self.norms_outputs, "what is added without a norm is read behind one"

    @property
    def kv_attention(self) -> Attention:
        """The attention of a layer that keeps keys and values, as those of most families do."""
        assert isinstance(self.attention, Attention), "the layer keeps a state"
        return self.attention

    @property
    def norms_outputs(self) -> bool:
        """Whether outputs are normed before they reach the residual stream."""
        return self.attention_output_norm is not None

    @property
    def is_plain(self) -> bool:
        """Whether it has attention without gates, norms before its parts and of heads, and silu.

        Products of such layers may take norms and additions inside, a step of several ranks may be
        cut into pieces, and scales of inputs can be folded into what makes them. Other layers are
        computed one operation after another.
        """
        if not isinstance(self.attention, Attention) or self.attention.gated:
            return False
        has_silu = isinstance(self.mlp, Experts) or self.mlp.activation == "silu"
        return has_silu and not self.norms_outputs and not self.attention.norms_projections

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms before and behind attention and MLP, in the order of a forward pass."""
        norms = (self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm)
        return tuple(norm for norm in norms if norm is not None)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections in the order of a forward pass."""
        return self.attention.linears + self.mlp.linears

    def with_rope(self, rope: RopeConfig) -> Layer:
        """Returns the layer with another rotary embedding, if its attention rotates."""
        if not isinstance(self.attention, Attention) or self.attention.rope == NO_ROPE:
            return self
        return dataclasses.replace(self, attention=dataclasses.replace(self.attention, rope=rope))

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of the layer's tensors, each projection by itself."""
        yield from self.attention.tensors()
        scores = self.mlp.scores if isinstance(self.mlp, Experts) else None
        parts: tuple[Linear | Norm | SigmoidScores, ...] = (
            *self.mlp.linears,
            *(() if scores is None else (scores,)),
            *self.norms,
        )
        for part in parts:
            yield from part.tensors()


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """One row of `hidden_size` elements for each token of the vocabulary."""

    name: str
    vocab_size: int
    hidden_size: int
    # What multiplies the rows; as the output layer's weight they are not multiplied.
    scale: float = 1.0

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of its table."""
        yield f"{self.name}.weight", (self.vocab_size, self.hidden_size)


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The output layer, whose weight has the embedding's shape."""

    name: str
    # Whether its weight is the embedding's table.
    tied: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StateFusion:
    """What stands before the layers of a head that drafts.

    The embedding of a token and the state before it are normed, laid side by side in this order,
    and projected to the width of the residual stream.
    """

    embedding_norm: Norm
    state_norm: Norm
    projection: Linear

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of its tensors."""
        parts: tuple[Linear | Norm, ...] = (self.embedding_norm, self.state_norm, self.projection)
        return itertools.chain.from_iterable(part.tensors() for part in parts)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelDescription:
    """A decoder-only transformer, whole: what one rank of several has of it is `tp_rules`'."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    # The norm behind the last layer.
    norm: Norm
    head: Head
    # Beginnings of names of tensors that a checkpoint may have and nothing here computes with.
    unused: tuple[str, ...] = ()
    # Of a head that drafts: what makes the residual stream. None: the embedding is the stream.
    fusion: StateFusion | None = None
    # The layer behind the last one that predicts the token after the next (MTP), as a model of one
    # layer with this one's embedding and output layer; None: there is none. Its tensors are among
    # the unused ones.
    mtp: ModelDescription | None = None

    @property
    def hidden_size(self) -> int:
        """Elements of the residual stream."""
        return self.embedding.hidden_size

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.embedding.vocab_size

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that has keys and values; at least one has."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, Attention))

    @property
    def recurrent_layers(self) -> tuple[GatedDeltaNet, ...]:
        """The linear attention of each layer that keeps a state instead."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, GatedDeltaNet))

    @property
    def attention(self) -> Attention:
        """The attention of the first layer that has some, whose heads all such layers share."""
        return self.attentions[0]

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of the first layer that rotates."""
        ropes = (attention.rope for attention in self.attentions)
        return next((rope for rope in ropes if rope != NO_ROPE), NO_ROPE)

    @property
    def is_plain(self) -> bool:
        """Whether all layers are (`Layer.is_plain`)."""
        return all(layer.is_plain for layer in self.layers)

    @property
    def stretched_context(self) -> int:
        """Tokens that YaRN stretches the context to in any layer; 0 where none has YaRN."""
        return max(attention.rope.stretched_context for attention in self.attentions)

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The rotations that the layers have, each once, in the order of the layers."""
        return tuple(dict.fromkeys(attention.rotation for attention in self.attentions))

    @property
    def window(self) -> int | None:
        """Tokens that a token sees in every layer, itself included; None: all before it."""
        return min((attention.window for attention in self.attentions if attention.window), default=None)

    @property
    def linears(self) -> Iterator[Linear]:
        """The projections of all layers, and before them, in the order of a forward pass."""
        before = () if self.fusion is None else (self.fusion.projection,)
        return itertools.chain(before, *(layer.linears for layer in self.layers))

    @property
    def multiplied(self) -> int:
        """Number of weights of all layers, and before them, that one token is multiplied by."""
        before = 0 if self.fusion is None else self.fusion.projection.size
        return before + sum(
            sum(linear.size for linear in layer.attention.linears) + layer.mlp.multiplied for layer in self.layers
        )

    @property
    def expert_layers(self) -> tuple[Experts, ...]:
        """The experts of each layer that has some; all layers of a model have as many."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts))

    @property
    def expert_products(self) -> Iterator[tuple[str, ...]]:
        """`Experts.products` of all layers."""
        return itertools.chain.from_iterable(experts.products for experts in self.expert_layers)

    def stored_linears(self) -> dict[str, Linear]:
        """The projections of all layers as the checkpoint has them, by name, in forward order."""
        return {stored.name: stored for stored in (linear.stored for linear in self.linears)}

    def stored_tensors(self) -> dict[str, Shape]:
        """Shape of each tensor of a checkpoint by name, without a tied output layer's."""
        stacks = [experts for experts in self.expert_layers if experts.stacked is not None]
        stacked = {linear.name for experts in stacks for expert in experts.experts for linear in expert.linears}
        elsewhere = [linear for linear in self.linears if linear.fused or linear.name in stacked]
        names = {name for linear in elsewhere for name, _ in linear.tensors()}
        own = {name: shape for name, shape in self.tensors() if name not in names}
        linears = (linear for name, linear in self.stored_linears().items() if name not in stacked)
        stored = itertools.chain.from_iterable(linear.tensors() for linear in linears)
        return own | dict(stored) | dict(itertools.chain.from_iterable(map(stacked_tensors, stacks)))

    def head_tensor(self) -> tuple[str, Shape]:
        """Name and shape of the output layer's weight; a tied one need not be in a folder."""
        return f"{self.head.name}.weight", (self.vocab_size, self.hidden_size)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every tensor of the model, without a tied output layer's."""
        yield from self.embedding.tensors()
        if self.fusion is not None:
            yield from self.fusion.tensors()
        for layer in self.layers:
            yield from layer.tensors()
        yield from self.norm.tensors()
        if not self.head.tied:
            yield self.head_tensor()

    def with_rope(self, rope: RopeConfig) -> ModelDescription:
        """Returns the same model with another rotary embedding in all layers that rotate."""
        return dataclasses.replace(self, layers=tuple(layer.with_rope(rope) for layer in self.layers))


def stacked_tensors(experts: Experts) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each tensor in which a checkpoint keeps all experts of a layer, plain."""
    assert experts.stacked is not None
    count, inner, hidden = len(experts.experts), experts.inner, experts.down.outputs
    yield experts.stacked.gate_up, (count, hidden, 2 * inner)
    yield experts.stacked.down, (count, inner, hidden)
    if experts.down.bias:
        yield f"{experts.stacked.gate_up}_bias", (count, 2 * inner)
        yield f"{experts.stacked.down}_bias", (count, hidden)
