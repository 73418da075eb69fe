"""All-reduce over GPUs, alone or fused with the residual addition and the norm behind it.

Owns the memory that ranks write to each other, as addresses, and the choice of the way; who makes
that memory (`torch.distributed._symmetric_memory`) and what else there is (NCCL) is the caller's
business.

Launch rule: one shot sends a tensor to each other rank, two shots twice a share of it: as much with
two ranks, half as much with four, a quarter with eight, but a second trip. On four H200s one shot
is ahead up to 128 KiB (3.6 us against 4.2), NCCL never below `Peers.capacity_bytes`
(docs/experiments.md, "Launch rules of kernels"); with two ranks and eight the rule goes by the
bytes sent, not measured. The norm is fused where one shot would be taken, up to 32 rows; with its
rounding to 8 bits by two shots, up to 64 rows a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.collectives.all_reduce_kernels import (
    one_shot_kernel,
    one_shot_norm_kernel,
    two_shot_kernel,
    two_shot_norm_kernel,
)
from headrace_kernels.collectives.slots import BUFFERS, KINDS, STATE_SIZE
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import add_rms_norm_reference, launch_rule, rounded_add_rms_norm_reference
from headrace_kernels.rounded_tokens import RoundedTokens

# Programs of every launch, whatever its size: they count calls.
PROGRAMS = 64
# Loads and stores of 16 bytes.
_VECTOR_BYTES = 16
_WARP = 32
_FEWEST_WARPS = 8
_TWO_SHOT_WARPS = 16
_MOST_WARPS = 32
# A vector for each thread: with two, eight ranks' do not fit into the registers.
_LONGEST_ROW_BYTES = _MOST_WARPS * _WARP * _VECTOR_BYTES
# Of 16-bit numbers, two vectors for each of 16 warps' threads, which have twice as many registers.
# Below the least, a program of the norm's own kernel has several rows, and another order of
# additions.
_LEAST_ROUNDED_ROW, _LONGEST_ROUNDED_ROW = 1025, 8192
# Below, one shot with its norm and a rounding behind it is ahead (two H200s, rows of 8,192 at 512
# KiB: 6.3 us against 7.6; docs/experiments.md).
_LEAST_ROUNDED_BYTES = 1 << 20
# All that 16 warps can have, which eight ranks' rows of 8,192 need. Left to itself the assembler
# makes room for two programs where none come, and spills.
_MOST_REGISTERS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """Memory of all ranks of a group that they write to, `memory_bytes` of each rank's.

    Before the first call all words are `collectives.words.SENTINEL`.
    """

    rank: int
    world_size: int
    # Address of this rank's memory, and, as this rank sees them, of its own first slots in the
    # others', beginning with the rank behind it.
    slots: int
    others: tuple[int, ...]
    # int32 [PROGRAMS, STATE_SIZE] on this rank's card alone, zero at first.
    state: Tensor
    # Bounds the tensors.
    capacity_bytes: int

    @classmethod
    def of(cls, addresses: Sequence[int], rank: int, capacity_bytes: int, device: torch.device) -> Peers:
        """A rank's view, by the addresses of all ranks' memory as it sees them."""
        own = rank * slot_bytes(capacity_bytes, len(addresses))
        behind = [*addresses[rank + 1 :], *addresses[:rank]]
        state = torch.zeros(PROGRAMS, STATE_SIZE, dtype=torch.int32, device=device)
        others = tuple(address + own for address in behind)
        return cls(rank, len(addresses), addresses[rank], others, state, capacity_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bounds what is sent in one shot."""
        return slot_bytes(self.capacity_bytes, self.world_size)


def slot_bytes(capacity_bytes: int, world_size: int) -> int:
    """Bytes of a slot: a rank's share of the largest tensor."""
    return -(-capacity_bytes // (world_size * _VECTOR_BYTES)) * _VECTOR_BYTES


def memory_bytes(capacity_bytes: int, world_size: int) -> int:
    """Bytes of a rank's memory: the slots of all ranks."""
    return BUFFERS * KINDS * world_size * slot_bytes(capacity_bytes, world_size)


def all_reduce_reference(parts: Sequence[Tensor]) -> Tensor:
    """All-reduce of tensors in the order of the ranks, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduce_add_rms_norm_reference(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += all-reduce of the parts` in place, then the norm of that."""
    return add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps)


