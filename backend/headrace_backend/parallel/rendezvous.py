"""The way of a rank into its group.

    descriptors, inherited -> store -> every rank's kind of device -> all alike? -> collectives

Owns the waiting, which has no end of its own: who does not come is seen, with everybody's progress,
by the process that started all ranks. The store is an anonymous file whose descriptor is inherited:
no port and no name that could be in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import FileStore, Store

from headrace_backend.parallel.collectives import Collectives, agreed_least
from headrace_backend.parallel.gloo import GlooCollectives
from headrace_backend.parallel.nccl import NcclCollectives
from headrace_backend.parallel.symmetric import SymmetricCollectives, reaches_peers

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
    # Descriptor of the anonymous file in which ranks find each other.
    store: int


def join(
    seat: Seat,
    device: torch.device,
    kind: str,
    progress: Callable[[str, int, int, str], None],
    check_parent: Callable[[], None],
    on_enter: Callable[[], None],
) -> Collectives:
    """Waits for all other ranks and connects to them.

    Args:
        seat: This rank's seat.
        device: Device on which this rank computes.
        kind: What all ranks' devices must have in common, as it is shown to people.
        progress: Called with (phase, done, total, unit) when another rank has come.
        check_parent: Called now and then; ends the process if nobody waits for it any more.
        on_enter: Called before each operation.

    Raises:
        MixedRanks: The ranks' devices differ.
        PeerLost: A rank was lost meanwhile.
    """
    # Opened anew by its number, because each rank needs a position and a lock of its own in the
    # file.
    store = FileStore(f"/proc/self/fd/{seat.store}", seat.world_size)
    store.set(_key(seat.rank), kind)
    _wait_for_all(store, seat, progress, check_parent)
    _check_alike([store.get(_key(rank)).decode() for rank in range(seat.world_size)])
    if device.type == "cpu":
        return GlooCollectives(store, seat.rank, seat.world_size, _GROUP_TIMEOUT_S, on_enter)
    return _on_gpus(store, seat, device, on_enter)


def _on_gpus(store: Store, seat: Seat, device: torch.device, on_enter: Callable[[], None]) -> Collectives:
    """Chooses our kernels where every card reaches every other's memory, else NCCL alone.

    All ranks know the answer and choose alike.
    """
    nccl = NcclCollectives(store, seat.rank, seat.world_size, device, _GROUP_TIMEOUT_S, on_enter)
    reach = int(reaches_peers(device, seat.rank, seat.world_size))
    return SymmetricCollectives(nccl, on_enter) if agreed_least(nccl, reach) else nccl


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
