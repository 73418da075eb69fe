"""Exposed communication: how much longer a step takes because ranks compute it together.

Times are microseconds.

Ranks take the same steps twice: as a server's ranks do, then each for itself, with the same kernels
but without a word to the others (sums are a rank's own part, others' logits and tokens its own
several times). Norms, residual additions and the writing of what is gathered stay, so that the
difference is what meeting and moving cost, whatever a kernel does besides. Decode steps are graphs
on cards. The slowest rank counts.

Steps whose sums run beside products are cut into pieces for that (`layers.cut_step`). Silent ones
are not: what smaller products and a copy cost is exposed, too. `--cut-mib 0` has no step cut, which
shows what cutting gains. Steps with prompts are launched kernel by kernel, or from graphs with
`--chunk-graphs`; a server takes graphs where launching is what takes the time.

    python -m benchmarks.bench_communication --shape llama-3.1-8b --ranks 4 --steps
    1x640,256x640,chunk8192 --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import figures, rank_processes
from benchmarks.profile_step import captured_runner, make_caches, make_model, plan_of
from benchmarks.shapes import SHAPES
from headrace_backend.config import QUANTIZE_GROUPS
from headrace_backend.parallel.collectives import Collectives, PendingAllReduce, PieceRule, slowest_times
from headrace_backend.parallel.nccl import piece_rule
from headrace_backend.parallel.rendezvous import Seat
from headrace_backend.weights.placement import Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.start_up.synthetic_steps import BlockPool, release_step
from headrace_backend.worker.step.runner import Runner
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import RoundedTokens

_WARM_STEPS = 5
_REPEATS = 5
_CARD_STEPS, _CPU_STEPS = 40, 5
# Those with prompts take a hundred times as long.
_CHUNK_STEPS = 4
# Options that a record repeats.
_SAID = ("ranks", "expert_parallel", "shape", "dtype", "quant", "quant_head", "kv_dtype", "cut_mib", "chunk_graphs")
_CARD_BLOCKS, _CPU_BLOCKS = 16_384, 256


class Interruptible(Collectives):
    """A group's collectives, or, while silent, those of a rank that has nobody to wait for.

    Silent ones have right sizes, wrong values, and no reason to cut a step.
    """

    def __init__(self, group: Collectives, piece_rule: PieceRule | None) -> None:
        self.rank, self.world_size, self.device = group.rank, group.world_size, group.device
        self._group = group
        self._rule = piece_rule
        self.speak(True)

    def speak(self, speaks: bool) -> None:
        """Goes on with the others, or without."""
        self._speaks = speaks
        self.piece_rule = self._rule if speaks else None

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Does what Collectives.all_reduce does, or keeps the rank's own part."""
        return self._group.all_reduce(partial) if self._speaks else partial

    def begin_all_reduce(self, partial: Tensor) -> PendingAllReduce:
        """Does what Collectives.begin_all_reduce does, or keeps the rank's own part."""
        assert self._speaks, "a step in silence is whole"
        return self._group.begin_all_reduce(partial)

    def all_gather(self, part: Tensor) -> Tensor:
        """Does what Collectives.all_gather does, or repeats the rank's own part."""
        if self._speaks:
            return self._group.all_gather(part)
        return part.expand(self.world_size, *part.shape).contiguous()

    def all_to_all(self, rows: Tensor, counts: Sequence[int], out: Tensor) -> None:
        """Does what Collectives.all_to_all does, or repeats the rank's own part."""
        if self._speaks:
            self._group.all_to_all(rows, counts, out)
        else:
            out.copy_(rows[: counts[self.rank]].expand(out.shape))

    def add_rms_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Does what Collectives.add_rms_norm does, or adds the rank's own part."""
        if self._speaks:
            return self._group.add_rms_norm(partial, residual, weight, eps)
        return super().add_rms_norm(partial, residual, weight, eps)

    def rounded_add_rms_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: InputRounding
    ) -> RoundedTokens:
        """Does what Collectives.rounded_add_rms_norm does, or adds the rank's own part."""
        if self._speaks:
            return self._group.rounded_add_rms_norm(partial, residual, weight, eps, rounding)
        return super().rounded_add_rms_norm(partial, residual, weight, eps, rounding)


def rule_of(group: Collectives, cut_mib: float | None) -> PieceRule | None:
    """The group's own; or as it is for cards, with sums of so many MiB and more; None for 0."""
    if cut_mib is None:
        return group.piece_rule
    if not cut_mib:
        return None
    least_bytes = round(cut_mib * 2**20)
    return dataclasses.replace(piece_rule(group.world_size), least_bytes=least_bytes, least_captured_bytes=least_bytes)


def graph_sizes(kinds: list[str]) -> str:
    """The setting for these steps."""
    sizes = sorted({int(kind.split("x")[0]) for kind in kinds if not kind.startswith("chunk")})
    return ",".join(map(str, sizes)) or "off"


def chunk_sizes(kinds: list[str]) -> list[int]:
    """Tokens of the steps that are one chunk, ascending."""
    return sorted({int(kind.removeprefix("chunk")) for kind in kinds if kind.removeprefix("chunk").isdigit()})