def all_reduce_rounded_add_rms_norm_reference(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounding: InputRounding
) -> RoundedTokens:
    """`residual += all-reduce of the parts` in place, then its norm, rounded to 8 bits."""
    return rounded_add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps, rounding)


def takes(x: Tensor, peers: Peers) -> bool:
    """Whether `all_reduce` can take a tensor: it fits, lies in one piece and is whole vectors.

    By its shape alone, so alike on all ranks.
    """
    is_taken = x.nbytes <= peers.capacity_bytes and x.nbytes % _VECTOR_BYTES == 0 and x.is_contiguous()
    # Ranks that went different ways by their addresses would wait for each other forever.
    assert not is_taken or x.data_ptr() % _VECTOR_BYTES == 0, "what is added up begins with an allocation"
    return is_taken


def one_shot_bytes(world_size: int) -> int:
    """The largest tensor that one shot is taken for."""
    if world_size == 2:
        return 512 << 10
    return (256 if world_size <= 4 else 128) << 10


def can_one_shot(x: Tensor, peers: Peers) -> bool:
    """Whether `one_shot` can take a tensor.

    The tensor has a vector for each thread at most, and fits a slot.
    """
    return x.nbytes <= min(peers.slot_bytes, PROGRAMS * _MOST_WARPS * _WARP * _VECTOR_BYTES) and takes(x, peers)


def can_norm(x: Tensor, peers: Peers) -> bool:
    """Whether `all_reduce_add_rms_norm` can take a tensor [num_rows, size].

    A row has a vector for each thread at most.
    """
    row_bytes = x.shape[-1] * x.itemsize
    is_row_taken = row_bytes <= _LONGEST_ROW_BYTES and row_bytes % _VECTOR_BYTES == 0
    return is_row_taken and 0 < len(x) <= PROGRAMS // 2 and can_one_shot(x, peers)


def takes_norm(x: Tensor, peers: Peers) -> bool:
    """Whether a tensor [num_rows, size] is reduced together with the norm.

    Its size alone decides, so all ranks decide alike.
    """
    return x.nbytes <= one_shot_bytes(peers.world_size) and can_norm(x, peers)


