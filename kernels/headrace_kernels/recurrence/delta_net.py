"""A linear attention between its projections: convolution, gated delta rule, norm and gate.

Owns which operations compute a step. Entries of one token, as decodes are, take one launch
(`decode_kernels`), alone or beside others, which take the operations one after another. In workers
that draft that launch is another one, for entries of some tokens (`drafted_kernels`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from headrace_kernels.recurrence.convolution import causal_convolution
from headrace_kernels.recurrence.decode_kernels import launch_decodes, takes_decodes
from headrace_kernels.recurrence.drafted_kernels import launch_drafted, launch_pending
from headrace_kernels.recurrence.entries import RecurrentEntries
from headrace_kernels.recurrence.gated_delta import (
    LENGTH_EPS,
    DeltaGates,
    DeltaHeads,
    gated_delta,
    gated_delta_chunked,
    launch_by_length,
)
from headrace_kernels.recurrence.output_norm import gated_rms_norm
from headrace_kernels.recurrence.pending import (
    PendingTokens,
    RowStates,
    apply_pending_reference,
    keep_drafts_reference,
    longest_entry,
)
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


def delta_net_reference(
    tokens: ProjectedTokens, weights: DeltaWeights, states: RowStates, entries: RecurrentEntries, heads: DeltaHeads
) -> Tensor:
    """One operation after another. See `delta_net`."""
    mixed, gates = causal_convolution(tokens.mixed, weights.convolution, states.tails, entries), _gates(tokens, weights)
    if states.pending is None:
        return _normed(gated_delta(mixed, gates, states.matrices, entries, heads), tokens, weights)
    apply_pending_reference(gates, states.matrices, states.pending, entries, heads)
    keep_drafts_reference(mixed, gates, states.pending, entries)
    # The kernels of the operation know no drafts.
    return _normed(gated_delta_chunked(mixed, gates, states.matrices, entries, heads), tokens, weights)


def _longer_entries(
    tokens: ProjectedTokens, weights: DeltaWeights, states: RowStates, entries: RecurrentEntries, heads: DeltaHeads
) -> Tensor:
    """Entries of two tokens and more, one operation after another. See `delta_net`.

    Outputs of entries of one token hold anything, and their matrices stay. Their input is kept, in
    a place that their token does not read, so that they may be computed later.
    """
    mixed = causal_convolution(tokens.mixed, weights.convolution, states.tails, entries)
    out = launch_by_length(mixed, _gates(tokens, weights), states.matrices, entries, heads, least=2)
    return _normed(out, tokens, weights)


def _gates(tokens: ProjectedTokens, weights: DeltaWeights) -> DeltaGates:
    return DeltaGates(tokens.correction, tokens.decay, weights.log_decay, weights.decay_bias)


def _normed(out: Tensor, tokens: ProjectedTokens, weights: DeltaWeights) -> Tensor:
    """The rule's outputs [num_tokens, num_value_heads, value_dim], normed and gated."""
    return gated_rms_norm(out, tokens.gate.view(out.shape), weights.norm, weights.norm_eps).flatten(1)


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
    if not (uses_triton(tokens.mixed) and takes_decodes(heads)):
        return delta_net_reference(tokens, weights, states, entries, heads)
    if states.pending is not None:
        return _drafted(tokens, weights, states, states.pending, entries, heads)
    if entries.only_decodes:
        out = tokens.mixed.new_empty(len(tokens.mixed), heads.num_value_heads * heads.value_dim)
    else:
        out = _longer_entries(tokens, weights, states, entries, heads)
    launch_decodes(tokens, weights, states, entries, heads, out, LENGTH_EPS)
    return out


def _drafted(
    tokens: ProjectedTokens,
    weights: DeltaWeights,
    states: RowStates,
    pending: PendingTokens,
    entries: RecurrentEntries,
    heads: DeltaHeads,
) -> Tensor:
    """The kernels of `delta_net` in workers that draft."""
    most = longest_entry(pending.num_drafts)
    mixed = causal_convolution(tokens.mixed, weights.convolution, states.tails, entries, most)
    if entries.only_decodes:
        out = tokens.mixed.new_empty(len(tokens.mixed), heads.num_value_heads * heads.value_dim)
    else:
        launch_pending(weights, states, entries, heads, LENGTH_EPS, most)
        longer = launch_by_length(mixed, _gates(tokens, weights), states.matrices, entries, heads, most + 1)
        out = _normed(longer, tokens, weights)
    launch_drafted(mixed, tokens, weights, states, entries, heads, out, LENGTH_EPS, most)
    return out
