"""One engine and its users, step by step: how long first tokens and whole answers take for most.

`capacity` finds where all is in balance on average. Tails come of what an average has not: prompts
that come together, and lengths that differ. Owns the simulation: users think, send, read the whole
answer and think again; each step takes a token for every row that writes, and as much of the
waiting prompts as the engine's token budget lets it. A step's time is `capacity`'s, a chunk's limit
that of `headrace_backend.engine.scheduling.token_budget`, in short.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
import random
import statistics
from typing import NamedTuple

from headrace_supervisor.plan.capacity import Demand, Gpu, Prediction, RankSizes, prompt_s, step_s

# The engine's defaults on a GPU: tokens of a step, and how long one with decodes should take.
_MOST_TOKENS = 8192
_STEP_TARGET_S = 0.0145
# A step's limit beside slow decodes, and the least of a chunk. Waiting prompts, in seconds of
# computing, from which steps get longer, and between which prompts go first.
_DECODES_SHARE = 1.25
_LEAST_CHUNK = 64
_PRESSURE_S = 0.1
_THROUGHPUT_FROM_S, _THROUGHPUT_UNTIL_S = 0.5, 0.05
# Whichever comes first ends the simulation: enough answers for a tail, or some tenths of a second
# of arithmetic.
_ANSWERS = 4_000
_MOST_STEPS = 15_000
# Steps of two sequences that fill a square evenly, so that some hundred lengths have the tail of
# many: with random ones the 95th percentile of a single user's answers was off by a third.
_PROMPT_STEP, _OUTPUT_STEP = 0.7548776662466927, 0.5698402909980532
_LEAST_SHARE = 1e-6
# Requests that were sent in the first time, in which the engine fills, are not counted.
_UNCOUNTED_ANSWERS = 3.0


class Spread(NamedTuple):
    """How lengths differ: deviation of their logarithm, 0 for none, and the longest of both."""

    prompt: float
    output: float
    longest: int


class Tails(NamedTuple):
    """What users wait for, in seconds, and what the engine writes a second."""

    ttft_p50_s: float
    ttft_p95_s: float
    answer_p50_s: float
    answer_p95_s: float
    tokens_per_s: float
    answers: int


@dataclasses.dataclass(slots=True)
class _Request:
    at_s: float
    prompt: int
    output: int
    # Tokens of the prompt that are not computed yet.
    left: int = 0


class _Users:
    """Users who think: when the next of them asks, and for what."""

    def __init__(self, demand: Demand, spread: Spread, seed: int) -> None:
        self._demand, self._spread = demand, spread
        self._random = random.Random(seed)
        self._shares = [self._random.random(), self._random.random()]
        self._asking = [self._thought_s() for _ in range(demand.users)]
        heapq.heapify(self._asking)

    @property
    def next_s(self) -> float:
        """When the next one asks; infinity while all of them wait or read."""
        return self._asking[0] if self._asking else math.inf

    def ask(self) -> _Request:
        """Takes the next one's request."""
        at_s, demand, spread = heapq.heappop(self._asking), self._demand, self._spread
        self._shares = [(self._shares[0] + _PROMPT_STEP) % 1.0, (self._shares[1] + _OUTPUT_STEP) % 1.0]
        output = min(_length(demand.output, spread.output, self._shares[1]), spread.longest - 1)
        prompt = min(_length(demand.prompt, spread.prompt, self._shares[0]), spread.longest - output)
        return _Request(at_s, prompt, output, max(prompt - demand.cached, 1))

    def think(self, now_s: float) -> None:
        """Has one think who has read an answer."""
        heapq.heappush(self._asking, now_s + self._thought_s())

    def _thought_s(self) -> float:
        return self._random.expovariate(1 / self._demand.think_s) if self._demand.think_s else 0.0


def _length(mean: int, spread: float, share: float) -> int:
    """The length below which such a share of all lengths lies."""
    deviations = statistics.NormalDist().inv_cdf(min(max(share, _LEAST_SHARE), 1 - _LEAST_SHARE))
    return max(1, round(mean * math.exp(spread * deviations - spread * spread / 2)))


