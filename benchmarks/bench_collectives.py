"""All-reduces over GPUs: our kernels beside NCCL and torch's own symmetric memory operations.

They run in CUDA graphs, and each is checked against the sum in fp32 before it is timed.

    python -m benchmarks.bench_collectives --ranks 4 --json FILE

One process per rank. A time is the slowest rank's, the median of `_REPEATS` readings of graphs of
`_CALLS` calls. Before, all ways follow each other in one graph, in sizes that change, and every
result of every replay is checked. On a CPU the ranks are gloo's, timed by the clock, which says
something about the machine only. NVLink multicast is not used.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import random
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
from headrace_kernels import card
from headrace_kernels.collectives import all_reduce
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import RoundedTokens

_SIZES = tuple(8192 << shift for shift in range(14))
_WIDTHS = (4096, 8192)
_REPEATS = 7
_CALLS = 20
# Of a graph in one reading, and of tensors that take long.
_REPLAYS = 20
_LARGE_REPLAYS = 4
_LARGE_BYTES = 2 << 20
_MIXED_CALLS = 60
_MIXED_REPLAYS = 40
_CPU_CALLS = 20
# Of bf16, sums of up to 8 numbers of size 1: half a unit in the last place of the sum, and NCCL
# rounds at each of its steps.
_TOLERANCE = 2.0**-5
_EPS = 1e-5
Way = Callable[[torch.Tensor], torch.Tensor]
# Of a part, the residual stream, the weight, and what is added to the mean square.
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
RoundedNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], RoundedTokens]


def ways(collectives: Collectives, num_bytes: int) -> Iterator[tuple[str, Way]]:
    """The ways of adding up a tensor of so many bytes, by name."""
    if not isinstance(collectives, SymmetricCollectives):
        yield "all_reduce", collectives.all_reduce
        return
    peers = collectives.peers
    yield "nccl", _nccl
    if num_bytes > peers.capacity_bytes:
        return
    if all_reduce.can_one_shot(torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=collectives.device), peers):
        yield "one_shot", lambda x: all_reduce.one_shot(x, peers)
    yield "two_shot", lambda x: all_reduce.two_shot(x, peers)
    yield from _torch_ways(collectives, num_bytes)


def _nccl(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _torch_ways(collectives: Collectives, num_bytes: int) -> Iterator[tuple[str, Way]]:
    """Torch's operations, which take what lies in symmetric memory already.

    The copy into it is theirs, as ours is within the kernel.
    """
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
    """Ways of an all-reduce with the residual addition and the norm behind it.

    It is one launch, whatever the rule says, and two operations.

    On a CPU as the rule says.
    """
    for width in _WIDTHS:
        if num_bytes % (2 * width):
            continue
        shape = (num_bytes // 2 // width, width)
        residual = torch.zeros(shape, dtype=torch.bfloat16, device=collectives.device)
        weight = torch.ones_like(residual[0])
        if can_norm(collectives, residual):
            yield f"norm_{width}", functools.partial(normed, fused(collectives), residual, weight)
        yield f"norm_{width}_apart", functools.partial(normed, apart(collectives), residual, weight)
        if isinstance(collectives, SymmetricCollectives) and all_reduce.can_rounded_norm(residual, collectives.peers):
            rounding = roundings(collectives)[-1]
            for name, norm in rounded_norms(collectives, rounding).items():
                yield f"norm_{width}_{name}", functools.partial(normed, norm, residual, weight)


def roundings(collectives: Collectives) -> list[InputRounding]:
    """How norms are rounded for products of the card; the last way is timed."""
    int8, e4m3 = InputRounding(torch.int8), InputRounding(torch.float8_e4m3fn)
    in_groups = dataclasses.replace(e4m3, group_size=128)
    return [int8, in_groups, e4m3] if card.has_fp8_products(collectives.device) else [int8]


def rounded_norms(collectives: SymmetricCollectives, rounding: InputRounding) -> dict[str, RoundedNorm]:
    """In one launch, and as the sum, by the rule, and then the others."""

    def in_one(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> RoundedTokens:
        return all_reduce.all_reduce_rounded_add_rms_norm(x, residual, weight, eps, rounding, collectives.peers)

    def by_two(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> RoundedTokens:
        return Collectives.rounded_add_rms_norm(collectives, x, residual, weight, eps, rounding)

    return {"rounded": in_one, "rounded_apart": by_two}


def can_norm(collectives: Collectives, x: torch.Tensor) -> bool:
    """Whether there is a way of doing it in one launch; by the shape alone."""
    return not isinstance(collectives, SymmetricCollectives) or all_reduce.can_norm(x, collectives.peers)


def fused(collectives: Collectives) -> Norm:
    """Sum, residual addition and norm in one launch; on a CPU as the rule says."""
    if not isinstance(collectives, SymmetricCollectives):
        return collectives.add_rms_norm
    return functools.partial(all_reduce.all_reduce_add_rms_norm, peers=collectives.peers)


def apart(collectives: Collectives) -> Norm:
    """The sum, by the rule, and then the others."""
    return functools.partial(Collectives.add_rms_norm, collectives)


def normed(norm: Norm | RoundedNorm, residual: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The norm of a tensor that has the residual stream's size; of a rounded one the numbers."""
    found = norm(x.view_as(residual), residual, weight, _EPS)
    return found if isinstance(found, torch.Tensor) else found.numbers


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