def step_us(runner: Runner, kind: str, pool: BlockPool, device: torch.device) -> list[float]:
    """Readings of one step's microseconds, steps launched one after the other as an engine does."""
    taken = plan_of(kind, pool)
    again = dataclasses.replace(taken, admissions=[])
    _run(runner, taken, 1)
    _run(runner, again, _WARM_STEPS)
    times = []
    steps = _CPU_STEPS if device.type == "cpu" else _CHUNK_STEPS if "chunk" in kind else _CARD_STEPS
    for _ in range(_REPEATS):
        _wait(device)
        began = time.perf_counter()
        _run(runner, again, steps)
        _wait(device)
        times.append((time.perf_counter() - began) * 1e6 / steps)
    runner.forward(release_step(len(taken.forward.rows)))
    return times


def _run(runner: Runner, plan: Any, steps: int) -> None:
    for _ in range(steps):
        runner.sample(plan, runner.forward(plan))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(options: argparse.Namespace, seat: Seat, device: torch.device) -> Iterator[dict[str, Any]]:
    """One result per kind of step."""
    group = rank_processes.joined(seat, device)
    assert group is not None, "one rank has nobody to speak with"
    switch = Interruptible(group, rule_of(group, options.cut_mib))
    on_card = device.type == "cuda"
    kinds = options.steps.split(",")
    sizes = graph_sizes(kinds) if on_card else "off"
    settings = {"device": str(device), "dtype": options.dtype, "kv_dtype": options.kv_dtype, "graph_sizes": sizes}
    # On a CPU ranks share the cores with each other.
    about = (options.shape, settings | {"worker_threads": 1})
    schemes = Schemes.named(options.quant, options.quant_group, options.quant_head)
    model, config = make_model(*about, schemes, Shard(seat.rank, seat.world_size, switch, options.expert_parallel))
    num_blocks = _CARD_BLOCKS if on_card else _CPU_BLOCKS
    caches, pool = make_caches(model, config, num_blocks), BlockPool(num_blocks, config.block_size)
    long_sizes = chunk_sizes(kinds) if options.chunk_graphs else []
    times: list[list[float]] = []
    for speaks in (True, False):
        switch.speak(speaks)
        runner = captured_runner(model, config, caches, long_sizes)
        times.append([statistics.median(step_us(runner, kind, pool, device)) for kind in kinds])
        # Its graphs' memory is the next one's.
        del runner
    switch.speak(True)
    together, alone = (slowest_times(switch, found) for found in times)
    for kind, step, without in zip(kinds, together, alone, strict=True):
        yield {
            "step": kind,
            "step_us": round(step, 1),
            "silent_us": round(without, 1),
            "exposed_us": round(step - without, 1),
            "exposed_us_per_layer": round((step - without) / model.num_layers, 2),
        }


def run_rank(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints a line of JSON per result."""
    device = rank_processes.device_of(options.device, options.seat)
    with torch.inference_mode():
        for result in measured(options, options.seat, device):
            if options.seat.rank == 0:
                print(json.dumps(result), flush=True)


def _options() -> argparse.Namespace:
    on_card = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b" if on_card else "demo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--expert-parallel", action="store_true", help="ranks have whole experts of a mixture")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_card else "cpu")
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp16", "fp32"], default="auto")
    parser.add_argument("--quant", choices=["off", "int8", "int4", "fp8", "nf4"], default="off")
    parser.add_argument("--quant-group", type=int, choices=QUANTIZE_GROUPS, default=128, help="of int4")
    parser.add_argument("--quant-head", choices=["off", "int8", "fp8"], default="off", help="of the output layer")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8", "int8"], default="auto", help="numbers of the KV cache")
    parser.add_argument(
        "--steps",
        default="1x640,8x640,64x640,256x640" if on_card else "1x64,4x64",
        help="ROWSxCONTEXT or chunkTOKENS, with commas",
    )
    parser.add_argument("--cut-mib", type=float, help="of sums from which on steps are cut; 0: none; the group's rule")
    parser.add_argument("--chunk-graphs", action="store_true", help="chunks are replayed from graphs")
    parser.add_argument("--git", default="", help="the commit, where the tree has no history")
    parser.add_argument("--json", type=pathlib.Path)
    rank_processes.add_seat(parser)
    options = parser.parse_args()
    if options.expert_parallel and not SHAPES[options.shape].num_experts:
        parser.error(f"--expert-parallel is for mixtures of experts, and {options.shape} has none")
    if options.chunk_graphs and options.device == "cpu":
        parser.error("--chunk-graphs is for cards: a CPU has no graphs")
    return options


def main() -> None:
    """Command line."""
    options = _options()
    if options.seat:
        rank_processes.end_rank(functools.partial(run_rank, options))
    cases = []
    for case in rank_processes.results("benchmarks.bench_communication", options.ranks, sys.argv[1:]):
        cases.append(case)
        print(
            f"{case['step']:>10} {options.ranks} ranks: {case['step_us']:>10,.1f} us a step, "
            f"{case['silent_us']:>10,.1f} without a word, "
            f"exposed {case['exposed_us']:>9,.1f} us, {case['exposed_us_per_layer']:.2f} a layer",
            flush=True,
        )
    card = torch.cuda.get_device_name(0) if options.device == "cuda" else ""
    about = {name: getattr(options, name) for name in _SAID}
    record = {"name": "communication", "gpu": card, **about, **figures.provenance(options.git)}
    figures.write_json({**record, "cases": cases}, options.json)


if __name__ == "__main__":
    main()
