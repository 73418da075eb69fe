"""Request traces used for every engine under comparison, and when their requests are sent.

Owns lengths, token ids and arrival times; with seed 0 they are the same, id for id, for every
engine that was ever measured with them (`tests/benchmarks` holds their hashes), and `--seed N` adds
N to each trace's own seed. Who sends them, and through what, is not known here.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping

Trace = list[tuple[list[int], int]]

POISSON_RATE = 15.0
# users1000: people, how long they go on, and how long they think on average, in seconds.
NUM_USERS = 1000
USERS_SECONDS = 300.0
THINK_SECONDS = 45.0
# How long after their time their last answers may take; those that are not whole by then are given
# up, and counted.
USERS_DRAIN_SECONDS = 30.0
LONG_PROMPT_TOKENS = 100_000
# The long prompt comes when the load that it disturbs has settled.
LONG_PROMPT_AT_S = 1.0
_FIRST_ID = 10


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(_FIRST_ID, 120_000) for _ in range(length)]


def _uniform(count: int, prompt: int, output: int, seed: int) -> Trace:
    rng = random.Random(seed)
    return [(_prompt(rng, prompt), output) for _ in range(count)]


def single(count: int = 4, seed: int = 1) -> Trace:
    """One request at a time, 512 -> 256: latency."""
    return _uniform(count, 512, 256, seed)


def burst256(count: int = 256, seed: int = 2) -> Trace:
    """256 requests at once, 512 -> 256: throughput at a full batch."""
    return _uniform(count, 512, 256, seed)


def mix1000(count: int = 1000, seed: int = 3) -> Trace:
    """1,000 users at once, log-normal lengths (median 365 -> 148): a long queue's throughput."""
    rng = random.Random(seed)
    return [_mixed(rng) for _ in range(count)]


def _mixed(rng: random.Random) -> tuple[list[int], int]:
    prompt = max(16, min(2048, int(rng.lognormvariate(5.9, 0.9))))
    output = max(16, min(512, int(rng.lognormvariate(5.0, 0.7))))
    return _prompt(rng, prompt), output


def prefill8k(count: int = 32, seed: int = 4) -> Trace:
    """32 prompts of 8,000 tokens, one output token: prefill rate."""
    return _uniform(count, 8000, 1, seed)


def longctx(count: int = 32, seed: int = 5) -> Trace:
    """32 sequences of 8,000 -> 128: decode over a long KV cache."""
    return _uniform(count, 8000, 128, seed)


def longprompt(count: int = 1, seed: int = 6) -> Trace:
    """One prompt of 100,000 tokens, 128 tokens of answer."""
    return _uniform(count, LONG_PROMPT_TOKENS, 128, seed)


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> tuple[float, ...]:
    """Seconds from the beginning to each of `count` arrivals at `rate` per second."""
    rng = random.Random(seed)
    return tuple(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a user."""

    # Its place in the trace.
    index: int
    # Seconds of thinking before it is sent, from the last token of the one before.
    think_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Users:
    """People who think, ask, read the whole answer, and think again."""

    # Of each user, more than there is time for, whatever the server's speed.
    turns: tuple[tuple[Turn, ...], ...]
    # Seconds from the beginning after which nothing is sent any more.
    seconds: float
    # How long they think on average.
    think_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A trace with its timing."""

    name: str
    trace: Trace
    # Open loop: seconds from the beginning to each request, ascending. None: closed loop, all at
    # once or `concurrency` at a time.
    arrivals_s: tuple[float, ...] | None = None
    # Closed loop: requests open at once; None: all of them.
    concurrency: int | None = None
    # Closed loop of people, of whose requests only those are sent that they come to; None: all are.
    users: Users | None = None
    # Indices of requests whose figures are kept apart from the others'.
    apart: frozenset[int] = frozenset()
    # How many of its first requests ask for a repetition penalty.
    penalized: int = 0
    # Whether prompts, outputs or ids were changed to fit a small model, or users have another time.
    cut: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(prompt) + output for prompt, output in self.trace)


def _single(seed: int) -> Workload:
    return Workload("single", single(seed=1 + seed), concurrency=1)


def _burst256_penalized(seed: int) -> Workload:
    return Workload("burst256_penalized", burst256(seed=2 + seed), penalized=1)


def _poisson15(seed: int) -> Workload:
    return Workload("poisson15", mix1000(300, 7 + seed), poisson_arrivals(300, POISSON_RATE, seed))


def _longprompt_poisson15(seed: int) -> Workload:
    """poisson15 with the long prompt between; the long one's figures are apart."""
    base = _poisson15(seed)
    assert base.arrivals_s is not None
    place = sum(arrival < LONG_PROMPT_AT_S for arrival in base.arrivals_s)
    trace = [*base.trace[:place], *longprompt(seed=6 + seed), *base.trace[place:]]
    arrivals = (*base.arrivals_s[:place], LONG_PROMPT_AT_S, *base.arrivals_s[place:])
    return Workload("longprompt_poisson15", trace, arrivals, apart=frozenset({place}))


