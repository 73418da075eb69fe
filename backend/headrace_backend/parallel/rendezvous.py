"""The way of a rank into its group, and with pipeline stages into its stage.

    descriptors, inherited -> store -> every rank's kind of device -> all alike? -> collectives
                                                                                 -> stage, links

Owns the waiting, which has no end of its own: who does not come is seen, with everybody's progress,
by the process that started all ranks. On one host the store is an anonymous file whose descriptor
is inherited: no port and no name that could be in use. Over several it is a TCP store that rank 0
serves, at a socket that its backend listens on.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from headrace_backend.parallel.collectives import Collectives, GroupCollectives, agreed_least
from headrace_backend.parallel.errors import PeerLost
from headrace_backend.parallel.gloo import GlooCollectives
from headrace_backend.parallel.nccl import NcclCollectives
from headrace_backend.parallel.stage_links import StageLinks
from headrace_backend.parallel.symmetric import SymmetricCollectives, reaches_peers
from headrace_backend.step.meeting import MeetingPoint

_LOOK_INTERVAL_S = 0.01
# Ranks that compute wait for each other as long as it takes; a rank that hangs is found by the
# watchdog.
_GROUP_TIMEOUT_S = 3600.0


class MixedRanks(Exception):
    """Ranks on devices of different kinds. The message names them."""


class Seat(NamedTuple):
    """A rank's place in its group."""

    rank: int
    world_size: int
    # Descriptor of the anonymous file in which ranks of one host find each other, or of the socket
    # at which this rank serves those of several; None: another rank serves it.
    store: int | None
    # Where ranks of several hosts find each other; None: all are on this one.
    meeting: MeetingPoint | None = None
    # Ranks of each host, one behind the other; 0: all.
    ranks_per_host: int = 0

    @property
    def interface(self) -> str | None:
        """This host's network to the other hosts; None: all ranks are on this one."""
        return None if self.meeting is None else self.meeting.interface

    def are_together(self, num_ranks: int) -> bool:
        """Whether groups of so many ranks, one behind the other, are on one host each."""
        return self.ranks_per_host == 0 or num_ranks <= self.ranks_per_host


class Greeting(NamedTuple):
    """What a rank does, and says of itself, while it waits for the others."""

    # What all ranks' devices must have in common, as it is shown to people.
    kind: str
    # Called with (phase, done, total, unit) when another rank has come.
    progress: Callable[[str, int, int, str], None]
    # Called now and then; ends the process if nobody waits for it any more.
    check_parent: Callable[[], None]
    # Called before each operation that waits for other ranks.
    on_enter: Callable[[], None]


class StageSeat(NamedTuple):
    """A rank's place among those of several pipeline stages."""

    # The collectives of all ranks of all stages, for start-up.
    everyone: Collectives
    # Those of its stage; None where that has one rank.
    stage: Collectives | None
    links: StageLinks


def join(seat: Seat, device: torch.device, greeting: Greeting) -> Collectives:
    """Waits for all other ranks and connects to them, which compute all layers together.

    Args:
        seat: This rank's seat.
        device: Device on which this rank computes.
        greeting: What it does meanwhile.

    Raises:
        MixedRanks: The ranks' devices differ.
        PeerLost: A rank was lost meanwhile.
    """
    return _quickest(_connected(seat, device, greeting), seat, device, greeting)


def join_stages(seat: Seat, num_stages: int, device: torch.device, greeting: Greeting) -> StageSeat:
    """Waits for all other ranks and connects to them, which are those of several stages.

    The first ranks are the first stage's. Each of its ranks has a link to the rank with the same
    place in the next stage.

    Args:
        seat: This rank's seat among all of them.
        num_stages: At least 2; divides the number of ranks.
        device: Device on which this rank computes.
        greeting: What it does meanwhile.

    Raises:
        MixedRanks: The ranks' devices differ.
        PeerLost: A rank was lost meanwhile.
    """
    everyone = _connected(seat, device, greeting)
    num_ranks = seat.world_size // num_stages
    columns = [list(range(place, seat.world_size, num_ranks)) for place in range(num_ranks)]
    with everyone.named_losses(), _store_losses():
        # Streams and tokens have groups of their own, so that neither waits for the other.
        streams = _own_group(columns)
        tokens = _own_group([[column[0], column[-1]] for column in columns])
        stages = _own_group([list(range(first, first + num_ranks)) for first in range(0, seat.world_size, num_ranks)])
    assert streams is not None and stages is not None, "every rank is in a column and in a stage"
    links = StageLinks(streams, tokens, everyone.named_losses, greeting.on_enter)
    links.connect(device)
    stage = _quickest(everyone.within(stages), seat, device, greeting) if num_ranks > 1 else None
    return StageSeat(everyone, stage, links)


def _connected(seat: Seat, device: torch.device, greeting: Greeting) -> GroupCollectives:
    with _store_losses():
        store = _opened_store(seat)
        store.set(_key(seat.rank), greeting.kind)
        _wait_for_all(store, seat, greeting.progress, greeting.check_parent)
        _check_alike([store.get(_key(rank)).decode() for rank in range(seat.world_size)])
    end = (store, seat.rank, seat.world_size)
    if device.type == "cpu":
        return GlooCollectives(*end, _GROUP_TIMEOUT_S, greeting.on_enter, seat.interface)
    return NcclCollectives(*end, device, _GROUP_TIMEOUT_S, greeting.on_enter, seat.interface)


def _opened_store(seat: Seat) -> Store:
    if seat.meeting is None:
        # Opened anew by its number, because each rank needs a position and a lock of its own in the
        # file.
        return FileStore(f"/proc/self/fd/{seat.store}", seat.world_size)
    return TCPStore(
        seat.meeting.address,
        seat.meeting.port,
        seat.world_size,
        is_master=seat.store is not None,
        timeout=datetime.timedelta(seconds=_GROUP_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=seat.store,
    )


@contextlib.contextmanager
def _store_losses() -> Iterator[None]:
    """Has errors of the connection to a TCP store come out as `PeerLost`: rank 0 serves it."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise PeerLost(f"the store of rank 0 is out of reach: {error}") from error


def _quickest(group: GroupCollectives, seat: Seat, device: torch.device, greeting: Greeting) -> Collectives:
    """Chooses our kernels where every card of the group reaches every other's memory.

    All ranks know the answer and choose alike. Cards of several hosts do not reach each other's.
    """
    if not isinstance(group, NcclCollectives) or not seat.are_together(group.world_size):
        return group
    reach = int(reaches_peers(device, group.rank, group.world_size))
    return SymmetricCollectives(group, greeting.on_enter) if agreed_least(group, reach) else group


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Makes groups of ranks, of which none is in two; returns this rank's. All ranks call it."""
    timeout = datetime.timedelta(seconds=_GROUP_TIMEOUT_S)
    own: dist.ProcessGroup | None
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], timeout=timeout)  # type: ignore[no-untyped-call]  # torch's
    return own


def _wait_for_all(
    store: Store, seat: Seat, progress: Callable[[str, int, int, str], None], check_parent: Callable[[], None]
) -> None:
    announced = -1
    while announced < seat.world_size:
        there = sum(store.check([_key(rank)]) for rank in range(seat.world_size))
        if there != announced:
            progress("ranks", there, seat.world_size, "ranks")
            announced = there
            continue
        check_parent()
        time.sleep(_LOOK_INTERVAL_S)


def _check_alike(kinds: list[str]) -> None:
    if len(set(kinds)) > 1:
        listed = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise MixedRanks(f"ranks need devices of one kind, and have {listed}")


def _key(rank: int) -> str:
    return f"kind/{rank}"
