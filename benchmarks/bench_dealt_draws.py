"""Draws of several ranks: from whole logits that each of them gathers, or of rows dealt out.

Both ways are those of a step behind its forward pass: parts of the logits to the tokens of all rows
on all ranks, exchanges included. Their tokens are compared before they are timed.

    python -m benchmarks.bench_dealt_draws --ranks 4 --json FILE

One process per rank. On cards the draw itself is a replayed graph, and what is around it is
launched, call after call as a server launches its steps: a call takes what the card or the host
takes, whichever is more. `host_us` is the host's part alone. Times are the slowest rank's, the
medians of several readings. `rule` says which way a server takes.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks import figures, rank_processes
from headrace_backend.parallel.collectives import Collectives, slowest_times
from headrace_backend.parallel.rendezvous import Seat
from headrace_backend.parallel.row_dealer import RowDealer
from headrace_backend.step.plan import RowAdmission, SamplePlan
from headrace_backend.worker.sampling.dealt_draws import DealtDraws
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.start_up.synthetic_steps import GREEDY
from headrace_backend.worker.step.graphs import StepGraphs
from headrace_kernels.step_inputs import store_last_tokens
from headrace_request.sampling import Sampling

_ROWS = "32,64,128,256,512"
_VOCAB_SIZE = 128_256
_READINGS = 7
_CALLS = 20
_CPU_CALLS = 3
# As peaked as a model's.
_SPREAD = 6.0
KINDS = {
    "greedy": GREEDY.sampling,
    "random": Sampling(temperature=1.0, seed=1),
    "top_p": Sampling(temperature=1.0, top_p=0.9, seed=1),
}
# Tokens and flags of all rows.
Drawn = tuple[torch.Tensor, torch.Tensor]


class Step(NamedTuple):
    """One step's draw, as one rank has it."""

    plan: SamplePlan
    # fp32 [num_rows, part_size] the logits that it has computed.
    part: torch.Tensor


class WholeDraws:
    """Every rank gathers whole logits of all rows, and draws them all."""

    def __init__(self, collectives: Collectives, sampler: Sampler, step: Step) -> None:
        self._collectives, self._sampler, self._step = collectives, sampler, step
        num_rows, part_size = step.part.shape
        device = collectives.device
        # A replayed graph has their addresses and does not keep them alive, so they stay here.
        self._logits = torch.empty(num_rows, part_size * collectives.world_size, device=device)
        self._rows, self._positions = (torch.from_numpy(column).to(device) for column in _columns(step.plan))
        self._last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._draw = captured(self._draw_all, device)

    def _draw_all(self) -> Drawn:
        tokens, finite = self._sampler.draw_all(self._logits, self._rows, self._positions)
        store_last_tokens(self._last_tokens, self._rows, tokens)
        return tokens, finite

    def __call__(self) -> Drawn:
        """One draw, with what a server does on either side of it."""
        self._collectives.gather_columns(self._step.part, self._logits)
        self._sampler.change(self._step.plan, self._logits)
        tokens, finite = self._draw()
        self._sampler.note(self._step.plan, tokens)
        return tokens, finite


class SharedDraws:
    """Each rank receives whole logits of its share of the rows, and tells the others its draws."""

    def __init__(self, dealer: RowDealer, sampler: Sampler, step: Step, vocab_size: int) -> None:
        self._dealt, self._step, self._share = DealtDraws(dealer, sampler), step, dealer.shares(len(step.part)).length
        device = step.part.device
        self._room = torch.zeros(2 * self._share, vocab_size, device=device)
        self._own = torch.zeros(2, self._share, dtype=torch.int32, device=device)
        self._rows = torch.from_numpy(step.plan.rows).to(device)
        self._last_tokens = torch.zeros(len(step.part) + 1, dtype=torch.int32, device=device)
        self._staging = torch.zeros(2, self._share, dtype=torch.int32, pin_memory=device.type == "cuda")

        def draw() -> torch.Tensor:
            return self._dealt.marked(*sampler.draw_all(self._room[: self._share], *self._own.unbind()))

        self._draw = captured(draw, device)

    def __call__(self) -> Drawn:
        """One draw."""
        own = self._dealt.begin(self._step.plan, self._step.part, self._room)
        # The same in every call, as no step's are, so that no copy is overtaken.
        self._staging.numpy()[:, : own.plan.rows.size] = _columns(own.plan)
        self._own.copy_(self._staging, non_blocking=True)
        sampled = self._dealt.end(self._step.plan, self._draw())
        store_last_tokens(self._last_tokens, self._rows, sampled.tokens)
        return sampled.tokens, sampled.finite


def _columns(plan: SamplePlan) -> np.ndarray:
    return np.stack((plan.rows, plan.output_positions))


