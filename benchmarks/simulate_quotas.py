"""What a noisy key does to a quiet one on engines that share its quota, simulated.

Real engines with their real quotas, on a clock of their own, behind the routing that services use.

    python -m benchmarks.simulate_quotas --traffic chat,prompts,fixed

**Times are simulated**, as in `simulate_routing`: nothing is computed, so one seed always gives the
same figures, and no processor time of clients or services is in them (`bench_quotas` measures real
processes). The quiet key asks at a steady rate. The noisy key has many callers, each of which asks
again as soon as it has its answer, or when a refusal says so. Traffic:

- `chat`: both keys ask with prompts of 200 tokens, on the H200 of `simulate_budget`;
- `prompts`: the noisy key's prompts have 2,000 tokens;
- `fixed`: `bench_quotas`' own requests, on a device whose steps all take `--step-ms`.

In turns (`--arms`) the quiet key is alone, beside the noisy one with `streams` alone for a quota,
with `tokens` a minute as well, and with `none`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import figures
from benchmarks.simulate_routing import Asked, SeenEngine, SimulatedEngine, report_loads
from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.request import NO_LIMITS, TenantLimits
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_service.engines.routing.router import Router, RoutingKey

_ARMS = ("alone", "streams", "tokens", "none")
_ENGINES = 2
_BLOCKS = 20_000
_SERVICE = 1
# From an engine to another: gathered, and over two connections.
_CARRY_MS = 3.0
_REPORT_MS = 1000.0
# How often engines give back what they hold in reserve.
_EXPIRE_MS = 10.0
# Requests of the first part of the time are not counted: rates let a minute's worth come at once.
_UNCOUNTED_S = 10.0


class Traffic(NamedTuple):
    """What both keys ask for: tokens of prompts and answers."""

    quiet_prompt: int
    quiet_answer: int
    noisy_prompt: int
    noisy_answer: int
    is_fixed: bool = False


TRAFFIC = {
    "chat": Traffic(200, 50, 200, 100),
    "prompts": Traffic(200, 50, 2000, 100),
    "fixed": Traffic(64, 8, 64, 100, is_fixed=True),
}


class FixedDevice:
    """A device whose steps all take the same time, as those of `instant_worker` do."""

    def __init__(self, step_ms: float) -> None:
        """Nothing runs on it."""
        self._step_ms = step_ms
        self.free_at_ms = 0.0

    def run(self, plan: StepPlan, asked_ms: float) -> StepResult:
        """Computes a plan as soon as the one before it is done."""
        began_ms = max(asked_ms, self.free_at_ms)
        self.free_at_ms = began_ms + self._step_ms
        size, num_checked = plan.sample.rows.size, plan.forward.checked_indices.size
        times_ns = int(began_ms * 1e6), int(self.free_at_ms * 1e6)
        tokens, finite = np.full(size, 5, np.int32), np.ones(size, np.uint8)
        return StepResult(plan.step_id, *times_ns, tokens, finite, checked_ok=np.ones(num_checked, np.uint8))


class Simulation:
    """One arm: two engines, one service, and the keys that ask."""

    def __init__(self, traffic: Traffic, arm: str, arguments: argparse.Namespace, seed: int) -> None:
        """Engines that have computed nothing and know of each other."""
        self._now_ms = 1000.0
        self._traffic, self._arm, self._arguments = traffic, arm, arguments
        # Each key's own, so that the quiet one asks the same in each arm.
        self._random = {name: random.Random(f"{name} {seed}") for name in ("quiet", "noisy")}
        self._engines = [self._engine(number, seed) for number in range(_ENGINES)]
        self._seen = [SeenEngine(number) for number in range(_ENGINES)]
        self._router: Router[SeenEngine] = Router(lambda: self._now_ms / 1e3)
        self._router.set_engines(self._seen)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ends_ms = self._now_ms + 1e3 * arguments.seconds
        self._touched: set[int] = set()
        self.answered: list[Asked] = []
        self.num_refused = 0
        self.most_noisy = self._num_noisy = 0
        self._begin()

    def _engine(self, number: int, seed: int) -> SimulatedEngine:
        fixed = FixedDevice(self._arguments.step_ms) if self._traffic.is_fixed else None
        return SimulatedEngine(number, seed + number, _BLOCKS, 1.0, device=fixed, rows=self._arguments.rows)

    def _begin(self) -> None:
        names = [engine.engine.steps.engine for engine in self._engines]
        for engine in self._engines:
            engine.set_time(self._now_ms)
            engine.engine.name_quota_peers(_SERVICE, names)
        self._at(self._now_ms, self._report)
        self._at(self._now_ms, self._expire)
        self._at(self._now_ms, self._quiet_asks)
        for _ in range(self._arguments.callers if self._arm != "alone" else 0):
            self._at(self._now_ms + self._random["noisy"].uniform(0, 1000), self._noisy_asks)

    def _at(self, at_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._order), action))

    def run(self) -> None:
        """Plays events in their order until the time is over."""
        while self._now_ms < self._ends_ms:
            due = [(engine.next_ms(), engine.number) for engine in self._engines]
            self._now_ms = min(self._events[0][0], *(at_ms for at_ms, _ in due))
            self._touched = {number for at_ms, number in due if at_ms <= self._now_ms}
            while self._events[0][0] <= self._now_ms:
                heapq.heappop(self._events)[2]()
            for number in sorted(self._touched):
                for _, asked in self._engines[number].go_on(self._now_ms):
                    self._ended(number, asked)
            for engine in self._engines:
                self._carry_news(engine)

    # -- who asks

    def _quiet_asks(self) -> None:
        asked = self._asked("quiet", self._traffic.quiet_prompt, self._traffic.quiet_answer)
        self._send(asked, NO_LIMITS)
        self._at(self._now_ms + 1e3 * self._random["quiet"].expovariate(self._arguments.quiet_rate), self._quiet_asks)

    def _noisy_asks(self) -> None:
        asked = self._asked("noisy", self._traffic.noisy_prompt, self._traffic.noisy_answer)
        self._send(asked, self._noisy_limits())

    def _noisy_limits(self) -> TenantLimits:
        streams, tokens = self._arguments.streams, self._arguments.tokens_per_minute
        if self._arm == "none":
            return NO_LIMITS
        return TenantLimits(concurrent_streams=streams, tokens_per_minute=tokens if self._arm == "tokens" else 0)

    def _asked(self, tenant: str, prompt: int, answer: int) -> Asked:
        tokens = [self._random[tenant].randrange(10, 120_000) for _ in range(prompt)]
        return Asked(self._now_ms, tenant, tokens, answer)

    def _send(self, asked: Asked, limits: TenantLimits) -> None:
        prompt = np.array(asked.prompt, np.uint32)
        number = self._router.choose(RoutingKey(prompt, b"", asked.tenant)).number
        self._touched.add(number)
        self._add(number, asked, prompt, limits)

    def _add(self, number: int, asked: Asked, prompt: np.ndarray, limits: TenantLimits) -> None:
        try:
            self._engines[number].add(asked, prompt, _SERVICE, self._now_ms, limits)
        except RequestRefused as refused:
            assert refused.retry_after_ns is not None
            again_ms = self._now_ms + refused.retry_after_ns / 1e6
            if refused.asks_others:
                self._at(again_ms, lambda: self._ask_again(number, asked, prompt, limits))
            else:
                self.num_refused += 1
                self._at(again_ms, self._noisy_asks)
        else:
            self._seen[number].num_open += 1
            self._num_noisy += asked.tenant == "noisy"
            self.most_noisy = max(self.most_noisy, self._num_noisy)

    def _ask_again(self, number: int, asked: Asked, prompt: np.ndarray, limits: TenantLimits) -> None:
        self._touched.add(number)
        self._add(number, asked, prompt, limits)

    def _ended(self, number: int, asked: Asked) -> None:
        self._seen[number].num_open -= 1
        self.answered.append(asked)
        if asked.tenant == "noisy":
            self._num_noisy -= 1
            self._at(self._now_ms, self._noisy_asks)

    # -- what engines tell

    def _carry_news(self, engine: SimulatedEngine) -> None:
        report = engine.engine.take_quota_report() if engine.engine.has_quota_news else None
        if report is not None:
            for other in self._engines:
                if other is not engine:
                    self._at(self._now_ms + _CARRY_MS, lambda other=other: self._hear(other, report))

    def _hear(self, engine: SimulatedEngine, report: Any) -> None:
        engine.set_time(self._now_ms)
        engine.engine.read_quota_report(report)

    def _expire(self) -> None:
        for engine in self._engines:
            engine.set_time(self._now_ms)
            engine.engine.expire()
        self._at(self._now_ms + _EXPIRE_MS, self._expire)

    def _report(self) -> None:
        report_loads(self._engines, [self._seen], self._now_ms)
        self._at(self._now_ms + _REPORT_MS, self._report)

    def ttft_ms(self) -> list[float]:
        """Returns the quiet key's times to the first token."""
        from_ms = 1000.0 + 1e3 * _UNCOUNTED_S
        counted = [asked for asked in self.answered if asked.tenant == "quiet" and asked.at_ms >= from_ms]
        return [asked.first_ms - asked.at_ms for asked in counted if not math.isnan(asked.first_ms)]