def check_norm(collectives: Collectives, num_bytes: int, width: int) -> None:
    """Checks all-reduces that go into the residual stream, with fresh values there too.

    Raises AssertionError.
    """
    for call in range(3):
        parts = [part.view(-1, width) for part in inputs(collectives, num_bytes, call)]
        if not can_norm(collectives, parts[0]):
            return
        generator = torch.Generator(collectives.device).manual_seed(100 + call)
        residual = torch.empty_like(parts[0]).uniform_(-1, 1, generator=generator)
        weight = torch.empty_like(residual[0]).uniform_(0.5, 1.5, generator=generator)
        expected = all_reduce.all_reduce_add_rms_norm_reference(parts, residual.clone(), weight, _EPS).float()
        found = normed(fused(collectives), residual, weight, parts[collectives.rank].clone()).float()
        error = float((found - expected).abs().max())
        assert error <= _TOLERANCE * collectives.world_size, f"norm of {num_bytes} bytes is off by {error}"


def check_rounded(collectives: Collectives, num_bytes: int, width: int) -> None:
    """Norms that are rounded: in one launch to the bit what two give, the residual stream included.

    Raises AssertionError.
    """
    for call in range(3):
        parts = [part.view(-1, width) for part in inputs(collectives, num_bytes, call)]
        if not isinstance(collectives, SymmetricCollectives) or not all_reduce.can_rounded_norm(
            parts[0], collectives.peers
        ):
            return
        stream = torch.sin(parts[0].float() * 7).to(parts[0].dtype)
        weight = 1 + parts[-1][0] / 2
        for rounding in roundings(collectives):
            found = []
            for norm in rounded_norms(collectives, rounding).values():
                residual = stream.clone()
                tokens = norm(parts[collectives.rank].clone(), residual, weight, _EPS)
                found.append((tokens.numbers.view(torch.uint8), tokens.scales, residual))
            same = [torch.equal(one, two) for one, two in zip(*found, strict=True)]
            assert all(same), f"{num_bytes} bytes as {rounding}: numbers, scales, stream are as by two launches: {same}"


