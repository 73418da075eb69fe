"""Collectives of ranks on GPUs, over NCCL.

On the device's current stream, so that they can be captured with the kernels around them; sums that
are begun, on a stream of NCCL's beside it.

NCCL adds in the order of its ring or tree, which it chooses by size: the same bits on every rank
and in every run of one shape, but not the order of the ranks.

Of a sum that is begun torch lets its stream wait for what the current one was given before, and
`wait` lets the current one wait for the sum; the host waits for neither. NCCL's stream takes one
sum after the other, in the order in which they were begun.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from headrace_backend.parallel.collectives import GroupCollectives, PendingAllReduce, PieceRule
from headrace_backend.parallel.errors import PeerLost

_ENVIRONMENT = {
    # NVLink multicast is never used: a program that does can put a shared host's cards out of
    # service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # A captured operation would have its buffers mapped by all ranks: a handshake for each, and
    # mappings of memory that goes with its graph.
    "NCCL_GRAPH_REGISTER": "0",
    # A thread that tells whoever connects to port 28028 of the machine about its ranks, unasked.
    "NCCL_RAS_ENABLE": "0",
    # A sum that was begun gets the first multiprocessors that a product leaves. Otherwise it would
    # begin when all programs of the product have, most of which wait for their turn.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}
# All ranks are on this machine: their addresses are the loopback interface's, and no other network
# is looked for.
_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

# Of a sum, for each rank, from which on steps are cut: with two ranks 64 MiB, 8,192 tokens of an 8B
# Llama in bf16 or 4,096 of a 70B one. On two H200s (2026-11-22) 70B FP8 takes 555 ms instead of 592
# for 8,192 tokens, 8B bf16 102.9 instead of 104.3; 2,048 tokens of 70B, whose sums have 32 MiB,
# took 177 instead of 150. With more ranks products are shorter, and their launches, of which a cut
# step has twice as many, no longer hide behind them: on four, with attention of whole steps as it
# was then, 4,096 tokens of 70B took 235 ms instead of 181, and 8,192 353 instead of 374.
_LEAST_BYTES_A_RANK = 32 << 20
# Of a sum, where steps are replayed from graphs and launches take no time: 1,792 tokens of 70B, in
# pieces of 1,024 and 768. On four H200s 2,048 tokens in pieces took less time than 1,792 that were
# whole.
_LEAST_CAPTURED_BYTES = 28 << 20


def piece_rule(world_size: int) -> PieceRule:
    """Which steps are cut. The first piece is whole tiles of any product's."""
    least_bytes = _LEAST_BYTES_A_RANK * world_size
    return PieceRule(least_bytes, min(least_bytes, _LEAST_CAPTURED_BYTES), multiple=256)


class NcclCollectives(GroupCollectives):
    """One rank's end of a group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        on_enter: Callable[[], None],
        interface: str | None = None,
    ) -> None:
        """Connects to all other ranks and takes the communicator's memory before the first step.

        Args:
            store: The store in which ranks find each other's addresses.
            rank: This process's rank, from 0.
            world_size: Number of ranks.
            device: This rank's card.
            timeout_s: Seconds after which an operation that others do not join is given up.
            on_enter: Called before each operation that is launched by itself; those replayed from
                graphs are not seen.
            interface: Network of this host over which ranks of others connect, where the
                environment (NCCL_SOCKET_IFNAME) names none; None: all ranks are on this machine.

        Raises:
            PeerLost: Another rank did not connect.
        """
        self.rank, self.world_size, self.device = rank, world_size, device
        self.piece_rule = piece_rule(world_size)
        self._on_enter = on_enter
        os.environ.update(_ENVIRONMENT)
        if interface is None:
            os.environ.update(_ONE_HOST)
        else:
            # Exactly this one, and not others that begin so. InfiniBand is used where there is any.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
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

    @staticmethod
    def named_losses() -> contextlib.AbstractContextManager[None]:
        """Implements `GroupCollectives.named_losses`."""
        return _named_losses()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Implements `Collectives.all_reduce`."""
        self._on_enter()
        with _named_losses():
            dist.all_reduce(partial, dist.ReduceOp.SUM, self.group)
        return partial

    def begin_all_reduce(self, partial: Tensor) -> PendingAllReduce:
        """Implements `Collectives.begin_all_reduce`."""
        self._on_enter()
        with _named_losses():
            work = dist.all_reduce(partial, dist.ReduceOp.SUM, self.group, async_op=True)
        assert work is not None, "this process is a rank of the group"
        return NcclAllReduce(work, partial)

    def all_gather(self, part: Tensor) -> Tensor:
        """Implements `Collectives.all_gather`."""
        self._on_enter()
        gathered = torch.empty(self.world_size, *part.shape, dtype=part.dtype, device=part.device)
        with _named_losses():
            dist.all_gather_into_tensor(gathered.flatten(0, 1), part, self.group)
        return gathered

    def all_to_all(self, rows: Tensor, counts: Sequence[int], out: Tensor) -> None:
        """Implements `Collectives.all_to_all`."""
        self._on_enter()
        received = [counts[self.rank]] * self.world_size
        with _named_losses():
            dist.all_to_all_single(out.flatten(0, 1), rows, received, list(counts), self.group)


class NcclAllReduce(PendingAllReduce):
    """A sum on NCCL's stream.

    The allocator knows of a tensor's own stream only, and would give the memory of one that nobody
    holds to the next kernel there. So the tensor is held here until that stream waits for the sum:
    what gets its memory afterwards is launched behind the sum. (torch 2.11 holds it too, until the
    work is waited for, and no longer tells the allocator of the second stream by `record_stream`;
    so memory comes back at a place in the program and not by chance.)
    """

    def __init__(self, work: dist.Work, partial: Tensor) -> None:
        self._work = work
        self._partial = partial

    def wait(self) -> Tensor:
        """Implements `PendingAllReduce.wait`."""
        with _named_losses():
            self._work.wait()
        return self._partial


@contextlib.contextmanager
def _named_losses() -> Iterator[None]:
    """NCCL does not tell whose fault an error is.

    If it is this rank's, no other one ends first, and its words are what is announced.
    """
    try:
        yield
    except dist.DistBackendError as error:
        raise PeerLost(f"the ranks' connection broke: {error}") from error
