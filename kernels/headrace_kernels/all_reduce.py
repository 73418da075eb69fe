"""Adding tensors of several GPUs up, alone or fused with the residual addition and the norm behind it.

Owns the memory that ranks read of each other, as addresses, and the choice of the way; who makes that memory (`torch.distributed._symmetric_memory`) and what else there is (NCCL) is the caller's business.

Launch rule: not measured yet on these kernels. By what torch's own kernels of this kind take on H200s without multicast (two GPUs: two shots are as fast at 64 KiB and faster from 256 KiB on; four: faster from 128 KiB on, and
NCCL no faster at 16 MiB), one shot up to 128 KiB, two up to `Peers.capacity_bytes`. Fused with the norm where one shot would be taken. 32 programs for all, of 16 warps where rows are long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from headrace_kernels.all_reduce_kernels import two_shot_kernel
from headrace_kernels.all_reduce_push_kernels import push_kernel, push_norm_kernel
from headrace_kernels.rms_norm import add_rms_norm_reference

# Programs of every launch, whatever its size: they count calls in step. All run at once on any card.
PROGRAMS = 32
PUSH_PROGRAMS = 64
# Of a rank in each of the three buffers of each other rank: a vector for each of 512 threads of each program.
SLOT_BYTES = 512 << 10
_BUFFERS = 3
PUSH_BYTES = 256 << 10
# Loads and stores of 16 bytes.
_VECTOR_BYTES = 16
# Numbers of a program's turn.
_BLOCK = 4096
_PUSH_WARPS = 8
_WARP = 32
_MOST_WARPS = 32
# A vector for each thread: with two, eight ranks' do not fit into the registers.
_LONGEST_ROW_BYTES = _MOST_WARPS * _WARP * _VECTOR_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Memory that the other ranks write small tensors to, `slot_bytes(world_size)` of each rank's, all words `all_reduce_words.BLANK` at first."""

    # Address of this rank's, and of its own first slot in the others' memory, as this rank sees them, beginning with the rank behind it.
    own: int
    others: tuple[int, ...]
    # int32 [PUSH_PROGRAMS, 2] on this rank's card alone, zero at first.
    state: Tensor

    @classmethod
    def of(cls, addresses: Sequence[int], rank: int, device: torch.device) -> Slots:
        """The view of a rank, by the addresses of all ranks' slots."""
        behind = [*addresses[rank + 1 :], *addresses[:rank]]
        state = torch.zeros(PUSH_PROGRAMS, 2, dtype=torch.int32, device=device)
        return cls(addresses[rank], tuple(address + rank * SLOT_BYTES for address in behind), state)


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """Memory that all ranks of a group read, of which each has its own. `capacity_bytes` bound the tensors."""

    rank: int
    world_size: int
    # int64 [world_size] on this rank's card: addresses, as it sees them, of the ranks' `data_bytes(capacity)`.
    data: Tensor
    # int64 [world_size]: addresses of the ranks' flags, int32 [world_size, PROGRAMS], zero at first.
    flags: Tensor
    # int32 [PROGRAMS] on this rank's card alone, zero at first.
    calls: Tensor
    capacity_bytes: int
    slots: Slots

    def capacity(self, dtype: torch.dtype) -> int:
        """Numbers that a tensor may have."""
        return self.capacity_bytes // dtype.itemsize


def data_bytes(capacity_bytes: int) -> int:
    """Memory of a rank: two halves for tensors, two for sums."""
    return 4 * capacity_bytes


def slot_bytes(world_size: int) -> int:
    """Memory of a rank for the slots of all."""
    return _BUFFERS * world_size * SLOT_BYTES


def flag_shape(world_size: int) -> tuple[int, int]:
    """Of a rank's flags."""
    return world_size, PROGRAMS


def all_reduce_reference(parts: Sequence[Tensor]) -> Tensor:
    """Sum of the ranks' tensors in their order, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduce_add_rms_norm_reference(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += sum of the ranks' tensors` in place, then the norm of that."""
    return add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps)