def can_rounded_norm(x: Tensor, peers: Peers) -> bool:
    """Whether `all_reduce_rounded_add_rms_norm` can take a tensor [num_rows, size].

    It takes 16-bit dtypes, and a program for each row of a rank's share.

    By its size alone, so alike on all ranks.
    """
    num_rows, size = x.shape
    share = -(-num_rows // peers.world_size)
    is_row_taken = _LEAST_ROUNDED_ROW <= size <= _LONGEST_ROUNDED_ROW and size * x.itemsize % _VECTOR_BYTES == 0
    is_share_taken = 0 < share <= PROGRAMS and share * size * x.itemsize <= peers.slot_bytes
    return x.itemsize == 2 and is_row_taken and is_share_taken and takes(x, peers)


def takes_rounded_norm(x: Tensor, peers: Peers) -> bool:
    """Whether that is no slower than the sum, and norm and rounding behind it."""
    return x.nbytes >= _LEAST_ROUNDED_BYTES and can_rounded_norm(x, peers)


def all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """All-reduce of a tensor that `takes` accepts.

    All ranks call it alike, one call after the other. Can be captured in a graph.

    Args:
        x: This rank's, fp32, bf16 or fp16.
        peers: The group.

    Returns:
        The sum, in x's shape and type, the same bits on all ranks.
    """
    is_small = x.nbytes <= one_shot_bytes(peers.world_size) and can_one_shot(x, peers)
    return (one_shot if is_small else two_shot)(x, peers)


def one_shot(x: Tensor, peers: Peers) -> Tensor:
    """`all_reduce` by that way, for what `can_one_shot`."""
    assert can_one_shot(x, peers), "no whole vectors, or more than slots or programs can take"
    # A vector for each thread; as many threads, and so one kernel, for all sizes that the rule
    # leaves to it.
    most_bytes = max(x.nbytes, one_shot_bytes(peers.world_size))
    num_warps = triton.next_power_of_2(triton.cdiv(most_bytes, PROGRAMS * _WARP * _VECTOR_BYTES))
    return _launch(one_shot_kernel, x, peers, max(_FEWEST_WARPS, num_warps))


def two_shot(x: Tensor, peers: Peers) -> Tensor:
    """`all_reduce` by that way, for `takes` ones."""
    assert takes(x, peers), "neither vectors nor within the capacity"
    return _launch(two_shot_kernel, x, peers, _TWO_SHOT_WARPS)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """Adds the all-reduce to the residual stream in place and returns the stream's norm.

    It takes what `can_norm`.

    Args:
        x: [num_rows, size], this rank's.
        residual: [num_rows, size] contiguous, in x's type; the same on all ranks.
        weight: [size].
        eps: Added to the mean square.
        peers: The group.

    Returns:
        [num_rows, size] in x's type.
    """
    assert can_norm(x, peers), "no whole vectors, or more than slots or programs can take"
    out = torch.empty_like(residual)
    num_rows, size = x.shape
    block = max(4 * _WARP, triton.next_power_of_2(size * x.itemsize // _VECTOR_BYTES))
    arguments = (x, residual, weight, out, peers.slots, peers.others, peers.state, peers.rank, num_rows, eps)
    constants = (peers.slot_bytes, size, peers.world_size, PROGRAMS, block)
    early = card.launches_early(x.device)
    one_shot_norm_kernel[(PROGRAMS,)](*arguments, *constants, early, num_warps=block // _WARP, launch_pdl=early)
    return out


def all_reduce_rounded_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: InputRounding, peers: Peers
) -> RoundedTokens:
    """Does `all_reduce_add_rms_norm`, with the norm rounded to 8 bits.

    It takes what `can_rounded_norm`, and gives to the bit what `rounded_add_rms_norm` makes of the
    sum.

    Args:
        x: [num_rows, size], this rank's, bf16 or fp16.
        residual: [num_rows, size] contiguous, in x's type; the same on all ranks.
        weight: [size].
        eps: Added to the mean square.
        rounding: A symmetric one without a static scale, as `round_tokens` takes it.
        peers: The group.

    Returns:
        [num_rows, size].
    """
    assert can_rounded_norm(x, peers), "no whole vectors, or more than slots or programs can take"
    tokens = RoundedTokens.empty(x.shape, rounding, x.device)
    num_rows, size = x.shape
    # Threads as the norm's own kernel has them.
    _, block, num_warps = launch_rule(size)
    arguments = (x, residual, weight, tokens.numbers, tokens.scales, peers.slots, peers.others, peers.state, peers.rank)
    constants = (peers.slot_bytes, size, peers.world_size, PROGRAMS, block * x.itemsize // _VECTOR_BYTES)
    early = card.launches_early(x.device)
    limits = {"num_warps": num_warps, "maxnreg": _MOST_REGISTERS, "launch_pdl": early}
    grouping = tokens.grouping(block)
    two_shot_norm_kernel[(PROGRAMS,)](*arguments, num_rows, eps, *grouping, *constants, early, **limits)
    return tokens


def _launch(kernel: triton.runtime.JITFunction, x: Tensor, peers: Peers, num_warps: int) -> Tensor:
    out = torch.empty_like(x)
    # A call of nothing would wait for nobody, and be counted.
    if num_vectors := x.nbytes // _VECTOR_BYTES:
        arguments = (x, out, peers.slots, peers.others, peers.state, peers.rank, num_vectors)
        early = card.launches_early(x.device)
        constants = (peers.slot_bytes, peers.world_size, PROGRAMS, num_warps * _WARP, early)
        kernel[(PROGRAMS,)](*arguments, *constants, num_warps=num_warps, launch_pdl=early)
    return out
