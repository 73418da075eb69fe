"""Collectives of GPUs that read each other's memory: our kernels for small tensors, else NCCL.

Owns the memory that all ranks map (`torch.distributed._symmetric_memory`), made once for all layers
and graphs. What the kernels do with it is `headrace_kernels.collectives.all_reduce`'s. Which way is
taken follows from a tensor's shape, so all ranks take the same. NVLink multicast is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from headrace_backend.parallel.collectives import Collectives, PendingAllReduce
from headrace_backend.parallel.errors import PeerLost
from headrace_backend.parallel.nccl import NcclCollectives
from headrace_kernels.collectives import all_reduce
from headrace_kernels.collectives.all_reduce import Peers, memory_bytes
from headrace_kernels.collectives.words import SENTINEL, SENTINEL_BYTES
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import RoundedTokens

# Largest tensor of the kernels; six times as much is taken of each card. 1,024 tokens of a width of
# 8,192 in bf16.
CAPACITY_BYTES = 16 << 20


def reaches_peers(device: torch.device, rank: int, world_size: int) -> bool:
    """Whether a rank's card reaches the memory of the others, which lie beside it in order."""
    first = device.index - rank
    others = (index for index in range(first, first + world_size) if index != device.index)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


class SymmetricCollectives(Collectives):
    """One rank's end of a group whose cards reach each other's memory."""

    def __init__(self, nccl: NcclCollectives, on_enter: Callable[[], None]) -> None:
        """Makes the memory that all ranks map. All ranks make theirs at the same time.

        Args:
            nccl: NCCL's collectives of the same group.
            on_enter: Called before each operation that is launched by itself (see
                `NcclCollectives`).

        Raises:
            PeerLost: The memory could not be shared with another rank.
        """
        self.rank, self.world_size, self.device = nccl.rank, nccl.world_size, nccl.device
        self.piece_rule = nccl.piece_rule
        self._nccl = nccl
        self._on_enter = on_enter
        # Held for good: kernels and graphs have the addresses.
        num_words = memory_bytes(CAPACITY_BYTES, self.world_size) // SENTINEL_BYTES
        self._memory = symmetric_memory.empty(num_words, dtype=torch.int32, device=self.device).fill_(SENTINEL)
        self.peers = Peers.of(self._addresses(), self.rank, CAPACITY_BYTES, self.device)
        # All words hold the sentinel before anybody writes one.
        torch.cuda.synchronize(self.device)
        self.all_values(0)

    def _addresses(self) -> list[int]:
        """Returns the address of each rank's memory in this process, by rank."""
        group = self._nccl.group or dist.group.WORLD
        assert group is not None, "the group is joined"
        try:
            self._handle = symmetric_memory.rendezvous(self._memory, group)
        except RuntimeError as error:
            raise PeerLost(f"the ranks could not share memory: {error}") from error
        addresses = list(self._handle.buffer_ptrs)
        assert addresses[self.rank] == self._memory.data_ptr(), "what the others map is this memory"
        return addresses

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Implements `Collectives.all_reduce`."""
        if not all_reduce.takes(partial, self.peers):
            return self._nccl.all_reduce(partial)
        self._on_enter()
        return all_reduce.all_reduce(partial, self.peers)

    def begin_all_reduce(self, partial: Tensor) -> PendingAllReduce:
        """Implements `Collectives.begin_all_reduce`.

        NCCL's whatever its size: our kernels are programs that wait for other cards, and would keep
        products from as many multiprocessors.
        """
        return self._nccl.begin_all_reduce(partial)

    def all_gather(self, part: Tensor) -> Tensor:
        """Implements `Collectives.all_gather`."""
        return self._nccl.all_gather(part)

    def all_to_all(self, rows: Tensor, counts: Sequence[int], out: Tensor) -> None:
        """Implements `Collectives.all_to_all`."""
        self._nccl.all_to_all(rows, counts, out)

    def add_rms_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Implements `Collectives.add_rms_norm`."""
        if not all_reduce.takes_norm(partial, self.peers):
            return super().add_rms_norm(partial, residual, weight, eps)
        self._on_enter()
        return all_reduce.all_reduce_add_rms_norm(partial, residual, weight, eps, self.peers)

    def rounded_add_rms_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: InputRounding
    ) -> RoundedTokens:
        """Implements `Collectives.rounded_add_rms_norm`."""
        if not all_reduce.takes_rounded_norm(partial, self.peers):
            return super().rounded_add_rms_norm(partial, residual, weight, eps, rounding)
        self._on_enter()
        return all_reduce.all_reduce_rounded_add_rms_norm(partial, residual, weight, eps, rounding, self.peers)
