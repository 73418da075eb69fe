"""How many tokens of which prompt go into a step, so that those who already read their answer are not kept waiting.

Owns the choice between two aims and the length of each chunk. Knows durations from `step_time`; does not know rows and blocks (`scheduler`).

A step has three kinds of limit, of which the first that applies holds:

    nothing decodes       nobody waits for a next token: the whole token budget
    throughput            so many prompt tokens wait that computing them alone would take half a second: the whole token budget, because the sooner every
                          row decodes, the more each reading of the weights brings. Holds until the queue is nearly empty
    otherwise             what fits into `target_us`, or into a quarter more than the decodes alone need, and never less than a short chunk, so that a
                          prompt always advances

Where steps are padded to captured sizes, a chunk that does not finish its prompt fills one.

A prompt that needs many such steps leaves half of each to those behind it: a book does not hold up a line of questions. Where there is no book, one of more than two steps leaves most of each.

One step in some hundreds may be stretched: a prompt that would need three or more is ended in one, if that takes no more than four times the limit. Every token that a step decodes is a gap in somebody's answer, and
earns a small part of the right to a long one; the longest prompts, which wait longest, get most from it. Counted in gaps, so that more readers do not mean more disturbance for each.
"""

from __future__ import annotations

import dataclasses
import math

from headrace_backend.engine.sequence import Sequence
from headrace_backend.engine.step_time import StepLoad, StepTimeModel

# How long a step with decodes should take at most on a GPU. A CPU has no default: a step of the whole budget is the rule there, and a chunk
# short enough to be unnoticed would make prompts endless.
DEFAULT_GPU_STEP_MS = 14.5
# Computing time of the waiting prompts, in whole steps of nothing else, at which throughput goes first, and at which it no longer does.
_THROUGHPUT_FROM_US = 500_000.0
_THROUGHPUT_UNTIL_US = 50_000.0
# From here on steps may be longer, in proportion: so that steady load finds its balance before throughput has to go first.
_PRESSURE_FROM_US = 100_000.0
# Prompts get at least so much of a step's time beside decodes, however long those take.
_LEAST_PREFILL_SHARE = 0.25
# A chunk that does not finish its prompt is not shorter, and none is begun behind another with less.
_LEAST_CHUNK_TOKENS = 64
# Chunks that do not finish their prompt aim at so much of the limit; the rest is for the ends of prompts, which would otherwise cost one more step.
_AIM = 0.96
_WHOLE_STEP_MARGIN = 1.25
# From so deep in a context on, the least chunk grows, up to the second number at twice the depth: attention's time then hardly depends on a chunk's length while each of its programs has
# a multiprocessor, and from some hundred tokens on the worker gathers. Simulated: a prompt of 100,000 beside others takes 16 instead of 42 s, and their ITL p99 is 70 instead of 50 ms.
_DEEP_CONTEXT_TOKENS = 16_384
_LEAST_DEEP_CHUNK_TOKENS = 384
# A prompt that needs more steps like this one than the first is a long one, and keeps the second of a step if others could use it. The first line for which there are any holds.
# Simulated: the second line takes 1 to 2 ms off poisson15's TTFT p95; it alone would let prompts of some steps wait behind one of a hundred.
_LONG_PROMPTS = ((8, 0.5), (2, 0.3))
# Stretched steps: how much longer than the limit, for prompts of how many steps, for what share of the gaps, and how many may be saved up. A share of 0.01 would be all of a 99th percentile.
_STRETCH = 4.0
_STRETCHED_PROMPT_STEPS = 2.5
_STRETCHED_GAPS = 0.005
_MOST_STRETCHED = 3
# What one waiting sequence counts for at most, so that one very long prompt is not taken for a crowd.
MAX_COUNTED_TOKENS = 2048