def captured(draw: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A replay of what `draw` launches; on a CPU the function itself."""
    if device.type == "cpu":
        return draw
    graphs = StepGraphs(device)
    graphs.prepare(draw)
    graphs.capture("draw", draw)
    return functools.partial(graphs.replay, "draw")


def step_of(collectives: Collectives, num_rows: int, vocab_size: int) -> Step:
    """A step whose rows have logits of their own, a few of them not finite."""
    generator = torch.Generator(collectives.device).manual_seed(collectives.rank)
    part_size = vocab_size // collectives.world_size
    part = torch.randn(num_rows, part_size, generator=generator, device=collectives.device).mul_(_SPREAD)
    part[:: num_rows - 1, collectives.rank] = torch.nan
    rows = np.arange(num_rows, dtype=np.int32)
    return Step(SamplePlan(rows, rows, rows), part)


def timed(way: Callable[[], Drawn], device: torch.device) -> tuple[list[float], list[float]]:
    """Microseconds of a call, and of the host's part of it."""
    calls = _CALLS if device.type == "cuda" else _CPU_CALLS
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    whole, host = [], []
    for _ in range(_READINGS + 1):
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            way()
        host.append((time.perf_counter() - begin) * 1e6 / calls)
        wait()
        whole.append((time.perf_counter() - begin) * 1e6 / calls)
    # The first brings the graph to the card.
    return whole[1:], host[1:]


def measured(collectives: Collectives, rows: list[int], vocab_size: int) -> Iterator[dict[str, Any]]:
    """One result per kind, number of rows and way. Raises AssertionError where tokens differ."""
    dealer = RowDealer(collectives, vocab_size)
    for kind, sampling in KINDS.items():
        for num_rows in rows:
            sampler = Sampler(num_rows, vocab_size, collectives.device)
            # Rows share a seed; positions tell their noise apart.
            sampler.admit([RowAdmission(row, msgspec.structs.replace(sampling)) for row in range(num_rows)])
            step = step_of(collectives, num_rows, vocab_size)
            ways: dict[str, Callable[[], Drawn]] = {
                "whole": WholeDraws(collectives, sampler, step),
                "dealt": SharedDraws(dealer, sampler, step, vocab_size),
            }
            whole, dealt = (tuple(column.tolist() for column in way()) for way in ways.values())
            assert whole == dealt and not all(whole[1]), f"{kind}, {num_rows} rows: tokens differ"
            rule = "dealt" if dealer.pays(num_rows) else "whole"
            for name, way in ways.items():
                us, host_us = (
                    round(statistics.median(slowest_times(collectives, times)), 1)
                    for times in timed(way, collectives.device)
                )
                yield {"kind": kind, "rows": num_rows, "way": name, "us": us, "host_us": host_us, "rule": rule}


def run_rank(seat: Seat, device: torch.device, rows: list[int], vocab_size: int) -> None:
    """One rank; rank 0 prints a line of JSON per result."""
    collectives = rank_processes.joined(seat, device)
    assert collectives is not None, "one rank has nobody to deal rows out to"
    with torch.inference_mode():
        for result in measured(collectives, rows, vocab_size):
            if seat.rank == 0:
                print(json.dumps(result), flush=True)


def results(world_size: int, device: str, rows: str, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Starts all ranks and yields what rank 0 prints. Raises SystemExit if a rank fails."""
    arguments = ["--device", device, "--rows", rows, "--vocab-size", str(vocab_size)]
    return rank_processes.results("benchmarks.bench_dealt_draws", world_size, arguments)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default=_ROWS, help="rows that a step draws, at least 2, with commas between")
    parser.add_argument("--vocab-size", type=int, default=_VOCAB_SIZE, help="a multiple of the ranks")
    parser.add_argument("--git", default="", help="the commit, where the tree has no history")
    parser.add_argument("--json", type=pathlib.Path)
    rank_processes.add_seat(parser)
    options = parser.parse_args()
    if options.seat:
        device = rank_processes.device_of(options.device, options.seat)
        rows = [int(count) for count in options.rows.split(",")]
        rank_processes.end_rank(functools.partial(run_rank, options.seat, device, rows, options.vocab_size))
    found = []
    for case in results(options.ranks, options.device, options.rows, options.vocab_size):
        found.append(case)
        print("{kind:>8} {rows:>4} rows, {way}: {us:>9.1f} us, host {host_us:.1f} us, rule: {rule}".format(**case))
    card = torch.cuda.get_device_name(0) if options.device == "cuda" else ""
    about = {"name": "dealt_draws", "gpu": card, "ranks": options.ranks, "vocab_size": options.vocab_size}
    figures.write_json({**about, **figures.provenance(options.git), "cases": found}, options.json)


if __name__ == "__main__":
    main()
