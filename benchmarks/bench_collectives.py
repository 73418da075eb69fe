"""Sums over GPUs: our kernels beside NCCL and torch's own symmetric memory operations, in CUDA graphs, each checked against the sum in fp32 before it is timed.

    python -m benchmarks.bench_collectives --ranks 4 --json FILE

One process per rank. A time is the slowest rank's, the median of `_REPEATS` readings of graphs of `_CALLS` calls. On a CPU the ranks are gloo's, timed by the clock, which says something about the machine only. NVLink multicast is not used.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from benchmarks import figures, rank_processes
from headrace_backend.parallel.collectives import Collectives, slowest_times
from headrace_backend.parallel.rendezvous import Seat
from headrace_backend.parallel.symmetric import SymmetricCollectives
from headrace_kernels import all_reduce

_SIZES = tuple(8192 << shift for shift in range(14))
_WIDTH = 4096
_REPEATS = 7
_CALLS = 20
_REPLAYS = 20
_CPU_CALLS = 20
# Of bf16, sums of up to 8 numbers of size 1: half a unit in the last place of the sum, and NCCL rounds at each of its steps.
_TOLERANCE = 2.0**-5
_EPS = 1e-5
Way = Callable[[torch.Tensor], torch.Tensor]


def ways(collectives: Collectives, num_bytes: int) -> Iterator[tuple[str, Way]]:
    """The ways of adding up a tensor of so many bytes, by name."""
    if not isinstance(collectives, SymmetricCollectives):
        yield "all_reduce", collectives.all_reduce
        return
    peers = collectives.peers
    yield "nccl", _nccl
    if num_bytes > peers.capacity_bytes:
        return
    yield "one_shot", lambda x: all_reduce.one_shot(x, peers)
    yield "two_shot", lambda x: all_reduce.two_shot(x, peers)
    yield from _torch_ways(collectives, num_bytes)


def _nccl(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _torch_ways(collectives: Collectives, num_bytes: int) -> Iterator[tuple[str, Way]]:
    """Torch's operations take what lies in symmetric memory already: the copy into it is theirs, as ours is within the kernel."""
    world = dist.group.WORLD
    assert world is not None
    shared = symmetric_memory.empty(num_bytes // 2, dtype=torch.bfloat16, device=collectives.device)
    symmetric_memory.rendezvous(shared, world)
    operations = torch.ops.symm_mem

    def one_shot(x: torch.Tensor) -> torch.Tensor:
        shared.copy_(x.flatten())
        found: torch.Tensor = operations.one_shot_all_reduce(shared, "sum", world.group_name)
        return found.view_as(x)

    def two_shot(x: torch.Tensor) -> torch.Tensor:
        shared.copy_(x.flatten())
        found: torch.Tensor = operations.two_shot_all_reduce_(shared, "sum", world.group_name)
        return found.view_as(x)

    yield "torch_one_shot", one_shot
    yield "torch_two_shot", two_shot


def norm_ways(collectives: Collectives, num_bytes: int) -> Iterator[tuple[str, Way]]:
    """The same with the residual addition and the norm behind it."""
    shape = (num_bytes // 2 // _WIDTH, _WIDTH)
    if not shape[0]:
        return
    dtype, device = torch.bfloat16, collectives.device
    residual, weight = torch.zeros(shape, dtype=dtype, device=device), torch.ones(_WIDTH, dtype=dtype, device=device)

    def fused(x: torch.Tensor) -> torch.Tensor:
        return collectives.add_rms_norm(x.view(shape), residual, weight, _EPS)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return Collectives.add_rms_norm(collectives, x.view(shape), residual, weight, _EPS)

    yield "norm", fused
    yield "norm_apart", apart


def inputs(collectives: Collectives, num_bytes: int, call: int) -> list[torch.Tensor]:
    """What each rank adds, drawn alike by all of them."""
    generator = torch.Generator(collectives.device).manual_seed(call)
    return [
        torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=collectives.device).uniform_(
            -1, 1, generator=generator
        )
        for _ in range(collectives.world_size)
    ]


def check(name: str, way: Way, collectives: Collectives, num_bytes: int) -> None:
    """Three sums of fresh numbers, one after the other. Raises AssertionError."""
    for call in range(3):
        parts = inputs(collectives, num_bytes, call)
        found = way(parts[collectives.rank].clone()).float().flatten()
        expected = all_reduce.all_reduce_reference(parts).float()
        error = float((found - expected).abs().max())
        assert error <= _TOLERANCE * collectives.world_size, f"{name} of {num_bytes} bytes is off by {error}"


def check_norm(collectives: Collectives, num_bytes: int) -> None:
    """The same of sums that go into the residual stream, with fresh numbers there too. Raises AssertionError."""
    shape = (-1, _WIDTH)
    for call in range(3):
        parts = [part.view(shape) for part in inputs(collectives, num_bytes, call)]
        generator = torch.Generator(collectives.device).manual_seed(100 + call)
        residual = torch.empty_like(parts[0]).uniform_(-1, 1, generator=generator)
        weight = torch.empty_like(residual[0]).uniform_(0.5, 1.5, generator=generator)
        expected = all_reduce.all_reduce_add_rms_norm_reference(parts, residual.clone(), weight, _EPS).float()
        found = collectives.add_rms_norm(parts[collectives.rank].clone(), residual, weight, _EPS).float()
        error = float((found - expected).abs().max())
        assert error <= _TOLERANCE * collectives.world_size, f"norm of {num_bytes} bytes is off by {error}"


def graph_us(way: Way, x: torch.Tensor) -> list[float]:
    """Microseconds of a call in a graph; as many calls on every rank."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        way(x)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            way(x)
        graph.capture_end()
        times = []
        for _ in range(_REPEATS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e3 / _REPLAYS / _CALLS)
    # The first brings the graph to the card.
    return times[1:]


def clock_us(way: Way, x: torch.Tensor) -> list[float]:
    """The same on a CPU."""
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        for _ in range(_CPU_CALLS):
            way(x)
        times.append((time.perf_counter() - begin) * 1e6 / _CPU_CALLS)
    return times


def measured(collectives: Collectives, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """One result per size and way."""
    timed = clock_us if collectives.device.type == "cpu" else graph_us
    for num_bytes in sizes:
        sums = list(ways(collectives, num_bytes))
        for name, way in sums:
            check(name, way, collectives, num_bytes)
        if num_bytes % (2 * _WIDTH) == 0:
            check_norm(collectives, num_bytes)
        for name, way in [*sums, *norm_ways(collectives, num_bytes)]:
            # Zeros stay zeros, however often they are added up in place.
            x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=collectives.device)
            us = statistics.median(slowest_times(collectives, timed(way, x)))
            yield {"bytes": num_bytes, "way": name, "us": round(us, 2)}


def run_rank(seat: Seat, device: torch.device, sizes: list[int]) -> None:
    """One rank; rank 0 prints a line of JSON per result."""
    collectives = rank_processes.joined(seat, device)
    assert collectives is not None, "one rank has nobody to add up with"
    with torch.inference_mode():
        for result in measured(collectives, sizes):
            if seat.rank == 0:
                print(json.dumps(result), flush=True)


def results(world_size: int, device: str, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Starts all ranks and yields what rank 0 prints. Raises SystemExit if a rank fails."""
    arguments = ["--device", device, "--sizes", ",".join(map(str, sizes))]
    return rank_processes.results("benchmarks.bench_collectives", world_size, arguments)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default=",".join(map(str, _SIZES)), help="bytes of the tensors, with commas between")
    parser.add_argument("--git", default="", help="the commit, where the tree has no history")
    parser.add_argument("--json", type=pathlib.Path)
    rank_processes.add_seat(parser)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.seat:
        device = rank_processes.device_of(options.device, options.seat)
        rank_processes.end_rank(functools.partial(run_rank, options.seat, device, sizes))
    found = []
    for result in results(options.ranks, options.device, sizes):
        found.append(result)
        print(f"{result['bytes']:>12,} bytes {result['way']:<16}{result['us']:>12.2f} us", flush=True)
    card = torch.cuda.get_device_name(0) if options.device == "cuda" else ""
    record = {"name": "collectives", "gpu": card, "ranks": options.ranks, **figures.provenance(options.git)}
    figures.write_json({**record, "cases": found}, options.json)


if __name__ == "__main__":
    main()
