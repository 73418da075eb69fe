"""Random requests from a seed: what a soak sends, and what may be said of each answer beforehand.

Owns the distributions of lengths, sampling, stops and cancels. Request `index` depends on the seed
and its index alone, not on when it is sent. Who sends and who judges is not known here.

Lengths are log-uniform, so that one token and many both occur. Where the logits of dummy weights
would leave an answer open, a bias of 100 leaves it a few tokens to choose from: then stops happen,
and a banned token would be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.engine_session import Prompt
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.sampling import Sampling

Ids = npt.NDArray[np.int64]

_NUM_PREFIXES = 8
_SHARED = 0.25
_LONG = 0.05
_LONGEST = 0.002
_CANCELLED = 0.1
_STOPPED = 0.15
_SEVERAL_OUTPUTS = 0.06
_PRIORITIZED = 0.1
_SALTED = 0.05
_MOST_OUTPUTS = 4
_STOP_IDS = 64
# More than any two logits differ by.
_BIAS = 100.0


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much a device is given. Lengths in tokens."""

    requests: int
    concurrency: int
    # Upper ends of log-uniform lengths: of most prompts, of one in twenty, of one in five hundred.
    usual_prompt: int
    long_prompt: int
    longest_prompt: int
    output: int


GPU_SIZES = Sizes(10_000, 300, 1_200, 6_000, 16_000, 200)
CPU_SIZES = Sizes(200, 24, 100, 400, 900, 100)


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel:
    """When a request is to be cancelled."""

    # Share of the time that requests of this run usually take.
    moment: float
    cause: engine_pb2.AbortCause


