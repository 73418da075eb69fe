"""What routing does to prefix hits and first tokens, simulated.

Real engines with real caches, on a clock of their own, behind the routing that services use.

    python -m benchmarks.simulate_routing --workloads prefixes,chats,tenants

**Times are simulated.** A device takes for a step what Llama-3.1-8B took on an H200
(`simulate_budget.Device`); nothing is computed, so one seed always gives the same figures. Prefix
hits are counted by the engines' own caches. Policies:

- `service`: the routing of the service, `--services` of them side by side, each with a router of
  its own that knows engines by their reports, once a second, and by what it sent itself;
- `first64`: the same order of engines by the prompt's first 64 tokens alone, the first taken that
  has at most 32 open requests beyond one and a half times the mean (what services did before);
- `random`: any engine;
- `one`: a single engine with the memory and the speed of all.

Workloads: `prefixes` are requests of a few tokens behind one of `--prefixes` shared beginnings;
`chats` are conversations of several turns that all begin with the same system prompt; `tenants` is
`prefixes` for many tenants, while one of them sends a burst of prompts that nobody shares.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import heapq
import itertools
import math
import pathlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from benchmarks import figures
from benchmarks.simulate_budget import Device
from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.events import Started
from headrace_backend.engine.request import NO_LIMITS, EngineRequest, ModelLimits, Subscriber, TenantLimits
from headrace_backend.engine.step_log import StepLog
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_request.request import Request
from headrace_request.stop import Stop
from headrace_service.engines.routing.engine_load import EngineLoad, LoadReport
from headrace_service.engines.routing.router import Router, RoutingKey

_LIMITS = ModelLimits(128_256, 131_072, (2,))
_BLOCK_SIZE: Literal[16] = 16
_REPORT_MS = 1000.0
_RESULT_MS = 0.3
_TIMER_MS = 0.08
_ROWS = 256
# A prompt of `prefixes`: what is shared, what is its own; and its answer.
_SHARED_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 1024, 64, 16
# Conversations: the common system prompt, what a person says, what is answered, turns and thought.
_SYSTEM_TOKENS, _SAID_TOKENS, _ANSWERED_TOKENS, _TURNS, _THINK_S = 1024, 100, 60, 6, 4.0
_TENANTS = 20
# The burst: of so many tokens each, so many times the requests of all others together.
_BURST_TOKENS, _BURST_SHARE = 2048, 0.5


@dataclasses.dataclass(slots=True)
class Asked:
    """One request, and what became of it."""

    at_ms: float
    tenant: str
    prompt: list[int]
    answer_tokens: int
    # Turns of the conversation that follow.
    turns_left: int = 0
    is_burst: bool = False
    first_ms: float = math.nan
    cached_tokens: int = 0


class Choice(Protocol):
    """A policy: the index of the engine for a request that one of the services got."""

    def __call__(self, asked: Asked, prompt: np.ndarray, service: int) -> int:
        """Returns the engine's index."""


class SimulatedDevice(Protocol):
    """What takes time for a step."""

    free_at_ms: float

    def run(self, plan: StepPlan, asked_ms: float) -> StepResult:
        """Computes a plan that the engine was asked for at `asked_ms`."""


