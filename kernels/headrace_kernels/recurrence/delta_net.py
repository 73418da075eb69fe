"""A linear attention between its projections: convolution, gated delta rule, norm and gate.

Owns which operations compute a step. Entries of one token alone, as decodes are, take one launch
(`decode_kernels`); other steps take the operations one after another.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from headrace_kernels.recurrence.convolution import causal_convolution
from headrace_kernels.recurrence.decode_kernels import launch_decodes, takes_decodes
from headrace_kernels.recurrence.entries import RecurrentEntries
from headrace_kernels.recurrence.gated_delta import LENGTH_EPS, DeltaGates, DeltaHeads, gated_delta
from headrace_kernels.recurrence.output_norm import gated_rms_norm
from headrace_kernels.triton_runtime import uses_triton


class ProjectedTokens(NamedTuple):
    """What the projections give for each token: views of one or two products, with strides."""

    # [num_tokens, heads.num_channels] queries, keys and values of all heads.
    mixed: Tensor
    # [num_tokens, all heads' outputs] gates of outputs.
    gate: Tensor
    # [num_tokens, num_value_heads] each, logits of correction and decay.
    correction: Tensor
    decay: Tensor


class DeltaWeights(NamedTuple):
    """Weights of a layer beside its projections."""

    # [heads.num_channels, kernel].
    convolution: Tensor
    # fp32 [num_value_heads] each.
    log_decay: Tensor
    decay_bias: Tensor
    # [value_dim] of the norm of each head's output, and what is added to the mean square.
    norm: Tensor
    norm_eps: float


class RowStates(NamedTuple):
    """States of all rows, fp32: views whose lines have a stride and are contiguous."""

    # [num_rows, num_value_heads, key_dim, value_dim].
    matrices: Tensor
    # [num_rows, kernel, heads.num_channels] kept inputs, see `causal_convolution`.
    tails: Tensor


def delta_net_reference(
    tokens: ProjectedTokens, weights: DeltaWeights, states: RowStates, entries: RecurrentEntries, heads: DeltaHeads
) -> Tensor:
    """One operation after another. See `delta_net`."""
    mixed = causal_convolution(tokens.mixed, weights.convolution, states.tails, entries)
    gates = DeltaGates(tokens.correction, tokens.decay, weights.log_decay, weights.decay_bias)
    out = gated_delta(mixed, gates, states.matrices, entries, heads)
    gate = tokens.gate.view(-1, heads.num_value_heads, heads.value_dim)
    return gated_rms_norm(out, gate, weights.norm, weights.norm_eps).flatten(1)


def delta_net(
    tokens: ProjectedTokens, weights: DeltaWeights, states: RowStates, entries: RecurrentEntries, heads: DeltaHeads
) -> Tensor:
    """Computes what lies between the projections of a linear attention.

    Args:
        tokens: What the projections give.
        weights: The layer's other weights.
        states: States of all rows, changed in place.
        entries: Entries of the step.
        heads: Numbers and sizes of heads.

    Returns:
        [num_tokens, all heads' outputs] in the type of the tokens. Those of no entry hold anything.
    """
    if not (uses_triton(tokens.mixed) and entries.only_decodes and takes_decodes(heads)):
        return delta_net_reference(tokens, weights, states, entries, heads)
    out = tokens.mixed.new_empty(len(tokens.mixed), heads.num_value_heads * heads.value_dim)
    launch_decodes(tokens, weights, states, entries, heads, out, LENGTH_EPS)
    return out
