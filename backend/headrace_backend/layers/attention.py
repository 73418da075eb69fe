"""Self-attention over the paged KV cache.

Projections, optional norms of queries and keys, rotation, cache write, attention, output
projection.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor, nn

from headrace_backend.layers.linear import ColumnLinear, RowLinear
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.projection_norms import projection_norms
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.layers.step_metadata import StepMetadata, of_group
from headrace_backend.layers.value_heads import ValueHeads
from headrace_backend.quantization.linear_weight import LinearWeight
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.attention.paged import RawHeads, rotate_write_attend
from headrace_kernels.attention.rope_kv import rope_and_write_kv
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.output_gates import gate_heads, without_gates
from headrace_kernels.rounded_tokens import Activations
from headrace_model_folder import description


class AttentionSinks(ShardedModule):
    """A logit for each of a rank's heads, which joins the denominator of the softmax alone."""

    def __init__(self, name: str, heads: range, placement: Placement) -> None:
        super().__init__()
        self._name, self._heads = name, heads
        self.logits = placement.empty(len(heads))

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The logits of this rank's heads."""
        yield CheckpointPart(self._name, WeightTarget.of(self.logits, self._heads))


class Attention(nn.Module):
    """Grouped-query self-attention of one layer."""

    def __init__(self, attention: description.Attention, placement: Placement) -> None:
        super().__init__()
        head_dim = attention.head_dim
        query = placement.shard.split(attention.num_heads * head_dim, head_dim)
        key = placement.shard.split_kv_heads(attention.num_kv_heads, head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim = len(query) // head_dim, len(key) // head_dim, head_dim
        self._is_gated = attention.gated
        self.sliding_window = attention.window
        # Of several cache groups the one in whose blocks the layer's keys and values lie.
        self.cache_group = 0
        self.scale = head_dim**-0.5 if attention.scale is None else attention.scale
        self._rotary_dim, self._interleaved = attention.rotary_dim, attention.interleaved
        # Of a gated head each query stands before its gate.
        width = attention.query_width // head_dim
        queries = range(width * query.start, width * query.stop)
        keys = [linear for linear in (attention.key, attention.value) if linear is not None]
        self.qkv_proj = ColumnLinear((attention.query, *keys), (queries, *[key] * len(keys)), placement)
        self._query_size = len(query)
        self.value_heads = ValueHeads.of(attention, self.num_kv_heads, placement)
        # Whose keys and values the heads read, in a tuple so that it is no module of this one;
        # nobody's: their own.
        self._source: tuple[Attention, ...] = ()
        # Name under which other layers read this one's; "": none does.
        self._read_as = ""
        # [num_tokens, keys and values] of the step, before norms and rotation of keys, where others
        # read them.
        self._key_values: Tensor | None = None
        self.o_proj = RowLinear(attention.output, query, placement)
        self.projection_norms = projection_norms(attention, query, key, placement)
        of_heads = (None, None) if attention.norms_projections else (attention.query_norm, attention.key_norm)
        self.q_norm, self.k_norm = (None if norm is None else RmsNorm(norm, placement) for norm in of_heads)
        heads = range(query.start // head_dim, query.stop // head_dim)
        self.sinks = None if attention.sinks is None else AttentionSinks(attention.sinks.name, heads, placement)

    def heads(self, x: Activations, rotations: Tensor, kv_cache: Tensor, metadata: StepMetadata) -> Tensor:
        """Computes the attention of the step's tokens, without the output projection.

        Args:
            x: [num_tokens, hidden_size], in the model's type or rounded as `rounds_to` says.
            rotations: The step's rows of the rotary table.
            kv_cache: This layer's cache; the tokens' keys and values are written first.
            metadata: The step.

        Returns:
            [num_tokens, all heads' outputs].
        """
        return self.gated(self.qkv_proj(x), rotations, kv_cache, metadata)

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How what makes so many tokens may round them for `heads`; None: not at all."""
        return self.qkv_proj.rounds_to(num_tokens)

    def add_to(
        self, residual: Tensor, norm: RmsNorm, rotations: Tensor, kv_cache: Tensor, metadata: StepMetadata
    ) -> None:
        """Computes `residual += o_proj(heads(norm(residual)))`, for steps that fuse.

        Norm and addition happen inside the projections.
        """
        projected = self.qkv_proj.after_norm(norm, residual)
        self.o_proj.add_to(residual, self.gated(projected, rotations, kv_cache, metadata))

    def gated(self, projected: Tensor, rotations: Tensor, kv_cache: Tensor, metadata: StepMetadata) -> Tensor:
        """`attended` of what the projection gives, multiplied by its gates where there are some."""
        qkv, gates = self.ungated(projected)
        heads = self.attended(qkv, rotations, kv_cache, metadata)
        return heads if gates is None else gate_heads(heads, gates)

    def ungated(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the projection gives without its gates, and these, [num_tokens, heads, head_dim].

        None where heads have no gates.
        """
        if not self._is_gated:
            return projected, None
        return without_gates(projected, self.num_heads, self.head_dim)

    def attended(self, qkv: Tensor, rotations: Tensor, kv_cache: Tensor, metadata: StepMetadata) -> Tensor:
        """Computes what lies between the projections: norms, rotation, cache write and attention.

        Args:
            qkv: [num_tokens, queries, keys and values of all heads], which may be overwritten;
                without those that no projection gives.
            rotations: The step's rows of the rotary table.
            kv_cache: This layer's cache; the tokens' keys and values are written first.
            metadata: The step.

        Returns:
            [num_tokens, all heads' outputs].
        """
        raw = self._raw(qkv, rotations)
        sinks = None if self.sinks is None else self.sinks.logits
        step = of_group(metadata, self.cache_group)
        return rotate_write_attend(raw, kv_cache, step, self.scale, self.sliding_window, sinks).flatten(1)

    def write_kv(self, qkv: Tensor, rotations: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Writes keys and values as `attended` does, and attends to nothing.

        Args:
            qkv: [num_tokens, queries, keys and values of all heads], which may be overwritten.
            rotations: The step's rows of the rotary table.
            kv_cache: This layer's cache.
            slots: int64 [num_tokens] places in it; -1: nowhere.
        """
        raw = self._raw(qkv, rotations)
        norms = (raw.query_norm, raw.key_norm, raw.eps)
        rope_and_write_kv(raw.qkv, rotations, kv_cache, slots, self.num_heads, *norms, self._interleaved)

    def _raw(self, qkv: Tensor, rotations: Tensor) -> RawHeads:
        """The projection's heads, and how they are normed and rotated."""
        if self.projection_norms is not None:
            self.projection_norms(qkv)
        qkv = self._with_all_heads(qkv)
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        return RawHeads(qkv, rotations, self.num_heads, *self._head_norms, self._interleaved)

    def read_keys_of(self, source: Attention, name: str) -> None:
        """Has the heads read keys and values of a layer that is computed before, called `name`.

        They are written to the same places of the same cache once more, so that kernels have no
        case for it.
        """
        self._source, source._read_as = (source,), name

    def _with_all_heads(self, projected: Tensor) -> Tensor:
        """[num_tokens, queries, keys and values], of which a projection may give a part."""
        if self._source:
            key_values = self._source[0]._key_values
            assert key_values is not None, "the layer that is read comes first"
            return torch.cat((projected, key_values), dim=1)
        if self.value_heads is not None:
            projected = self.value_heads(projected)
        if self._read_as:
            self._key_values = projected[:, self._query_size :]
        return projected

    def launch_kind(self) -> Hashable:
        """What decides which kernels `attended` launches, beside step, cache and norm weights."""
        return (
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.sliding_window,
            self._rotary_dim,
            self._interleaved,
            self._is_gated,
            # Each layer that is read is a kind of its own: its readers need it in every step.
            self._read_as,
            bool(self._source),
        )

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight]:
        """The projections before and behind the heads."""
        return self.qkv_proj.weight, self.o_proj.weight

    @property
    def _head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights of the norms of each head's query and key, and their epsilon.

        No weights where the model has no such norms.
        """
        key_norm = self._source[0].k_norm if self._source else self.k_norm
        if self.q_norm is None or key_norm is None:
            return None, None, 0.0
        return self.q_norm.weight, key_norm.weight, self.q_norm.eps
