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

from headrace_model_folder.parts.linear_attention import GatedDeltaNet
from headrace_model_folder.parts.named_tensors import Activation, Embedding, Fused, Linear, Norm, Shape, Sinks, Vector
from headrace_model_folder.parts.per_layer_input import PerLayerEmbedding, PerLayerInput
from headrace_model_folder.rope_config import NO_ROPE, RopeConfig

__all__ = [
    "Activation",
    "Attention",
    "BesideMlp",
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
    "PerLayerEmbedding",
    "PerLayerInput",
    "Rotation",
    "Shape",
    "SharedExpert",
    "Sinks",
    "StackedExperts",
    "StateFusion",
    "Vector",
    "stacked_tensors",
]

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
    # None: keys and values are those of another layer, `kv_source`.
    key: Linear | None
    # None: there is no key either, or keys are the values too, as they leave the projection.
    value: Linear | None
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
    # What the norm of each head's values, which has no factors, adds to their mean square; None:
    # values are not normed.
    value_norm_eps: float | None = None
    # Name of the layer before whose keys and values these heads read; None: they have their own.
    kv_source: str | None = None

    @property
    def query_width(self) -> int:
        """Outputs of the query projection for each head."""
        return 2 * self.head_dim if self.gated else self.head_dim

    @property
    def norms_projections(self) -> bool:
        """Whether the norms of queries and keys are over all heads together."""
        return self.query_norm is not None and self.query_norm.size != self.head_dim

    @property
    def norms_heads(self) -> bool:
        """Whether queries are normed, and by themselves in each head."""
        return self.query_norm is not None and not self.norms_projections

    @property
    def rotation(self) -> Rotation:
        """What a table of cosines and sines is made from; layers with the same one share it."""
        return self.rope, self.rotary_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections in the order of a forward pass."""
        projections = (self.query, self.key, self.value, self.output)
        return tuple(linear for linear in projections if linear is not None)

    @property
    def projected(self) -> tuple[Linear, Linear, Linear]:
        """The projections of queries, keys and values, of families whose layers have all three."""
        assert self.key is not None and self.value is not None, "the layer takes keys or values from elsewhere"
        return self.query, self.key, self.value

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of queries and keys that the layer has itself."""
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
class BesideMlp:
    """What experts have that compute the residual stream beside the MLP of a layer, not behind it.

    Their router and they themselves read the stream, each behind a norm of its own; their output
    and the MLP's are normed before they are added up. A token's weights are multiplied by a number
    of each expert. The MLP is what `Experts.shared` has.
    """

    # Factors of the router's norm, whose outputs are multiplied by `router_scale` too.
    router_factors: Vector
    router_scale: float
    eps: float
    # A number of each expert.
    expert_factors: Vector
    # Before the experts, behind them, and behind the MLP.
    input_norm: Norm
    output_norm: Norm
    mlp_output_norm: Norm

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of its tensors."""
        parts = (self.router_factors, self.expert_factors, self.input_norm, self.output_norm, self.mlp_output_norm)
        return itertools.chain.from_iterable(part.tensors() for part in parts)


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
    # None: the experts read what the layer's norm gives, as the shared one does.
    beside: BesideMlp | None = None

    def __post_init__(self) -> None:
        assert self.beside is None or self.shared is not None, "what stands beside experts is a shared one"

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
    # What follows the MLP; None: nothing.
    per_layer_input: PerLayerInput | None = None
    # A number that multiplies the residual stream behind the layer; None: there is none.
    scalar: Vector | None = None

    def __post_init__(self) -> None:
        assert (self.attention_output_norm is None) == (self.mlp_output_norm is None), "both outputs are normed or none"
        has_inputs_normed = self.attention_norm is not None and self.mlp_norm is not None
        assert has_inputs_normed or self.norms_outputs, "what is added without a norm is read behind one"
        has_end = self.per_layer_input is not None or self.scalar is not None
        assert self.norms_outputs or not has_end, "what follows the MLP takes the whole stream"

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
    def takes_sums(self) -> bool:
        """Whether products may take the norm before them and the addition behind them inside.

        It has norms before its parts, and of heads, alone, and silu.
        """
        norms_projections = isinstance(self.attention, Attention) and self.attention.norms_projections
        has_silu = isinstance(self.mlp, Experts) or self.mlp.activation == "silu"
        return has_silu and not self.norms_outputs and not norms_projections

    @property
    def is_plain(self) -> bool:
        """Whether it has attention without gates, norms before its parts and of heads, and silu.

        A step of several ranks may be cut into pieces in such layers, and scales of inputs can be
        folded into what makes them.
        """
        return self.takes_sums and isinstance(self.attention, Attention) and not self.attention.gated

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms before and behind attention and MLP, in the order of a forward pass."""
        last = None if self.per_layer_input is None else self.per_layer_input.norm
        norms = (self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm, last)
        return tuple(norm for norm in norms if norm is not None)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections in the order of a forward pass."""
        last = () if self.per_layer_input is None else self.per_layer_input.linears
        return (*self.attention.linears, *self.mlp.linears, *last)

    def with_rope(self, rope: RopeConfig) -> Layer:
        """Returns the layer with another rotary embedding, if its attention rotates."""
        if not isinstance(self.attention, Attention) or self.attention.rope == NO_ROPE:
            return self
        return dataclasses.replace(self, attention=dataclasses.replace(self.attention, rope=rope))

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of the layer's tensors, each projection by itself."""
        yield from self.attention.tensors()
        last = () if self.per_layer_input is None else self.per_layer_input.linears
        chosen = (self.mlp.scores, self.mlp.beside) if isinstance(self.mlp, Experts) else ()
        parts: tuple[Linear | Norm | SigmoidScores | BesideMlp | Vector, ...] = (
            *self.mlp.linears,
            *(part for part in chosen if part is not None),
            *last,
            *self.norms,
            *(() if self.scalar is None else (self.scalar,)),
        )
        for part in parts:
            yield from part.tensors()


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The output layer, whose weight has the embedding's shape."""

    name: str
    # Whether its weight is the embedding's table.
    tied: bool
    # Logits become softcap * tanh(logit / softcap); None: they stay as they are.
    softcap: float | None = None


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
    # None: layers have no inputs of tokens but the residual stream.
    per_layer_embedding: PerLayerEmbedding | None = None
    # Tokens of context that are computed as the model was trained; None: all that config.json says.
    context_limit: int | None = None

    @property
    def hidden_size(self) -> int:
        """Elements of the residual stream."""
        return self.embedding.hidden_size

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.embedding.vocab_size

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.mlp, Experts) for layer in self.layers)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that is no recurrent one; at least one is none."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, Attention))

    @property
    def kv_attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that keeps keys and values of its own."""
        return tuple(attention for attention in self.attentions if attention.kv_source is None)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """For each of `attentions` the place among `kv_attentions` of whose keys it reads."""
        places: dict[str, int] = {}
        for layer in self.layers:
            if isinstance(layer.attention, Attention) and layer.attention.kv_source is None:
                places[layer.name] = len(places)
        layers = (layer for layer in self.layers if isinstance(layer.attention, Attention))
        return tuple(places[layer.kv_attention.kv_source or layer.name] for layer in layers)

    @property
    def shares_keys(self) -> bool:
        """Whether some layers read other layers' keys and values."""
        return len(self.kv_attentions) < len(self.attentions)

    @property
    def has_one_geometry(self) -> bool:
        """Whether all layers have as many key and value heads of one size."""
        return len({(attention.num_kv_heads, attention.head_dim) for attention in self.attentions}) == 1

    @property
    def recurrent_layers(self) -> tuple[GatedDeltaNet, ...]:
        """The linear attention of each layer that keeps a state instead."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, GatedDeltaNet))

    @property
    def attention(self) -> Attention:
        """The attention of the first layer that has some: of all, if `has_one_geometry`."""
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
        last = (layer.per_layer_input.linears for layer in self.layers if layer.per_layer_input is not None)
        beside = sum(linear.size for linear in itertools.chain.from_iterable(last))
        if self.per_layer_embedding is not None:
            beside += self.per_layer_embedding.projection.size
        if self.fusion is not None:
            beside += self.fusion.projection.size
        return beside + sum(
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
        if self.per_layer_embedding is not None:
            yield from self.per_layer_embedding.tensors()
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
