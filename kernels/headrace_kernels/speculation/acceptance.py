"""Which drafts are equal to what was drawn, and where their rows stand then.

Owns the comparison, one program for each row that draws, and what it leaves for the next step. A
draw is a function of logits, seed and position alone, so a row's draws behind right drafts are the
very tokens that it would have drawn one by one: the longest run of drafts that equal the draws
before them is settled, and the draw behind it as well.

    inputs     last  d1  d2  d3          d1 == a, d2 == b, d3 != c
    draws       a    b   c   -           settled: a b c

A draw behind which drafts are computed may owe a bad number to them: masked positions count with a
weight of zero, and zero times NaN is NaN. So a draw of an entry with drafts whose logits are not
finite is not settled: the row stays before it, and draws there again in the next step. A row's only
draw is settled whatever its logits are.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton


class Drawn(NamedTuple):
    """What a step drew, from which hidden states of which tokens."""

    # int64 [num_draws] tokens, and whether the logits of each were finite.
    tokens: Tensor
    finite: Tensor
    # int32 [num_draws] indices of the hidden states in the step's tokens.
    hidden_indices: Tensor
    # int32 [num_draws] the row of each draw, and the draw's place in the row's output.
    rows: Tensor
    output_positions: Tensor
    # int64 [num_tokens] what the step computed.
    step_token_ids: Tensor
    step_positions: Tensor


class RowState(NamedTuple):
    """What rows leave for the next step, int32 [num_rows]."""

    last_tokens: Tensor
    # Positions of the last tokens in their sequences.
    next_positions: Tensor


class Accepted(NamedTuple):
    """What each sample settled, an entry for each sample."""

    # int32; 0: padding, or the row stays where it was.
    counts: Tensor
    # int64 [num_samples, tokens_per_row] drawn tokens, zeros behind the sample's last draw.
    tokens: Tensor
    # int64, positions of the first settled tokens in their sequences.
    positions: Tensor
    # int32, the rows, and the places in their outputs of what they draw next.
    rows: Tensor
    output_positions: Tensor


def accept_drafts_reference(
    drawn: Drawn, first_draws: Tensor, draw_counts: Tensor, state: RowState, tokens_per_row: int, can_stay: bool
) -> Accepted:
    """Specification of `accept_drafts`, in plain PyTorch."""
    is_used = draw_counts > 0
    first = torch.where(is_used, first_draws, 0).long()
    alive = is_used & (drawn.finite[first] | (draw_counts == 1)) if can_stay else is_used.clone()
    counts = alive.int()
    most = drawn.tokens.shape[0] - 1
    last = drawn.step_token_ids.shape[0] - 1
    tokens = drawn.tokens.new_zeros(first.shape[0], tokens_per_row)
    for index in range(tokens_per_row):
        draw = (first + index).clamp(max=most)
        is_drawn = draw_counts > index
        tokens[:, index] = torch.where(is_drawn, drawn.tokens[draw], 0)
        if index + 1 == tokens_per_row:
            break
        draft = drawn.step_token_ids[(drawn.hidden_indices[draw].long() + 1).clamp(max=last)]
        is_finite = drawn.finite[draw] & drawn.finite[(draw + 1).clamp(max=most)]
        alive &= (draw_counts > index + 1) & is_finite & (drawn.tokens[draw] == draft)
        counts += alive
    positions = drawn.step_positions[drawn.hidden_indices[first].long()] + 1
    rows, output_positions = drawn.rows[first], drawn.output_positions[first] + counts
    places = rows[is_used].long()
    settled_last = tokens.gather(1, (counts - 1).clamp(min=0).long()[:, None])[:, 0]
    settled_last = torch.where(counts > 0, settled_last, drawn.step_token_ids[drawn.hidden_indices[first].long()])
    state.last_tokens.index_copy_(0, places, settled_last[is_used].int())
    state.next_positions.index_copy_(0, places, (positions + counts - 1)[is_used].int())
    return Accepted(counts, tokens, positions, rows, output_positions)


# Columns of several steps lie in one buffer, and outputs side by side, so their addresses have any
# alignment: nothing may be compiled for it.
_COLUMNS = ["hidden_indices", "rows", "output_positions", "first_draws", "draw_counts"]
_COLUMNS += ["counts", "settled_rows", "next_outputs"]


@triton.jit(do_not_specialize=_COLUMNS, do_not_specialize_on_alignment=_COLUMNS)
def accept_drafts_kernel(
    drawn_tokens,
    finite,
    hidden_indices,
    rows,
    output_positions,
    step_token_ids,
    step_positions,
    first_draws,
    draw_counts,
    last_tokens,
    next_positions,
    counts,
    settled_tokens,
    settled_positions,
    settled_rows,
    next_outputs,
    TOKENS_PER_ROW: tl.constexpr,
    CAN_STAY: tl.constexpr,
):
    """Program (sample): arguments as those of `accept_drafts`, outputs as `Accepted`."""
    sample = tl.program_id(0)
    num_draws = tl.load(draw_counts + sample)
    if num_draws > 0:
        first = tl.load(first_draws + sample)
        first_place = tl.load(hidden_indices + first)
        token = tl.load(drawn_tokens + first)
        tl.store(settled_tokens + sample * TOKENS_PER_ROW, token)
        is_finite = tl.load(finite + first) != 0
        alive = is_finite | (num_draws == 1) if CAN_STAY else True
        count = tl.where(alive, 1, 0)
        last = tl.where(alive, token, tl.load(step_token_ids + first_place))
        for index in tl.static_range(1, TOKENS_PER_ROW):
            is_drawn = index < num_draws
            before = first + index - 1
            draft_place = tl.load(hidden_indices + before, mask=is_drawn, other=0) + 1
            draft = tl.load(step_token_ids + draft_place, mask=is_drawn, other=-1)
            alive = alive & is_drawn & is_finite & (tl.load(drawn_tokens + before, mask=is_drawn, other=0) == draft)
            is_finite = tl.load(finite + before + 1, mask=is_drawn, other=0) != 0
            alive = alive & is_finite
            token = tl.load(drawn_tokens + first + index, mask=is_drawn, other=0)
            tl.store(settled_tokens + sample * TOKENS_PER_ROW + index, token)
            count = tl.where(alive, index + 1, count)
            last = tl.where(alive, token, last)
        row = tl.load(rows + first)
        position = tl.load(step_positions + first_place) + 1
        tl.store(last_tokens + row, last.to(tl.int32))
        tl.store(next_positions + row, (position + count - 1).to(tl.int32))
        tl.store(counts + sample, count)
        tl.store(settled_positions + sample, position)
        tl.store(settled_rows + sample, row)
        tl.store(next_outputs + sample, tl.load(output_positions + first) + count)
    else:
        tl.store(counts + sample, 0)


def accept_drafts(
    drawn: Drawn, first_draws: Tensor, draw_counts: Tensor, state: RowState, tokens_per_row: int, can_stay: bool
) -> Accepted:
    """Settles what rows drew as far as their drafts were right, and notes where the rows stand.

    The longest run of a row's drafts that equal the draws before them is settled, and the draw
    behind it. Of several draws one from logits that are not finite is not settled, nor any behind.

    Args:
        drawn: The draws; those of a sample are consecutive, and so are their hidden states. What
            is computed behind each but the last is the draft for that draw.
        first_draws: int32 [num_samples], each sample's first draw.
        draw_counts: int32 [num_samples], its number of draws; 0: padding, whose outputs but for
            the count are arbitrary.
        state: Changed in place for the rows of all samples.
        tokens_per_row: Most draws of a sample.
        can_stay: Whether a row may settle nothing, and compute its last token once more. False: its
            first draw is settled even if its logits are not finite.
    """
    if not uses_triton(drawn.tokens):
        return accept_drafts_reference(drawn, first_draws, draw_counts, state, tokens_per_row, can_stay)
    num_samples, device = first_draws.shape[0], drawn.tokens.device
    counts, rows, output_positions = torch.empty(3, num_samples, dtype=torch.int32, device=device)
    tokens = torch.empty(num_samples, tokens_per_row, dtype=torch.int64, device=device)
    positions = torch.empty(num_samples, dtype=torch.int64, device=device)
    accepted = Accepted(counts, tokens, positions, rows, output_positions)
    if num_samples:
        columns = (*drawn, first_draws, draw_counts, *state)
        accept_drafts_kernel[(num_samples,)](*columns, *accepted, tokens_per_row, can_stay, num_warps=1)
    return accepted