class SimulatedEngine:
    """A real engine on the simulation's clock, over a device that only knows what steps cost."""

    def __init__(
        self,
        number: int,
        seed: int,
        num_blocks: int,
        slowness: float,
        device: SimulatedDevice | None = None,
        rows: int = _ROWS,
    ) -> None:
        """An engine that has computed nothing; `device` None: the H200 of `simulate_budget`."""
        self.number = number
        self._now_ms = 1000.0
        config = EngineConfig(
            model=pathlib.Path("none"),
            block_size=_BLOCK_SIZE,
            max_num_seqs=rows,
            max_num_batched_tokens=8192,
            max_waiting_requests=1 << 16,
            max_waiting_tokens=1 << 28,
        )
        steps = StepLog(f"{number:016x}")
        self.engine = Engine(config, _LIMITS, None, lambda: int(self._now_ms * 1e6), lambda: 0, steps)
        captured = config.captured_mixed_sizes() if device is None else ()
        self.engine.worker_ready(num_blocks, on_gpu=device is None, captured_mixed_sizes=captured)
        self._device: SimulatedDevice = device or Device(seed, slowness, captured, noise=0.05)
        self._results: deque[tuple[float, StepResult]] = deque()
        self._asked: dict[int, Asked] = {}
        self._handles = itertools.count(1)

    def set_time(self, now_ms: float) -> None:
        """Sets the engine's clock."""
        self._now_ms = now_ms

    def add(
        self, asked: Asked, prompt: np.ndarray, service: int, now_ms: float, limits: TenantLimits = NO_LIMITS
    ) -> None:
        """Takes a request. Raises RequestRefused."""
        self._now_ms = now_ms
        handle = next(self._handles)
        request = Request(prompt.astype(np.int32).tobytes(), Stop(asked.answer_tokens))
        added = EngineRequest(f"r{handle}", request, tenant=asked.tenant, limits=limits)
        self.engine.add(added, Subscriber(service, handle))
        self._asked[handle] = asked

    def next_ms(self) -> float:
        """Returns when there is something to do here; infinite if there is nothing."""
        next_ms = self._results[0][0] if self._results else math.inf
        due_ns = self.engine.plan_due_ns
        return next_ms if due_ns is None else min(next_ms, max(due_ns / 1e6 + _TIMER_MS, self._now_ms))

    def go_on(self, now_ms: float) -> Iterator[tuple[int, Asked]]:
        """Does what is due; yields the services and requests that ended."""
        self._now_ms = now_ms
        if self._results and self._results[0][0] <= now_ms:
            self.engine.settle(self._results.popleft()[1])
            yield from self._read()
        while (plan := self.engine.plan()) is not None:
            result = self._device.run(StepPlan.decode(plan.encode()), now_ms)
            self._results.append((self._device.free_at_ms + _RESULT_MS, result))
        yield from self._read()

    def _read(self) -> Iterator[tuple[int, Asked]]:
        for service, outbox in self.engine.take_outboxes().items():
            for handle, event in outbox.events:
                if isinstance(event, Started):
                    self._asked[handle].cached_tokens = event.cached_tokens
            for handle in outbox.handles:
                asked = self._asked[handle]
                if math.isnan(asked.first_ms):
                    asked.first_ms = self._now_ms
            for handle, event in outbox.events:
                if type(event).__name__ == "RequestDone":
                    yield service, self._asked.pop(handle)


@dataclasses.dataclass(slots=True)
class SeenEngine:
    """An engine as one service sees it."""

    number: int
    load: EngineLoad = dataclasses.field(default_factory=EngineLoad)
    num_open: int = 0
    serving: bool = True
    is_reachable: bool = True


def report_loads(engines: Sequence[SimulatedEngine], services: Sequence[Sequence[SeenEngine]], now_ms: float) -> None:
    """Has each engine say to each service how busy it is."""
    for engine in engines:
        reported = engine.engine.report_load()
        report = LoadReport(
            reported.prefill_tokens,
            reported.prefill_tokens_per_s,
            reported.open_requests,
            reported.rows,
            reported.row_time_ns / 1e9,
        )
        for seen in services:
            seen[engine.number].load.reported(report, seen[engine.number].num_open, now_ms / 1e3)


class Services:
    """Service processes, each with a router of its own and its own sight of all engines."""

    def __init__(self, num_services: int, num_engines: int, clock: Callable[[], float]) -> None:
        """Services that have sent nothing."""
        self.seen = [[SeenEngine(number) for number in range(num_engines)] for _ in range(num_services)]
        self._routers: list[Router[SeenEngine]] = [Router(clock) for _ in self.seen]
        for router, engines in zip(self._routers, self.seen, strict=True):
            router.set_engines(engines)

    def __call__(self, asked: Asked, prompt: np.ndarray, service: int) -> int:
        """Chooses as the service would."""
        return self._routers[service].choose(RoutingKey(prompt, b"", asked.tenant)).number


def first64(services: Services) -> Choice:
    """Returns the policy of the first 64 tokens."""

    def choose(asked: Asked, prompt: np.ndarray, service: int) -> int:
        key = prompt[:64].tobytes()

        def weight(engine: SeenEngine) -> bytes:
            return hashlib.blake2b(key, digest_size=8, salt=engine.number.to_bytes(4, "big")).digest()

        engines = services.seen[service]
        most = 32 + 1.5 * sum(engine.num_open for engine in engines) / len(engines)
        ordered = sorted(engines, key=weight, reverse=True)
        return next(engine.number for engine in ordered if engine.num_open <= most)

    return choose


