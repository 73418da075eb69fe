"""Collectives of GPUs that read each other's memory: our kernels for what is small, NCCL for the rest.

Owns the memory that all ranks map (`torch.distributed._symmetric_memory`), made once for all layers and graphs. What the kernels do with it is `headrace_kernels.all_reduce`'s. Which way is taken follows from a tensor's shape, so all
ranks take the same. NVLink multicast is never used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.errors import PeerLost
from headrace_backend.parallel.nccl import NcclCollectives
from headrace_kernels import all_reduce
from headrace_kernels.all_reduce import PROGRAMS, Peers, Slots, data_bytes, flag_shape, slot_bytes
from headrace_kernels.all_reduce_words import BLANK

# Largest tensor of the kernels; four times as much is taken of each card, and some MiB for small tensors. 1,024 tokens of a width of 8,192 in bf16.
CAPACITY_BYTES = 16 << 20
_FLAG_BYTES = 4


def reaches_peers(device: torch.device, rank: int, world_size: int) -> bool:
    """Whether a rank's card reaches the memory of the others', which are those beside it in order."""
    first = device.index - rank
    others = (index for index in range(first, first + world_size) if index != device.index)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


class SymmetricCollectives(Collectives):
    """One rank's end of a group whose cards reach each other's memory."""

    def __init__(self, nccl: NcclCollectives, on_enter: Callable[[], None]) -> None:
        """Makes the memory that all ranks map. All ranks make theirs at the same time.

        Args:
            nccl: Of the same group.
            on_enter: As NcclCollectives has it.

        Raises:
            PeerLost: The memory could not be shared with another rank.
        """
        self.rank, self.world_size, self.device = nccl.rank, nccl.world_size, nccl.device
        self._nccl = nccl
        self._on_enter = on_enter
        self._memory = self._shared_memory()
        self.peers = self._peers()
        # Everybody's memory is as it must be at first before anybody writes to it.
        torch.cuda.synchronize(self.device)
        self.all_values(0)

    def _shared_memory(self) -> Tensor:
        """This rank's, uint8: tensors and sums, flags, slots. Held for good: kernels and graphs have the addresses."""
        rows, columns = flag_shape(self.world_size)
        num_bytes = data_bytes(CAPACITY_BYTES) + rows * columns * _FLAG_BYTES
        num_slot_bytes = slot_bytes(self.world_size)
        memory = symmetric_memory.empty(num_bytes + num_slot_bytes, dtype=torch.uint8, device=self.device)
        memory[:num_bytes].zero_()
        memory[num_bytes:].view(torch.int32).fill_(BLANK)
        return memory

    def _peers(self) -> Peers:
        """All ranks' memory as this one sees it."""
        world = dist.group.WORLD
        assert world is not None, "the group is joined"
        try:
            self._handle = symmetric_memory.rendezvous(self._memory, world)
        except RuntimeError as error:
            raise PeerLost(f"the ranks could not share memory: {error}") from error
        starts = list(self._handle.buffer_ptrs)
        assert starts[self.rank] == self._memory.data_ptr(), "what the others map is this memory"
        data = torch.tensor(starts, dtype=torch.int64, device=self.device)
        calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=self.device)
        flags = data + data_bytes(CAPACITY_BYTES)
        ends = [start + self._memory.nbytes - slot_bytes(self.world_size) for start in starts]
        slots = Slots.of(ends, self.rank, self.device)
        return Peers(self.rank, self.world_size, data, flags, calls, CAPACITY_BYTES, slots)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        if not all_reduce.takes(partial, self.peers):
            return self._nccl.all_reduce(partial)
        self._on_enter()
        return all_reduce.all_reduce(partial, self.peers)

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        return self._nccl.all_gather(part)

    def add_rms_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Collectives."""
        if not all_reduce.takes_norm(partial, self.peers):
            return super().add_rms_norm(partial, residual, weight, eps)
        self._on_enter()
        return all_reduce.all_reduce_add_rms_norm(partial, residual, weight, eps, self.peers)