WORKLOADS: Mapping[str, Callable[[int], Workload]] = {
    "single": _single,
    "burst256": lambda seed: Workload("burst256", burst256(seed=2 + seed)),
    "burst256_penalized": _burst256_penalized,
    # What others publish of gpt-oss: equal prompts and answers, many open at once.
    "even1000": lambda seed: Workload("even1000", _uniform(1024, 1000, 1000, 9 + seed)),
    "mix1000": lambda seed: Workload("mix1000", mix1000(seed=3 + seed)),
    "prefill8k": lambda seed: Workload("prefill8k", prefill8k(seed=4 + seed)),
    "longctx": lambda seed: Workload("longctx", longctx(seed=5 + seed)),
    "poisson15": _poisson15,
    "longprompt": lambda seed: Workload("longprompt", longprompt(seed=6 + seed)),
    "longprompt_poisson15": _longprompt_poisson15,
    "users1000": lambda seed: users(NUM_USERS, USERS_SECONDS, seed),
}


def users(count: int, seconds: float, seed: int, think_s: float = 0.0) -> Workload:
    """1,000 users in closed loop with the lengths of mix1000, who think 45 s on average.

    It shows the latency of many people, for five minutes.

    They begin with thinking, so that they come one by one from the beginning, and as many a second
    as later. In another time they think as much longer or shorter, so that each comes to as many
    requests; or `think_s` on average: with 45 s a shorter time is the beginning of the whole,
    request by request, at the same load.
    """
    think_s = think_s or THINK_SECONDS * seconds / USERS_SECONDS
    trace: Trace = []
    turns = []
    for user in range(count):
        rng = random.Random(f"users1000 {seed} {user}")
        own, thought_s = [], 0.0
        while thought_s <= seconds:
            own.append(Turn(len(trace), rng.expovariate(1 / think_s)))
            thought_s += own[-1].think_s
            trace.append(_mixed(rng))
        turns.append(tuple(own))
    return Workload("users1000", trace, users=Users(tuple(turns), seconds, think_s), cut=seconds != USERS_SECONDS)


def build(
    name: str, seed: int = 0, requests: int = 0, seconds: float = USERS_SECONDS, think_s: float = 0.0
) -> Workload:
    """A workload by its name.

    Args:
        name: One of WORKLOADS, or NAME@C: its first 4 C requests, C of them open at once, for a
            curve of throughput against latency; users1000@C: C users.
        seed: Added to the trace's own seed; 0 gives the traces that every engine was measured with.
        requests: Only the first so many, of users1000 only so many users; 0: all.
        seconds: How long users1000 goes on.
        think_s: How long its users think on average; 0: as much shorter than 45 s as the whole is
            than 300.

    Raises:
        ValueError: There is no such workload.
    """
    kind, plus, more = name.partition("+")
    base, at, level = kind.partition("@")
    if base not in WORKLOADS or (at and not (level.isdecimal() and int(level))) or (plus and not more.isdecimal()):
        raise ValueError(
            f"no workload {name!r}; there are {', '.join(WORKLOADS)}, each as NAME@CONCURRENCY and NAME+SEED too"
        )
    seed += int(more or 0)
    if base == "users1000":
        made = users(min(int(level or NUM_USERS), requests or NUM_USERS), seconds, seed, think_s)
        return dataclasses.replace(made, name=name)
    whole = dataclasses.replace(WORKLOADS[base](seed), name=name)
    if level:
        whole = dataclasses.replace(first_of(whole, 4 * int(level)), arrivals_s=None, concurrency=int(level))
    return first_of(whole, requests) if requests else whole


def first_of(whole: Workload, count: int) -> Workload:
    """The workload's first `count` requests.

    Requests kept apart stay, and of users only what they ask.
    """
    kept = sorted({*range(min(count, len(whole.trace))), *whole.apart})
    arrivals = None if whole.arrivals_s is None else tuple(whole.arrivals_s[index] for index in kept)
    apart = frozenset(kept.index(index) for index in whole.apart)
    return dataclasses.replace(
        whole, trace=[whole.trace[index] for index in kept], arrivals_s=arrivals, users=None, apart=apart
    )


def fitted(whole: Workload, vocab_size: int, max_context: int) -> Workload:
    """The workload for a small model.

    Outputs have at most half the context, prompts are cut to fit before them, and ids are folded
    into the vocabulary.

    Nothing changes where all fits.
    """
    if all(len(prompt) + output <= max_context for prompt, output in whole.trace) and vocab_size >= 120_000:
        return whole
    trace = []
    for prompt, output in whole.trace:
        kept_output = min(output, max_context // 2)
        kept = prompt[: max_context - kept_output]
        trace.append(([_FIRST_ID + (token - _FIRST_ID) % (vocab_size - _FIRST_ID) for token in kept], kept_output))
    return dataclasses.replace(whole, trace=trace, cut=True)
