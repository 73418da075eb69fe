"""Collectives of ranks on GPUs, over NCCL. On the device's current stream, so that they can be captured with the kernels around them.

NCCL adds in the order of its ring or tree, which it chooses by size: the same bits on every rank and in every run of one shape, but not the order of the ranks.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.errors import PeerLost

_ENVIRONMENT = {
    # NVLink multicast is never used: a program that does can put a shared host's cards out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # A captured operation would have its buffers mapped by all ranks: a handshake for each, and mappings of memory that goes with its graph.
    "NCCL_GRAPH_REGISTER": "0",
    # All ranks are on this machine: their addresses are the loopback interface's, and no other network is looked for.
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    # A thread that tells whoever connects to port 28028 of the machine about its ranks, unasked.
    "NCCL_RAS_ENABLE": "0",
}


class NcclCollectives(Collectives):
    """One rank's end of a group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        on_enter: Callable[[], None],
    ) -> None:
        """Connects to all others; the communicator's memory is taken now and not by the first step.

        Args:
            store: Where ranks find each other's addresses.
            rank: Of this process.
            world_size: Number of ranks, all on this machine.
            device: This rank's card.
            timeout_s: Seconds after which an operation that others do not join is given up.
            on_enter: Called before each operation that is launched by itself; those replayed from graphs are not seen.

        Raises:
            PeerLost: Another rank did not connect.
        """
        self.rank, self.world_size, self.device = rank, world_size, device
        self._on_enter = on_enter
        os.environ.update(_ENVIRONMENT)
        try:
            dist.init_process_group(
                "nccl",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
                device_id=device,
            )
        except RuntimeError as error:
            raise PeerLost(f"the ranks could not be connected: {error}") from error

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        self._on_enter()
        try:
            dist.all_reduce(partial)
        except dist.DistBackendError as error:
            raise _peer_lost(error) from error
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        self._on_enter()
        gathered = torch.empty(self.world_size, *part.shape, dtype=part.dtype, device=part.device)
        try:
            dist.all_gather_into_tensor(gathered.flatten(0, 1), part)
        except dist.DistBackendError as error:
            raise _peer_lost(error) from error
        return gathered


def _peer_lost(error: dist.DistBackendError) -> PeerLost:
    """NCCL does not tell whose fault it was. If it was this rank's, no other one ends first, and its words are what is told."""
    return PeerLost(f"the ranks' connection broke: {error}")