def simulate(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the figures of one kind of traffic, a row for each arm."""
    rows: list[dict[str, Any]] = []
    for arm in arguments.arms.split(","):
        runs = [Simulation(TRAFFIC[name], arm, arguments, seed) for seed in range(arguments.seeds)]
        for run in runs:
            run.run()
        ttft_ms = [each for run in runs for each in run.ttft_ms()]
        row = {f"ttft_p{share * 100:g}_ms": figures.percentile(ttft_ms, share) for share in (0.5, 0.95, 0.99)}
        alone_ms = rows[0]["ttft_p95_ms"] if rows else row["ttft_p95_ms"]
        noisy = sum(asked.tenant == "noisy" for run in runs for asked in run.answered)
        counts = {"noisy": noisy, "refused": sum(run.num_refused for run in runs)}
        most = max(run.most_noisy for run in runs)
        head = {"traffic": name, "arm": arm, "requests": len(ttft_ms)}
        rows.append({**head, **row, "p95_ratio": row["ttft_p95_ms"] / alone_ms, **counts, "most_noisy": most})
    return rows


def main() -> None:
    """Simulates the traffic asked for, prints it, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", default="chat,prompts,fixed", help=f"of {', '.join(TRAFFIC)}")
    parser.add_argument("--arms", default=",".join(_ARMS), help="as above; the first is what others are compared with")
    parser.add_argument("--quiet-rate", type=float, default=8.0, help="requests a second of the quiet key")
    parser.add_argument("--streams", type=int, default=8, help="the noisy key's quota")
    parser.add_argument("--tokens-per-minute", type=int, default=150_000, help="its other quota, in `tokens`")
    parser.add_argument("--callers", type=int, default=32, help="callers of the noisy key")
    parser.add_argument("--rows", type=int, default=16, help="rows of each engine")
    parser.add_argument("--step-ms", type=float, default=20.0, help="length of a step of `fixed`")
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated time of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    print("SIMULATED  arm        requests   TTFT ms p50    p95    p99  p95 ratio  noisy  refused  most")
    results = []
    for name in arguments.traffic.split(","):
        for row in simulate(name, arguments):
            results.append(row)
            print(
                f"{name:9}  {row['arm']:9} {row['requests']:9,} {row['ttft_p50_ms']:13.1f} {row['ttft_p95_ms']:6.1f} "
                f"{row['ttft_p99_ms']:6.1f} {row['p95_ratio']:10.2f} {row['noisy']:6,} {row['refused']:8,} "
                f"{row['most_noisy']:5}",
                flush=True,
            )
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    figures.report("simulate_quotas", {"simulated": True, **settings, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