def check_mixed(collectives: SymmetricCollectives) -> None:
    """Sums of sizes and ways that are drawn, in one graph, replayed with fresh numbers.

    Ours must be right to the bit. Raises AssertionError.
    """
    draw = random.Random(0)
    calls = [_drawn_call(collectives, draw) for _ in range(_MIXED_CALLS)]
    parts = [
        torch.zeros(collectives.world_size, num_bytes // 2, dtype=torch.bfloat16, device=collectives.device)
        for _, _, num_bytes in calls
    ]
    own = [part[collectives.rank].clone() for part in parts]
    outs: list[torch.Tensor] = []

    def run() -> None:
        outs.clear()
        outs.extend(way(x) for (_, way, _), x in zip(calls, own, strict=True))

    with _captured(run) as graph:
        generator = torch.Generator(collectives.device).manual_seed(0)
        for _ in range(_MIXED_REPLAYS):
            for part, x in zip(parts, own, strict=True):
                part.uniform_(-1, 1, generator=generator)
                x.copy_(part[collectives.rank])
            graph.replay()
            for (name, _, num_bytes), part, out in zip(calls, parts, outs, strict=True):
                if name != "nccl":
                    right = torch.equal(out, all_reduce.all_reduce_reference(part.unbind()))
                    assert right, f"{name} of {num_bytes} bytes is wrong after other calls"


def _drawn_call(collectives: SymmetricCollectives, draw: random.Random) -> tuple[str, Way, int]:
    """A way and a number of bytes for it."""
    peers = collectives.peers
    name = draw.choices(["nccl", "two_shot", "norm", "rounded", "one_shot"], [1, 2, 3, 3, 4])[0]
    if name == "nccl":
        return name, _nccl, 1 << 16
    if name == "two_shot":
        return name, lambda x: all_reduce.two_shot(x, peers), 16 * draw.randrange(1, 1 << 15)
    if name == "norm":
        width = draw.choice(_WIDTHS)
        return name, functools.partial(_sum_by_norm, peers, width), 2 * width * draw.randrange(1, 33)
    if name == "rounded":
        width = draw.choice(_WIDTHS)
        way = functools.partial(_sum_by_rounded_norm, peers, width, roundings(collectives)[-1])
        return name, way, 2 * width * draw.randrange(1, all_reduce.PROGRAMS * peers.world_size + 1)
    return name, lambda x: all_reduce.one_shot(x, peers), 16 * draw.choice([1, 33, draw.randrange(1, 4096), 1 << 15])


def _sum_by_norm(peers: all_reduce.Peers, width: int, x: torch.Tensor) -> torch.Tensor:
    """The residual stream, which was nothing before."""
    residual = torch.zeros(x.numel() // width, width, dtype=x.dtype, device=x.device)
    all_reduce.all_reduce_add_rms_norm(x.view_as(residual), residual, torch.ones_like(residual[0]), _EPS, peers)
    return residual.flatten()


def _sum_by_rounded_norm(peers: all_reduce.Peers, width: int, rounding: InputRounding, x: torch.Tensor) -> torch.Tensor:
    """The all-reduced residual stream by the kernel that rounds."""
    residual = torch.zeros(x.numel() // width, width, dtype=x.dtype, device=x.device)
    about = (torch.ones_like(residual[0]), _EPS, rounding, peers)
    all_reduce.all_reduce_rounded_add_rms_norm(x.view_as(residual), residual, *about)
    return residual.flatten()


@contextlib.contextmanager
def _captured(run: Callable[[], None]) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what was run once before, on a stream of its own."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        run()
        graph.capture_end()
        yield graph


def graph_us(way: Way, x: torch.Tensor) -> list[float]:
    """Microseconds of a call in a graph; as many calls on every rank."""

    def run() -> None:
        for _ in range(_CALLS):
            way(x)

    replays = _REPLAYS if x.nbytes < _LARGE_BYTES else _LARGE_REPLAYS
    times = []
    with _captured(run) as graph:
        for _ in range(_REPEATS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e3 / replays / _CALLS)
    # The first brings the graph to the card.
    return times[1:]


def clock_us(way: Way, x: torch.Tensor) -> list[float]:
    """Times a way on a CPU, by the clock."""
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
    if isinstance(collectives, SymmetricCollectives):
        check_mixed(collectives)
    for num_bytes in sizes:
        sums = list(ways(collectives, num_bytes))
        for name, way in sums:
            check(name, way, collectives, num_bytes)
        for width in _WIDTHS:
            if num_bytes % (2 * width) == 0:
                check_norm(collectives, num_bytes, width)
                check_rounded(collectives, num_bytes, width)
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
    for num_bytes, cases in itertools.groupby(
        results(options.ranks, options.device, sizes), lambda case: case["bytes"]
    ):
        found += list(cases)
        line = "  ".join(f"{case['way']} {case['us']:.1f}" for case in found if case["bytes"] == num_bytes)
        print(f"{num_bytes:>10} bytes, us: {line}", flush=True)
    card = torch.cuda.get_device_name(0) if options.device == "cuda" else ""
    record = {"name": "collectives", "gpu": card, "ranks": options.ranks, **figures.provenance(options.git)}
    figures.write_json({**record, "cases": found}, options.json)


if __name__ == "__main__":
    main()
