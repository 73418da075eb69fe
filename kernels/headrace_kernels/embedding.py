"""Token embedding: rows of a table.

The table may be one rank's part of one that is split over the vocabulary.

Launch rule: up to 2,048 numbers of one row a program, 4 warps, whatever the number of tokens; it
runs once a step. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton


def embedding_reference(token_ids: Tensor, weight: Tensor, first_token: int = 0) -> Tensor:
    """Specification of `embedding`, in plain PyTorch."""
    local = token_ids - first_token if first_token else token_ids
    outside = (local < 0) | (local >= weight.shape[0])
    return weight.index_select(0, local.masked_fill(outside, 0)).masked_fill_(outside[:, None], 0)


@triton.jit(do_not_specialize=["token_ids", "first_token", "num_rows"])
def _embedding_kernel(token_ids, weight, out, first_token, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token) - first_token
    is_here = (row >= 0) & (row < num_rows)
    values = tl.load(weight + row * SIZE + offs, mask=is_here & (offs < SIZE), other=0.0)
    tl.store(out + token * SIZE + offs, values, mask=offs < SIZE)


def _embedding_triton(token_ids: Tensor, weight: Tensor, first_token: int) -> Tensor:
    num_tokens, (num_rows, size) = token_ids.shape[0], weight.shape
    out = torch.empty(num_tokens, size, dtype=weight.dtype, device=weight.device)
    block = min(2048, triton.next_power_of_2(size))
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, block))
        _embedding_kernel[grid](token_ids, weight, out, first_token, num_rows, size, block, num_warps=4)
    return out


def embedding(token_ids: Tensor, weight: Tensor, first_token: int = 0, whole: bool = True) -> Tensor:
    """Looks the rows of tokens up in an embedding table.

    Args:
        token_ids: [num_tokens] int64.
        weight: [rows, size], contiguous, the rows of tokens first_token, first_token + 1, ...
        first_token: The token of row 0.
        whole: The table holds every token that can occur, so that nothing has to be masked.

    Returns:
        [num_tokens, size]; zeros for tokens whose row another rank holds, so that the all-reduce is
        the embedding.
    """
    if uses_triton(weight):
        return _embedding_triton(token_ids, weight, first_token)
    if whole:
        return weight.index_select(0, token_ids)
    return embedding_reference(token_ids, weight, first_token)