class TokenBudget:
    """The limits of one step at a time: `begin`, then `chunk` for each prompt in order. Whoever plans adds the chunk to the step's load."""

    __slots__ = (
        "_limit_us",
        "_load",
        "_max_tokens",
        "_model",
        "_reserved_tokens",
        "_reserved_us",
        "_stretchable_gaps",
        "_stretched",
        "_throughput",
        "target_us",
    )

    def __init__(self, max_tokens: int, model: StepTimeModel) -> None:
        """No limit but `max_tokens` a step, until `target_us` is set."""
        self._max_tokens = max_tokens
        self._model = model
        # How long a step with decodes should take at most; None: as long as it takes.
        self.target_us: float | None = None
        self._throughput = False
        self._load = StepLoad()
        self._limit_us = math.inf
        self._reserved_us = 0.0
        self._reserved_tokens = 0
        # Gaps that may be long ones.
        self._stretchable_gaps = 0.0
        self._stretched = False

    @property
    def throughput(self) -> bool:
        """Whether so many prompts wait that throughput goes first."""
        return self._throughput

    @property
    def num_tokens_left(self) -> int:
        """Of the whole budget."""
        return self._max_tokens - self._load.num_decodes - self._load.num_prefill_tokens

    def note_decodes(self, num_decodes: int) -> None:
        """A step has so many decodes, whether or not it has prompts; before `begin`."""
        if num_decodes:
            saved = self._stretchable_gaps + _STRETCHED_GAPS * num_decodes
            self._stretchable_gaps = min(saved, _MOST_STRETCHED * num_decodes)

    def begin(self, load: StepLoad, backlog_tokens: int) -> None:
        """A step that has its decodes already, while so many tokens of prompts wait to be computed."""
        self._load = load
        self._reserved_us, self._reserved_tokens = 0.0, 0
        self._stretched = False
        self._limit_us = self._choose_limit_us(backlog_tokens)

    def chunk(self, start: int, num_left: int) -> int:
        """How many of a prompt's `num_left` tokens from position `start` on the step computes; 0: none."""
        most = min(num_left, self.num_tokens_left - self._reserved_tokens)
        if self._limit_us == math.inf or most <= 0:
            return max(0, most)
        return min(most, self._timed_chunk(start, num_left, self._limit_us - self._reserved_us))

    def find_long(self, catching_up: list[Sequence]) -> tuple[list[Sequence], float]:
        """The long prompts of those that are to be computed, and their share of the step."""
        for num_steps, share in _LONG_PROMPTS:
            long = [s for s in catching_up if self.is_long(s.num_computed, s.num_tokens - s.num_computed, num_steps)]
            if long:
                return long, share
        return [], 0.0

    def is_long(self, start: int, num_left: int, num_steps: int) -> bool:
        """Whether a prompt needs more than so many steps like this one."""
        if self._limit_us == math.inf:
            return num_left > num_steps * self._max_tokens
        fitting = max(_LEAST_CHUNK_TOKENS, self._model.fitting_tokens(self._load, start, self._limit_us))
        return num_left > num_steps * min(fitting, self._max_tokens)

    def reserve(self, share: float) -> None:
        """Keeps a share of what is left for long prompts, which come last; `unreserve` gives it to them."""
        self._reserved_tokens = int(share * self.num_tokens_left)
        if self._limit_us != math.inf:
            left_us = self._limit_us - self._model.predict_us(self._load)
            self._reserved_us = max(0.0, share * left_us)

    def unreserve(self) -> None:
        """Whatever is left is for the next chunks."""
        self._reserved_us, self._reserved_tokens = 0.0, 0

    def _timed_chunk(self, start: int, num_left: int, limit_us: float) -> int:
        model, load = self._model, self._load
        if model.fitting_tokens(load, start, limit_us) >= num_left:
            return num_left
        if self._may_stretch(start, num_left):
            self._stretched = True
            self._stretchable_gaps -= load.num_decodes
            return num_left
        count = model.fitting_tokens(load, start, _AIM * limit_us)
        if count >= _LEAST_CHUNK_TOKENS:
            return count
        return 0 if load.num_prefill_tokens else self._filling(self._least_chunk(start))

    def _may_stretch(self, start: int, num_left: int) -> bool:
        """Whether a prompt is ended in this step although that takes longer than the limit."""
        load = self._load
        if self._stretched or self._throughput or not 0 < load.num_decodes <= self._stretchable_gaps:
            return False
        alone = StepLoad(load.num_decodes, load.context_tokens)
        if num_left <= _STRETCHED_PROMPT_STEPS * self._model.fitting_tokens(alone, start, self._limit_us):
            return False
        return self._model.fitting_tokens(load, start, _STRETCH * self._limit_us) >= num_left

    def _least_chunk(self, start: int) -> int:
        """For a prompt whose next token is at position `start`."""
        growth = min(max(0.0, start / _DEEP_CONTEXT_TOKENS - 1), 1.0)
        return int(_LEAST_CHUNK_TOKENS + growth * (_LEAST_DEEP_CHUNK_TOKENS - _LEAST_CHUNK_TOKENS))

    def _filling(self, count: int) -> int:
        """At least `count` tokens, and as many more as the step is padded with."""
        return self._model.padded(self._load.num_tokens + count) - self._load.num_tokens

    def _choose_limit_us(self, backlog_tokens: int) -> float:
        if self.target_us is None:
            return math.inf
        backlog_us = backlog_tokens * self._crowd_us_per_token()
        self._throughput = backlog_us > (_THROUGHPUT_UNTIL_US if self._throughput else _THROUGHPUT_FROM_US)
        if self._throughput or self._load.num_decodes == 0:
            return self._whole_step_us()
        pressure = max(1.0, backlog_us / _PRESSURE_FROM_US)
        return max(pressure * self.target_us, (1 + _LEAST_PREFILL_SHARE) * self._model.predict_us(self._load))

    def _crowd_us_per_token(self) -> float:
        """What a token costs in a step of nothing but prompts.

        Of a whole step, because its duration is what the model knows well: how much of it belongs to products and how much to attention, steps that are all alike don't tell.
        """
        whole = StepLoad()
        whole.add_chunk(0, self._max_tokens)
        return self._model.predict_us(whole) / self._max_tokens

    def _whole_step_us(self) -> float:
        """What the whole token budget takes if all of it is one prompt from its beginning on, and some more: only chunks deep in a long context are shorter."""
        whole = dataclasses.replace(self._load)
        whole.add_chunk(0, self._max_tokens)
        return _WHOLE_STEP_MARGIN * self._model.predict_us(whole)
