"""One decoder layer.

Attention (or a linear form of it) and MLP, with norms before or behind them, each added to the
residual stream.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn

from headrace_backend.layers.attention import Attention
from headrace_backend.layers.expert_mlp import ExpertMlp
from headrace_backend.layers.experts_beside import ExpertsBeside
from headrace_backend.layers.gated_delta_net import GatedDeltaNet
from headrace_backend.layers.mlp import GatedMlp
from headrace_backend.layers.norm import RmsNorm, residual_norm, stream_norm
from headrace_backend.layers.per_layer_input import PerLayerResidual
from headrace_backend.layers.rotary import Rotations
from headrace_backend.layers.step_metadata import StepMetadata
from headrace_backend.layers.stream_scalar import StreamScalar
from headrace_backend.weights.placement import Placement
from headrace_kernels.launch_kind import launch_kind
from headrace_kernels.rounded_tokens import Activations
from headrace_model_folder import description
from headrace_model_folder.description import Experts, Layer, Mlp, Norm


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP; of some families norms of both outputs.

    An output is added to the residual stream by the norm that follows it, in one operation. Of
    several ranks that norm adds up their parts of the output, unless the output has a norm of its
    own, which does so.
    """

    def __init__(self, layer: Layer, placement: Placement, rotation: int = 0) -> None:
        """Allocates the parts that the description names, of several ranks this one's share.

        Args:
            layer: The layer's parts.
            placement: Type, device and rank.
            rotation: Which of a step's rotations its heads take.
        """
        super().__init__()
        self.rotation = rotation
        self._takes_sums, self._norms_outputs = layer.takes_sums, layer.norms_outputs
        # Whether what it returns is the whole output, and not one rank's part.
        self.is_output_whole = layer.norms_outputs or placement.shard.world_size == 1
        self.input_layernorm = stream_norm(layer.attention_norm, placement, self.is_output_whole)
        self.self_attn: Attention | GatedDeltaNet = (
            Attention(layer.attention, placement)
            if isinstance(layer.attention, description.Attention)
            else GatedDeltaNet(layer.attention, placement)
        )
        self.attention_output_norm = _output_norm(layer.attention_output_norm, placement)
        self.post_attention_layernorm = stream_norm(layer.mlp_norm, placement, self.is_output_whole)
        self.mlp = _mlp(layer.mlp, placement)
        is_mlp_whole = isinstance(self.mlp, ExpertsBeside)
        self.mlp_output_norm = _output_norm(layer.mlp_output_norm, placement, is_mlp_whole)
        own_input = layer.per_layer_input
        self.per_layer_residual = None if own_input is None else PerLayerResidual(own_input, placement)
        self.scalar = None if layer.scalar is None else StreamScalar(layer.scalar, placement)
        # Partial outputs of several ranks are all-reduced before they reach the residual stream.
        self._is_whole = placement.shard.world_size == 1
        between = (self.mlp_output_norm, self.per_layer_residual, self.scalar)
        # Whether nothing reads experts' outputs before the norm behind the layer does.
        self._ends_in_experts = (
            self._is_whole
            and isinstance(self.mlp, ExpertMlp)
            and self.mlp.shared is None
            and all(part is None for part in between)
        )

    def forward(
        self,
        pending: Tensor | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: Tensor,
        metadata: StepMetadata,
        own_input: Tensor | None = None,
    ) -> Tensor | None:
        """Runs the layer.

        Args:
            pending: [num_tokens, hidden_size] the layer before's output, of several ranks this
                one's part of it, not yet in the residual stream; or of one rank [num_tokens, parts,
                hidden_size], which are added up first; None for the first layer.
            residual: [num_tokens, hidden_size] the residual stream, changed in place.
            rotations: The step's rows of each rotary table.
            kv_cache: This layer's cache, or the states of its rows.
            metadata: The step.
            own_input: [num_tokens, size of an input] what this layer has of each token besides;
                None: the model's layers have nothing.

        Returns:
            This layer's output as `pending`, not yet in the residual stream; None: it is.
        """
        heads = self.heads(pending, residual, rotations, kv_cache, metadata)
        return self.behind_heads(heads, residual, own_input)

    def heads(
        self, pending: Tensor | None, residual: Tensor, rotations: Rotations, kv_cache: Tensor, metadata: StepMetadata
    ) -> Tensor:
        """The half of `forward` in which tokens see each other: [num_tokens, heads' outputs]."""
        normed = self.input_layernorm.of_stream(pending, residual, self.self_attn.rounds_to(len(residual)))
        return self.self_attn.heads(normed, rotations[self.rotation], kv_cache, metadata)

    def behind_heads(self, heads: Tensor, residual: Tensor, own_input: Tensor | None = None) -> Tensor | None:
        """`after_heads`, its parts, or None where many tokens' products are added as they are made.

        The arguments are those of `after_heads`; of None the residual stream has the output. Parts
        are [n, parts, hidden_size], experts' outputs that the norm behind the layer adds up.
        """
        if self._ends_in_experts:
            assert isinstance(self.mlp, ExpertMlp)
            return self.mlp.in_parts(self._attended(heads, residual))
        if not self._adds(len(residual)):
            return self.after_heads(heads, residual, own_input)
        self.self_attn.o_proj.add_to(residual, heads)
        assert isinstance(self.mlp, GatedMlp), "of experts each has a part of the output"
        rounding = self.mlp.rounds_to(len(residual))
        self.mlp.add_output(residual, self.post_attention_layernorm.of_stream(None, residual, rounding))
        return None

    def _adds(self, num_tokens: int) -> bool:
        """Decided by the kind of layer and by sizes and types of weights alone."""
        return (
            self._is_whole
            and not self._norms_outputs
            and isinstance(self.mlp, GatedMlp)
            and self.self_attn.o_proj.adds(num_tokens)
            and self.mlp.adds(num_tokens)
        )

    def after_heads(self, heads: Tensor, residual: Tensor, own_input: Tensor | None = None) -> Tensor:
        """The other half, in which each token is by itself, so that it may be given some of them.

        Args:
            heads: [n, all heads' outputs].
            residual: [n, hidden_size] the same tokens' residual stream, changed in place.
            own_input: [n, size of an input] of the same tokens, see `forward`.

        Returns:
            [n, hidden_size] this layer's output, not yet in the residual stream.
        """
        normed = self._attended(heads, residual)
        out: Tensor = self.mlp(normed, residual) if isinstance(self.mlp, ExpertsBeside) else self.mlp(normed)
        if self.mlp_output_norm is not None:
            out = self.mlp_output_norm.of_output(out)
        if self.per_layer_residual is not None:
            assert own_input is not None, "layers with an input of their own are given it"
            out = self.per_layer_residual(residual.add_(out), own_input)
        return out if self.scalar is None else self.scalar.scale(residual, out)

    def _attended(self, heads: Tensor, residual: Tensor) -> Activations:
        """What the MLP takes, behind the output projection, which is added to the stream."""
        attended: Tensor = self.self_attn.o_proj(heads)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm.of_output(attended)
        form = self.mlp.rounds_to(len(residual)), self.mlp.reads_unrounded
        return self.post_attention_layernorm.of_stream(attended, residual, *form)

    def fuses(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens takes `forward_fused`.

        Decided by the kind of layer and by sizes and types of weights alone.
        """
        return (
            self._is_whole
            and self._takes_sums
            and all(weight.fuses(num_tokens) for weight in self.self_attn.weights)
            and self.mlp.fuses(num_tokens)
        )

    def forward_fused(self, residual: Tensor, rotations: Rotations, kv_cache: Tensor, metadata: StepMetadata) -> None:
        """Computes what `forward` does with nothing pending before or after.

        Norms, SwiGLU and additions are part of the products.

        A few tokens' products take as long as their weights take to read, and each operation beside
        them a launch.
        """
        assert isinstance(self.input_layernorm, RmsNorm) and isinstance(self.post_attention_layernorm, RmsNorm)
        self.self_attn.add_to(residual, self.input_layernorm, rotations[self.rotation], kv_cache, metadata)
        assert not isinstance(self.mlp, ExpertsBeside), "such layers do not fuse"
        self.mlp.add_to(residual, self.post_attention_layernorm)

    def launch_kind(self) -> Hashable:
        """All that rules, libraries and compilers may look at when they choose a layer's kernels.

        Layers with the same value launch the same kernels for the same steps, and fuse for the
        same.

        A rank's own: only one of several has the bias of an output or down projection.
        """
        # Norms and biases, by their names, are among them.
        parameters = tuple((name, launch_kind(parameter)) for name, parameter in self.named_parameters())
        weights = tuple(weight.launch_kind() for weight in self.self_attn.weights)
        return self._is_whole, self.self_attn.launch_kind(), weights, self.mlp.launch_kind(), parameters


def _mlp(mlp: Mlp | Experts, placement: Placement) -> GatedMlp | ExpertMlp | ExpertsBeside:
    if isinstance(mlp, Mlp):
        return GatedMlp(mlp, placement)
    return ExpertMlp(mlp, placement) if mlp.beside is None else ExpertsBeside(mlp, placement)


def _output_norm(norm: Norm | None, placement: Placement, is_whole: bool = False) -> RmsNorm | None:
    return None if norm is None else residual_norm(norm, placement, is_whole)