class Traffic(NamedTuple):
    """What is asked: requests by their time, and what a request that ended is followed by."""

    first: list[Asked]
    follow: Callable[[Asked, float], Asked | None]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 120_000) for _ in range(count)]


def prefixes(rng: random.Random, arguments: argparse.Namespace) -> Traffic:
    """Requests behind shared beginnings, each as likely as any other."""
    shared = [_tokens(rng, _SHARED_TOKENS) for _ in range(arguments.prefixes)]
    found, at_ms = [], 1000.0
    for _ in range(arguments.requests):
        at_ms += rng.expovariate(arguments.rate) * 1e3
        prompt = [*rng.choice(shared), *_tokens(rng, _OWN_TOKENS)]
        found.append(Asked(at_ms, "", prompt, _ANSWER_TOKENS))
    return Traffic(found, lambda asked, now_ms: None)


def chats(rng: random.Random, arguments: argparse.Namespace) -> Traffic:
    """Conversations behind one system prompt."""
    system = _tokens(rng, _SYSTEM_TOKENS)
    found, at_ms = [], 1000.0
    for _ in range(arguments.requests // _TURNS):
        at_ms += rng.expovariate(arguments.rate / _TURNS) * 1e3
        prompt = [*system, *_tokens(rng, _SAID_TOKENS)]
        found.append(Asked(at_ms, "", prompt, _ANSWERED_TOKENS, turns_left=_TURNS - 1))

    def follow(asked: Asked, now_ms: float) -> Asked | None:
        if not asked.turns_left:
            return None
        # The simulated device answers every request with the same token.
        prompt = [*asked.prompt, *[5] * asked.answer_tokens, *_tokens(rng, _SAID_TOKENS)]
        at_ms = now_ms + rng.expovariate(1 / _THINK_S) * 1e3
        return Asked(at_ms, asked.tenant, prompt, _ANSWERED_TOKENS, asked.turns_left - 1)

    return Traffic(found, follow)


def tenants(rng: random.Random, arguments: argparse.Namespace) -> Traffic:
    """Many tenants with shared beginnings; in the middle third one sends what nobody shares."""
    traffic = prefixes(rng, arguments)
    tenant_of = {tuple(asked.prompt[:8]): f"tenant {rng.randrange(_TENANTS)}" for asked in traffic.first}
    for asked in traffic.first:
        asked.tenant = tenant_of[tuple(asked.prompt[:8])]
    count = int(_BURST_SHARE * len(traffic.first) / 3)
    began_ms, ended_ms = (traffic.first[len(traffic.first) * third // 3].at_ms for third in (1, 2))
    for _ in range(count):
        at_ms = rng.uniform(began_ms, ended_ms)
        prompt = _tokens(rng, _BURST_TOKENS)
        traffic.first.append(Asked(at_ms, "the noisy one", prompt, _ANSWER_TOKENS, is_burst=True))
    return traffic


WORKLOADS = {"prefixes": prefixes, "chats": chats, "tenants": tenants}


class Simulation:
    """One workload under one policy, from the first request to the last token."""

    def __init__(self, traffic: Traffic, policy: str, arguments: argparse.Namespace) -> None:
        """Engines that have computed nothing."""
        self._now_ms = 0.0
        one = policy == "one"
        count, memory = (1, arguments.engines) if one else (arguments.engines, 1)
        blocks, slowness = arguments.blocks * memory, 1 / memory
        self._engines = [SimulatedEngine(number, arguments.seed + number, blocks, slowness) for number in range(count)]
        self._services = Services(arguments.services, count, lambda: self._now_ms / 1e3)
        self._rng = random.Random(arguments.seed)
        self._choose = self._policy(policy, count)
        self._traffic = traffic
        self._unsent = [(asked.at_ms, index, asked) for index, asked in enumerate(traffic.first)]
        heapq.heapify(self._unsent)
        self._indices = itertools.count(len(self._unsent))
        self._next_report_ms = _REPORT_MS
        self.answered: list[Asked] = []

    def _policy(self, policy: str, count: int) -> Choice:
        if policy == "random":
            return lambda asked, prompt, service: self._rng.randrange(count)
        return first64(self._services) if policy == "first64" else self._services

    def run(self) -> None:
        """Plays events in their order until nothing is left."""
        while self._unsent or any(engine.engine.has_work for engine in self._engines):
            due = [(engine.next_ms(), engine.number) for engine in self._engines]
            self._now_ms = min([self._next_report_ms, *(at_ms for at_ms, _ in due), *(u[0] for u in self._unsent[:1])])
            touched = {number for at_ms, number in due if at_ms <= self._now_ms}
            while self._unsent and self._unsent[0][0] <= self._now_ms:
                touched.add(self._send(heapq.heappop(self._unsent)[2]))
            for number in sorted(touched):
                for service, asked in self._engines[number].go_on(self._now_ms):
                    self._ended(service, number, asked)
            if self._now_ms >= self._next_report_ms:
                self._report()

    def _send(self, asked: Asked) -> int:
        service = self._rng.randrange(len(self._services.seen))
        prompt = np.array(asked.prompt, np.uint32)
        number = self._choose(asked, prompt, service)
        self._services.seen[service][number].num_open += 1
        self._engines[number].add(asked, prompt, service, self._now_ms)
        return number

    def _ended(self, service: int, number: int, asked: Asked) -> None:
        self._services.seen[service][number].num_open -= 1
        self.answered.append(asked)
        following = self._traffic.follow(asked, self._now_ms)
        if following is not None:
            heapq.heappush(self._unsent, (following.at_ms, next(self._indices), following))

    def _report(self) -> None:
        self._next_report_ms += _REPORT_MS
        report_loads(self._engines, self._services.seen, self._now_ms)

    def figures(self) -> dict[str, float]:
        """Returns what requests saw that were no burst: the share of prompts cached, TTFT."""
        counted = [asked for asked in self.answered if not asked.is_burst]
        ttft_ms = [asked.first_ms - asked.at_ms for asked in counted]
        asked_tokens = sum(len(asked.prompt) for asked in counted)
        computed = [engine.engine.load() for engine in self._engines]
        sizes = [load.prefix_query_tokens for load in computed]
        return {
            "requests": len(counted),
            "hit_share": sum(asked.cached_tokens for asked in counted) / asked_tokens,
            "ttft_p50_ms": figures.percentile(ttft_ms, 0.5),
            "ttft_p95_ms": figures.percentile(ttft_ms, 0.95),
            "ttft_p99_ms": figures.percentile(ttft_ms, 0.99),
            "busiest_share": max(sizes) / (sum(sizes) / len(sizes)),
            "preemptions": sum(load.preemptions for load in computed),
        }


def simulate(workload: str, policy: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """Returns the figures of one workload under one policy."""
    simulation = Simulation(WORKLOADS[workload](random.Random(arguments.seed), arguments), policy, arguments)
    simulation.run()
    return {"workload": workload, "policy": policy, **simulation.figures()}


def main() -> None:
    """Simulates the workloads and policies asked for, prints them, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="prefixes,chats,tenants", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--policies", default="service,first64,random,one", help="as above")
    parser.add_argument("--engines", type=int, default=8, help="engines of the model")
    parser.add_argument("--services", type=int, default=1, help="service processes, among which requests are drawn")
    parser.add_argument("--blocks", type=int, default=2400, help="blocks of 16 tokens that each engine caches")
    parser.add_argument("--prefixes", type=int, default=200, help="shared beginnings")
    parser.add_argument("--requests", type=int, default=6000, help="requests, turns included")
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0, help="of traffic and noise")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    print("SIMULATED   policy    requests   hits   TTFT ms p50     p95     p99   busiest  preempted")
    results = []
    for workload, policy in itertools.product(arguments.workloads.split(","), arguments.policies.split(",")):
        found = simulate(workload, policy, arguments)
        results.append(found)
        print(
            f"{workload:10}  {policy:8} {found['requests']:9,} {found['hit_share']:6.1%} {found['ttft_p50_ms']:13.1f} "
            f"{found['ttft_p95_ms']:7.1f} {found['ttft_p99_ms']:7.1f} {found['busiest_share']:8.2f}x "
            f"{found['preemptions']:9}",
            flush=True,
        )
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    figures.report("simulate_routing", {"simulated": True, **settings, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
