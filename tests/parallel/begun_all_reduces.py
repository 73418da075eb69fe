"""One rank of a check of pending all-reduces, as a process (`benchmarks.rank_processes`).

Between begin and wait other work is launched, and memory is taken, filled with NaN and given back:
what reads a sum too early, or is given a piece's memory while it is added up, makes a number wrong.
The host waits for nothing until all rounds are launched.
"""

from __future__ import annotations

import argparse
import functools
import json

import torch
from benchmarks import rank_processes

from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.rendezvous import Seat
from headrace_backend.worker.step.graphs import StepGraphs

_ROUNDS = 12
_REPLAYS = 3
_PIECES = 2
# So that what is added up is there late.
_DELAY_SIZE = {"cuda": 4096, "cpu": 32}


def numbers(shape: tuple[int, int], rank: int, turn: int, device: torch.device) -> torch.Tensor:
    """Whole numbers, few enough that all-reduces are exact in bf16."""
    count = torch.arange(shape[0] * shape[1], device=device) % 7
    return (count + rank + turn).to(torch.bfloat16).view(shape)


def expected(shape: tuple[int, int], world_size: int, turn: int, device: torch.device) -> torch.Tensor:
    """Adds up all ranks' numbers."""
    parts = [numbers(shape, rank, turn, device).float() for rank in range(world_size)]
    return torch.stack(parts).sum(0).to(torch.bfloat16)


def spoil(shape: tuple[int, int], device: torch.device) -> None:
    """Fills the memory that the next tensor of the shape would get."""
    torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)


def count_wrong(collectives: Collectives, shape: tuple[int, int], wrong: torch.Tensor) -> None:
    """Launches all rounds; adds to `wrong`, int64."""
    device, world_size = collectives.device, collectives.world_size
    size = _DELAY_SIZE[device.type]
    zeros = torch.zeros(size, size, dtype=torch.bfloat16, device=device)
    for turn in range(_ROUNDS):
        pending = []
        for piece in range(_PIECES):
            partial = numbers(shape, collectives.rank, turn + piece, device) + (zeros @ zeros)[0, 0]
            pending.append(collectives.begin_all_reduce(partial))
            del partial
            spoil(shape, device)
        zeros = zeros @ zeros
        for piece in range(_PIECES):
            total = pending.pop(0).wait()
            wrong += (total != expected(shape, world_size, turn + piece, device)).sum()
            del total
            spoil(shape, device)
        # By another way, between begun ones.
        small = collectives.all_reduce(numbers((2, shape[1]), collectives.rank, turn, device))
        wrong += (small != expected((2, shape[1]), world_size, turn, device)).sum()


def wrong_numbers(collectives: Collectives, shape: tuple[int, int]) -> int:
    """Number of wrong values of all rounds; on a card also of rounds replayed from a graph."""
    wrong = torch.zeros((), dtype=torch.int64, device=collectives.device)
    if collectives.device.type == "cpu":
        count_wrong(collectives, shape, wrong)
        return int(wrong)
    graphs = StepGraphs(collectives.device)
    graphs.prepare(functools.partial(count_wrong, collectives, shape, wrong))
    graphs.capture("rounds", functools.partial(count_wrong, collectives, shape, wrong))
    for _ in range(_REPLAYS):
        graphs.replay("rounds")
        count_wrong(collectives, shape, wrong)
    return int(wrong)


def run_rank(seat: Seat, kind: str, shape: tuple[int, int]) -> None:
    """One rank; rank 0 prints how many numbers are wrong on any."""
    collectives = rank_processes.joined(seat, rank_processes.device_of(kind, seat))
    assert collectives is not None
    with torch.inference_mode():
        wrong = collectives.all_values(wrong_numbers(collectives, shape))
    if seat.rank == 0:
        print(json.dumps({"wrong": wrong}), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    rank_processes.add_seat(parser)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args()
    about = (options.seat, options.device, (options.rows, options.width))
    rank_processes.end_rank(functools.partial(run_rank, *about))


if __name__ == "__main__":
    main()
