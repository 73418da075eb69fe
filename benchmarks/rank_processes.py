"""A program of ours as several ranks, one process each, under nobody but their starter.

It is for measurements and checks of what ranks do together, without an engine.

Owns starting and ending. Rank 0's lines of JSON are the results. None is left behind: a rank that
fails ends the others, which might wait for it for good.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from benchmarks import figures
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.rendezvous import Greeting, Seat, join


def results(module: str, world_size: int, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Starts all ranks and yields what rank 0 prints.

    Args:
        module: Name of the program, which takes `--seat` (`add_seat`) and calls `end_rank`.
        world_size: Number of ranks.
        arguments: All that it gets besides.

    Raises:
        SystemExit: A rank failed; the first one is named.
    """
    store = os.memfd_create("store")
    command = [sys.executable, "-m", module, *arguments]
    ranks = [
        subprocess.Popen(
            [*command, "--seat", f"{rank},{world_size},{store}"],
            pass_fds=(store,),
            env=figures.environment(),
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(world_size)
    ]
    failures: list[str] = []
    watches = [threading.Thread(target=_watch, args=(rank, ranks, failures)) for rank in range(world_size)]
    for watch in watches:
        watch.start()
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith("{"):
                yield json.loads(line)
        for watch in watches:
            watch.join()
        if failures:
            raise SystemExit(failures[0])
    finally:
        _kill(ranks)
        for watch in watches:
            watch.join()
        if ranks[0].stdout is not None:
            ranks[0].stdout.close()
        os.close(store)


def _watch(rank: int, ranks: list[subprocess.Popen[str]], failures: list[str]) -> None:
    """Waits for a rank.

    The others end with it if it fails; so what stands first in `failures` is not their end.
    """
    if code := ranks[rank].wait():
        failures.append(f"rank {rank} failed with {code}")
        _kill(ranks)


def _kill(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        process.kill()


def add_seat(parser: argparse.ArgumentParser) -> None:
    """The option by which `results` starts a rank."""
    parser.add_argument("--seat", type=_seat, help="RANK,RANKS,STORE: one rank, as this program starts it")


def _seat(text: str) -> Seat:
    rank, num_ranks, store = map(int, text.split(","))
    return Seat(rank, num_ranks, store)


def joined(seat: Seat, device: torch.device) -> Collectives | None:
    """This process as a rank, on a device of its own; None where there are no others."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if seat.world_size == 1:
        return None
    return join(seat, device, Greeting(device.type, lambda *_: None, lambda: None, lambda: None))


def device_of(kind: str, seat: Seat) -> torch.device:
    """The rank's device.

    `cpu`: one for all; `cuda` or `cuda:INDEX`: cards from the first, or that one, on.
    """
    device = torch.device(kind)
    return device if device.type == "cpu" else torch.device("cuda", (device.index or 0) + seat.rank)


def end_rank(body: Callable[[], None]) -> NoReturn:
    """Runs a rank, and ends its process with it."""
    code = 1
    try:
        body()
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the interpreter, which takes the group apart: with NCCL that may wait for ranks that
    # are gone.
    os._exit(code)