@dataclasses.dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request, and rules that its tokens must keep."""

    kind: str
    prompt: Prompt
    stop_ids: frozenset[int]
    # Every token is one of these; empty: any.
    allowed: frozenset[int]
    # Token sequences that occur nowhere.
    banned: tuple[tuple[int, ...], ...]
    cancel: Cancel | None


@dataclasses.dataclass(slots=True)
class _Draft:
    """What a kind decides of its request."""

    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    allowed: list[int] = dataclasses.field(default_factory=list)
    banned: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    logprobs: int | None = None

    def favour(self, ids: list[int]) -> None:
        """Only these can be drawn."""
        self.allowed = ids
        self.bias(ids, [_BIAS] * len(ids))

    def bias(self, ids: list[int], values: list[float]) -> None:
        """Changes logits."""
        self.sampling["logit_bias_ids"] = np.asarray(ids, "<u4").tobytes()
        self.sampling["logit_bias_values"] = np.asarray(values, "<f4").tobytes()

    def ban(self, words: list[tuple[int, ...]]) -> None:
        """Sequences that must not be completed."""
        self.banned = words
        self.sampling["bad_words"] = tuple(np.asarray(word, "<u4").tobytes() for word in words)


def _distinct(rng: np.random.Generator, count: int, vocab: int) -> list[int]:
    ids: list[int] = rng.choice(vocab, size=count, replace=False).tolist()
    return ids


def _greedy(_rng: np.random.Generator, _vocab: int) -> _Draft:
    return _Draft()


def _temperature(rng: np.random.Generator, _vocab: int) -> _Draft:
    return _Draft({"temperature": float(rng.uniform(0.1, 2.0))})


def _top_p(rng: np.random.Generator, _vocab: int) -> _Draft:
    return _Draft({"temperature": 1.0, "top_p": float(rng.uniform(0.05, 1.0))})


def _top_k_top_p(rng: np.random.Generator, _vocab: int) -> _Draft:
    return _Draft({"temperature": 0.8, "top_k": int(rng.integers(1, 200)), "top_p": float(rng.uniform(0.1, 1.0))})


def _min_p(rng: np.random.Generator, _vocab: int) -> _Draft:
    return _Draft({"temperature": 1.2, "min_p": float(rng.uniform(0.0, 0.5))})


def _penalties(rng: np.random.Generator, _vocab: int) -> _Draft:
    names = "presence_penalty", "frequency_penalty"
    chosen = {name: float(rng.uniform(-2.0, 2.0)) for name in names}
    chosen["repetition_penalty"] = float(rng.uniform(0.8, 1.5))
    return _Draft(chosen | {"temperature": float(rng.choice([0.0, 0.9]))})


def _logprobs(rng: np.random.Generator, _vocab: int) -> _Draft:
    return _Draft({"temperature": float(rng.choice([0.0, 0.7]))}, logprobs=int(rng.integers(0, 21)))


def _logit_bias(rng: np.random.Generator, vocab: int) -> _Draft:
    draft = _Draft({"temperature": float(rng.choice([0.0, 1.0]))})
    draft.favour(_distinct(rng, int(rng.integers(1, 9)), vocab))
    return draft


def _bad_words(rng: np.random.Generator, vocab: int) -> _Draft:
    draft = _Draft({"temperature": float(rng.choice([0.0, 1.0]))})
    ids = _distinct(rng, int(rng.integers(4, 9)), vocab)
    draft.favour(ids)
    draft.ban([(ids[0],), (ids[1], ids[2]), (ids[2], ids[3], ids[1])])
    return draft


def _everything(rng: np.random.Generator, vocab: int) -> _Draft:
    draft = _penalties(rng, vocab)
    draft.sampling |= {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
    draft.logprobs = 5
    draft.bias(_distinct(rng, 16, vocab), rng.uniform(-5.0, 5.0, 16).tolist())
    draft.ban([(token,) for token in _distinct(rng, 16, vocab)])
    return draft


# Kinds of sampling and how many of a hundred requests have them.
KINDS: Mapping[str, tuple[int, Callable[[np.random.Generator, int], _Draft]]] = {
    "greedy": (20, _greedy),
    "temperature": (15, _temperature),
    "top_p": (10, _top_p),
    "top_k_top_p": (15, _top_k_top_p),
    "min_p": (5, _min_p),
    "penalties": (10, _penalties),
    "logprobs": (10, _logprobs),
    "logit_bias": (5, _logit_bias),
    "bad_words": (5, _bad_words),
    "everything": (5, _everything),
}


def _log_uniform(rng: np.random.Generator, most: int) -> int:
    """1 to `most`."""
    return min(most, int(np.exp(rng.uniform(0.0, np.log(most + 1)))))


class RequestMaker:
    """Makes the requests of one soak."""

    def __init__(self, seed: int, sizes: Sizes, vocab_size: int, max_context: int) -> None:
        """Requests for a model of so many ids and so long a context."""
        self._seed = seed
        self._sizes = sizes
        self._vocab = vocab_size
        self._output = min(sizes.output, max_context // 4)
        self._longest = max_context - self._output
        rng = np.random.default_rng([seed, 0])
        lengths = rng.integers(sizes.usual_prompt // 8, sizes.usual_prompt, size=_NUM_PREFIXES)
        self._prefixes = [rng.integers(vocab_size, size=length) for length in lengths]
        self._names = list(KINDS)
        self._weights = np.asarray([weight for weight, _ in KINDS.values()]) / 100

    def __call__(self, index: int) -> SoakRequest:
        """Request number `index`, from 0."""
        rng = np.random.default_rng([self._seed, 1, index])
        kind = str(rng.choice(self._names, p=self._weights))
        draft = KINDS[kind][1](rng, self._vocab)
        max_tokens = _log_uniform(rng, self._output)
        stop_ids = self._stop_ids(rng, draft)
        min_tokens = int(rng.integers(0, max_tokens + 1)) if stop_ids and rng.random() < 0.3 else 0
        ids = self._prompt_ids(rng)
        prompt = Prompt(
            np.asarray(ids, "<u4").tobytes(),
            len(ids),
            max_tokens,
            salt=rng.bytes(16) if rng.random() < _SALTED else b"",
            stop_ids=np.asarray(stop_ids, "<u4").tobytes(),
            sampling=_sampling(rng, draft),
            min_tokens=min_tokens,
            n=int(rng.integers(2, _MOST_OUTPUTS + 1)) if rng.random() < _SEVERAL_OUTPUTS else 1,
            logprobs=draft.logprobs,
            priority=int(rng.integers(-2, 3)) if rng.random() < _PRIORITIZED else 0,
        )
        rules = frozenset(stop_ids), frozenset(draft.allowed), tuple(draft.banned)
        return SoakRequest(kind, prompt, *rules, _cancel(rng))

    def canary(self) -> list[int]:
        """A prompt for answers that are compared with each other."""
        ids: list[int] = np.random.default_rng([self._seed, 2]).integers(self._vocab, size=64).tolist()
        return ids

    def longest(self) -> list[int]:
        """A prompt as long as there may be one.

        What memory it takes is not to be taken for a leak later.
        """
        length = min(self._sizes.longest_prompt, self._longest)
        ids: list[int] = np.random.default_rng([self._seed, 3]).integers(self._vocab, size=length).tolist()
        return ids

    def _prompt_ids(self, rng: np.random.Generator) -> Ids:
        """Some begin as others do, down to a prompt that is nothing but such a beginning."""
        own = rng.integers(self._vocab, size=self._prompt_length(rng))
        if rng.random() >= _SHARED:
            return own
        prefix = self._prefixes[rng.integers(_NUM_PREFIXES)]
        kept = own[: _log_uniform(rng, len(own)) - 1]
        return np.concatenate((prefix, kept))[: self._longest]

    def _prompt_length(self, rng: np.random.Generator) -> int:
        draw, sizes = rng.random(), self._sizes
        if draw < _LONGEST:
            length = sizes.longest_prompt - _log_uniform(rng, sizes.longest_prompt - sizes.long_prompt)
        else:
            length = _log_uniform(rng, sizes.long_prompt if draw < _LONGEST + _LONG else sizes.usual_prompt)
        return min(length, self._longest)

    def _stop_ids(self, rng: np.random.Generator, draft: _Draft) -> list[int]:
        if len(draft.allowed) > 1:
            return draft.allowed[-1:] if rng.random() < 0.5 else []
        return _distinct(rng, _STOP_IDS, self._vocab) if rng.random() < _STOPPED else []


def _sampling(rng: np.random.Generator, draft: _Draft) -> Sampling:
    greedy = {"temperature": 0.0, "seed": int(rng.integers(2**63))}
    return Sampling(**greedy | draft.sampling)


def _cancel(rng: np.random.Generator) -> Cancel | None:
    if rng.random() >= _CANCELLED:
        return None
    by_deadline = rng.random() < 0.2
    cause = engine_pb2.ABORT_CAUSE_DEADLINE if by_deadline else engine_pb2.ABORT_CAUSE_CANCELLED
    return Cancel(float(rng.uniform(0.0, 0.8)), cause)
