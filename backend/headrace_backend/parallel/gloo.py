"""Collectives of ranks on a CPU, over gloo's sockets.

Ranks of one host use the loopback interface.

A sum is a gather and an addition in the order of the ranks, in fp32. That moves more bytes than
gloo's own ring, and is what the kernels on GPUs do with messages of this size; gloo's order depends
on the shape.
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

from headrace_backend.parallel.collectives import GroupCollectives, PendingAllReduce
from headrace_backend.parallel.errors import PeerLost
from headrace_kernels.collectives.all_reduce import all_reduce_reference

_INTERFACE = "GLOO_SOCKET_IFNAME"
# Part of every message about a connection, and of none about shapes.
_CONNECTION = "gloo/transport"


class GlooCollectives(GroupCollectives):
    """One rank's end of a group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_enter: Callable[[], None],
        interface: str | None = None,
    ) -> None:
        """Connects to all others.

        Args:
            store: The store in which ranks find each other's addresses.
            rank: This process's rank, from 0.
            world_size: Number of ranks.
            timeout_s: Seconds after which a rank that does not come is lost.
            on_enter: Called before each operation, for whoever watches progress.
            interface: Network of this host over which ranks of others connect, where the
                environment (GLOO_SOCKET_IFNAME) names none; None: all ranks are on this machine.

        Raises:
            PeerLost: Another rank did not connect.
        """
        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cpu")
        self._on_enter = on_enter
        # Before gloo looks for an address: by default it resolves the machine's name and may listen
        # to any network.
        if interface is None:
            os.environ[_INTERFACE] = "lo"
        else:
            os.environ.setdefault(_INTERFACE, interface)
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise PeerLost(f"the ranks could not be connected: {error}") from error

    @staticmethod
    def named_losses() -> contextlib.AbstractContextManager[None]:
        """Implements `GroupCollectives.named_losses`."""
        return _named_losses()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Implements `Collectives.all_reduce`."""
        return all_reduce_reference(self.all_gather(partial).unbind())

    def all_gather(self, part: Tensor) -> Tensor:
        """Implements `Collectives.all_gather`."""
        return self._begin_gather(part).wait()

    def all_to_all(self, rows: Tensor, counts: Sequence[int], out: Tensor) -> None:
        """Implements `Collectives.all_to_all`."""
        self._on_enter()
        received = [counts[self.rank]] * self.world_size
        with _named_losses():
            dist.all_to_all_single(out.flatten(0, 1), rows, received, list(counts), self.group)

    def begin_all_reduce(self, partial: Tensor) -> PendingAllReduce:
        """Implements `Collectives.begin_all_reduce`."""
        return GatheredAllReduce(self._begin_gather(partial))

    def _begin_gather(self, part: Tensor) -> BegunGather:
        self._on_enter()
        gathered = torch.empty(self.world_size, *part.shape, dtype=part.dtype)
        with _named_losses():
            work = dist.all_gather_into_tensor(gathered.flatten(0, 1), part, self.group, async_op=True)
        assert work is not None, "this process is a rank of the group"
        return BegunGather(work, part, gathered)


class BegunGather:
    """A gather that gloo's threads are at."""

    def __init__(self, work: dist.Work, part: Tensor, gathered: Tensor) -> None:
        self._work = work
        # Read and written until then.
        self._part, self._gathered = part, gathered

    def wait(self) -> Tensor:
        """What was gathered, [world_size, *part.shape]."""
        with _named_losses():
            self._work.wait()
        return self._gathered


class GatheredAllReduce(PendingAllReduce):
    """The sum of what is being gathered."""

    def __init__(self, gather: BegunGather) -> None:
        self._gather = gather

    def wait(self) -> Tensor:
        """Implements `PendingAllReduce.wait`."""
        return all_reduce_reference(self._gather.wait().unbind())


@contextlib.contextmanager
def _named_losses() -> Iterator[None]:
    """Errors of connections as what they mean."""
    try:
        yield
    except RuntimeError as error:
        if _CONNECTION not in str(error):
            raise
        raise PeerLost(f"another rank is gone: {error}") from error