class _Engine:
    """Rows that write, prompts that wait, and the steps that take them further."""

    def __init__(self, sizes: RankSizes, gpu: Gpu) -> None:
        self._sizes, self._gpu = sizes, gpu
        self._token_s = prompt_s(sizes, gpu, 1.0) / sizes.pp
        self.waiting: collections.deque[_Request] = collections.deque()
        self._waiting_tokens = 0
        # Prompts that have blocks, in order.
        self._admitted: collections.deque[_Request] = collections.deque()
        # (step of the last token, number of the request, request).
        self._rows: list[tuple[int, int, _Request]] = []
        self._context, self._held, self._steps, self._numbers = 0, 0.0, 0, 0
        self._puts_prompts_first = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is written."""
        return not (self._rows or self._admitted or self.waiting)

    def add(self, request: _Request) -> None:
        """Takes a request."""
        self.waiting.append(request)
        self._waiting_tokens += request.left

    def step(self) -> tuple[float, list[_Request], list[_Request]]:
        """One step: its seconds, and the requests that got their first and their last token."""
        self._admit()
        rows = len(self._rows)
        decodes_s = step_s(self._sizes, self._gpu, rows, self._context / rows) if rows else 0.0
        tokens = self._taken(self._budget(decodes_s))
        seconds = decodes_s + tokens * self._token_s
        if not rows:
            seconds = max(seconds, step_s(self._sizes, self._gpu, 1, 0.0))
        self._steps += 1
        self._context += rows
        begun, ended = self._begun(), self._ended()
        return seconds, begun, ended

    def _admit(self) -> None:
        """Gives blocks and a row to those who came first, as far as there are any."""
        sizes = self._sizes
        while self.waiting and len(self._rows) + len(self._admitted) < sizes.max_num_seqs:
            held = sizes.held_tokens(self.waiting[0].prompt + self.waiting[0].output)
            if self._held + held > sizes.kv_tokens and self._held:
                return
            self._held += held
            self._admitted.append(self.waiting.popleft())

    def _budget(self, decodes_s: float) -> int:
        """Tokens of prompts in a step."""
        waiting_s = self._waiting_tokens * self._token_s
        least_s = _THROUGHPUT_UNTIL_S if self._puts_prompts_first else _THROUGHPUT_FROM_S
        self._puts_prompts_first = waiting_s >= least_s
        if not decodes_s or self._puts_prompts_first:
            return _MOST_TOKENS
        limit_s = max(_STEP_TARGET_S, _DECODES_SHARE * decodes_s) * max(waiting_s / _PRESSURE_S, 1.0)
        return min(max(int((limit_s - decodes_s) / self._token_s), _LEAST_CHUNK), _MOST_TOKENS)

    def _taken(self, budget: int) -> int:
        """Computes so many tokens of the prompts in their order; returns how many there were."""
        left = budget
        for request in self._admitted:
            tokens = min(request.left, left)
            request.left -= tokens
            left -= tokens
            if not left:
                break
        self._waiting_tokens -= budget - left
        return budget - left

    def _begun(self) -> list[_Request]:
        """Requests whose prompt ended with this step, and that have a first token by it."""
        begun = []
        while self._admitted and not self._admitted[0].left:
            request = self._admitted.popleft()
            begun.append(request)
            self._numbers += 1
            self._context += request.prompt + 1
            heapq.heappush(self._rows, (self._steps + request.output - 1, self._numbers, request))
        return begun

    def _ended(self) -> list[_Request]:
        """Requests whose last token this was, and that give their row and blocks back."""
        ended = []
        while self._rows and self._rows[0][0] <= self._steps:
            *_, request = heapq.heappop(self._rows)
            ended.append(request)
            self._context -= request.prompt + request.output
            self._held -= self._sizes.held_tokens(request.prompt + request.output)
        return ended


def tails(
    sizes: RankSizes, gpu: Gpu, demand: Demand, spread: Spread, balance: Prediction, seed: int = 0
) -> Tails | None:
    """Simulates one engine under its demand.

    Args:
        sizes: What a rank of the engine has.
        gpu: The card of each rank.
        demand: Users of this engine, mean lengths.
        spread: How lengths differ.
        balance: What `predict` says of the same demand.
        seed: Chooses lengths and times of thinking.

    Returns:
        What most users wait; None: too few answers end in what can be simulated.
    """
    users, engine = _Users(demand, spread, seed), _Engine(sizes, gpu)
    counted_from_s = demand.think_s + _UNCOUNTED_ANSWERS * balance.answer_s
    now_s, first_s, answers_s, tokens = 0.0, [], [], 0
    for _ in range(_MOST_STEPS):
        if engine.is_idle:
            now_s = max(now_s, users.next_s)
        while users.next_s <= now_s:
            engine.add(users.ask())
        seconds, begun, ended = engine.step()
        now_s += seconds
        first_s += [now_s - request.at_s for request in begun if request.at_s >= counted_from_s]
        for request in ended:
            users.think(now_s)
            if now_s >= counted_from_s:
                tokens += request.output
            if request.at_s >= counted_from_s:
                answers_s.append(now_s - request.at_s)
        if len(answers_s) >= _ANSWERS:
            break
    if not answers_s:
        return None
    ttft, answer = sorted(first_s), sorted(answers_s)
    at = (_at(ttft, 0.5), _at(ttft, 0.95), _at(answer, 0.5), _at(answer, 0.95))
    return Tails(*at, tokens / (now_s - counted_from_s), len(answers_s))


def _at(ascending: list[float], share: float) -> float:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)]