def takes(x: Tensor, peers: Peers) -> bool:
    """Whether `all_reduce` can take a tensor: it fits, lies in one piece and is whole vectors. By its shape alone, so alike on all ranks."""
    is_taken = x.nbytes <= peers.capacity_bytes and x.nbytes % _VECTOR_BYTES == 0 and x.is_contiguous()
    # Ranks that went different ways by their addresses would wait for each other forever.
    assert not is_taken or x.data_ptr() % _VECTOR_BYTES == 0, "what is added up begins with an allocation"
    return is_taken


def can_norm(x: Tensor, peers: Peers) -> bool:
    """Whether `all_reduce_add_rms_norm` can take a tensor [num_rows, size]."""
    row_bytes = x.shape[-1] * x.itemsize
    is_row_taken = row_bytes <= _LONGEST_ROW_BYTES and row_bytes % _VECTOR_BYTES == 0
    return is_row_taken and 0 < x.nbytes <= SLOT_BYTES and len(x) <= PUSH_PROGRAMS // 2 and takes(x, peers)


def takes_norm(x: Tensor, peers: Peers) -> bool:
    """Whether a tensor [num_rows, size] is added up together with the norm; by its size alone, so alike on all ranks."""
    return x.nbytes <= PUSH_BYTES and can_norm(x, peers)


def all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """Sum of the ranks' tensors, for `takes` ones. All ranks call it alike. Can be captured in a graph.

    Args:
        x: This rank's, fp32, bf16 or fp16.
        peers: The group.

    Returns:
        The sum, in x's shape and type, the same bits on all ranks.
    """
    return (push if x.nbytes <= PUSH_BYTES else two_shot)(x, peers)


def push(x: Tensor, peers: Peers) -> Tensor:
    """`all_reduce` by that way, up to `SLOT_BYTES`."""
    assert takes(x, peers) and x.nbytes <= SLOT_BYTES, "neither vectors nor within a slot"
    out = torch.empty_like(x)
    # A call of nothing would wait for nobody, and be counted.
    if num_vectors := x.nbytes // _VECTOR_BYTES:
        slots = peers.slots
        # A vector for each thread.
        num_warps = triton.next_power_of_2(max(_PUSH_WARPS, triton.cdiv(num_vectors, PUSH_PROGRAMS * _WARP)))
        arguments = (x, out, slots.own, slots.others, slots.state, peers.rank, num_vectors)
        constants = (SLOT_BYTES, peers.world_size, PUSH_PROGRAMS, num_warps * _WARP)
        push_kernel[(PUSH_PROGRAMS,)](*arguments, *constants, num_warps=num_warps)
    return out


def two_shot(x: Tensor, peers: Peers) -> Tensor:
    """`all_reduce` by that way, whatever the size."""
    assert takes(x, peers), "neither vectors nor within the capacity"
    out = torch.empty_like(x)
    vector = _VECTOR_BYTES // x.itemsize
    arguments = (x, out, peers.data, peers.flags, peers.calls, peers.rank, x.numel() // vector)
    constants = (peers.capacity(x.dtype), vector, peers.world_size, PROGRAMS, _BLOCK)
    two_shot_kernel[(PROGRAMS,)](*arguments, *constants, num_warps=16)
    return out


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """Adds the sum of the ranks' tensors to the residual stream in place and gives the norm of that, for what `can_norm`.

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
    slots = peers.slots
    arguments = (x, residual, weight, out, slots.own, slots.others, slots.state, peers.rank, num_rows, eps)
    constants = (SLOT_BYTES, size, peers.world_size, PUSH_PROGRAMS, block)
    push_norm_kernel[(PUSH_PROGRAMS,)](*arguments, *constants, num_warps=min(_MOST_WARPS, block // _WARP))
    return out
