"""Decides how many tokens of which prompt go into a step.

Readers of running answers must not be kept waiting by long prompts.

Owns the choice between two aims and the length of each chunk. Knows durations from `step_time`;
does not know rows and blocks (`scheduler`).

A step has three kinds of limit, of which the first that applies holds:

    nothing decodes       nobody waits for a next token: the whole token budget
    throughput            so many prompt tokens wait that computing them alone would take half a
                          second: the whole token budget, because the sooner every row decodes, the
                          more each reading of the weights brings. Holds until no prompt waits:
                          what is left of a crowd would else take tens of short steps, of which each
                          token costs several times as much
    otherwise             what fits into `target_us`, or a short chunk and what fits into a quarter
                          of the time that decodes alone need, so that a prompt always advances

Where steps are padded to captured sizes, a chunk that does not finish its prompt fills one.

A prompt that needs many such steps leaves half of each to those behind it: a book does not hold up
a line of questions. Where there is no book, one of more than two steps leaves most of each.

On a CPU every step has a limit, also one beside which nobody reads an answer: others want to be let
in, cancelled or ended as their time is over, and nothing of that happens within a step. Chunks of
a second are as fast as longer ones there. What a step will take is not known before some have been
measured, so the first chunk is short, and none is more than twice as long as one that was measured
to take half of the limit at most.

One step in some hundreds may be stretched: a prompt that would need three or more is ended in one,
if that takes no more than four times the limit. Every token that a step decodes is a gap in
somebody's answer, and earns a small part of the right to a long one; the longest prompts, which
wait longest, get most from it. Counted in gaps, so that more readers do not mean more disturbance
for each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.step_time import StepLoad, StepTimeModel

# How long a step with decodes should take at most on a GPU. Simulated with what an H200 takes,
# poisson15 has its ITL p99 at 13.4 ms instead of 14.3 with 14.5, and its TTFT p95 where it was.
_GPU_STEP_US = 13_800.0
# How long any step should take at most on a CPU. A model of hidden size 896 and 24 layers computes,
# by one thread, 75 tokens a second in chunks of 64 (0.9 s each), 71 in chunks of 256 and 51 in
# chunks of 1,024 (random weights in fp32, a busy machine, 2026-11-22): short chunks cost nothing.
_CPU_STEP_US = 1_000_000.0
# On a CPU at most so much of the watchdog's time, however short that is.
_WATCHDOG_SHARE = 0.25
# Computing time of the waiting prompts, in whole steps of nothing else, from which on throughput
# goes first.
_THROUGHPUT_FROM_US = 500_000.0
# From here on steps may be longer, in proportion: so that steady load finds its balance before
# throughput has to go first.
_PRESSURE_FROM_US = 100_000.0
# However long decodes take, prompts get so much of their time behind what the shortest chunk adds
# to them. Counted from the decodes alone, nothing was left where a prompt's first tokens are
# expected to take long, as in a mixture of experts (docs/experiments.md, "prompts that drip").
_LEAST_PREFILL_SHARE = 0.25
# A chunk that does not finish its prompt is not shorter, and none is begun behind another with
# less.
_LEAST_CHUNK_TOKENS = 64
# Chunks that do not finish their prompt aim at so much of the limit; the rest is for the ends of
# prompts, which would otherwise cost one more step.
_AIM = 0.96
_WHOLE_STEP_MARGIN = 1.25
# A prompt that needs more steps like this one than the first is a long one, and keeps the second of
# a step if others could use it. The first line for which there are any holds. Simulated: the second
# line takes 1 to 2 ms off poisson15's TTFT p95; it alone would let prompts of some steps wait
# behind one of a hundred.
_LONG_PROMPTS = ((8, 0.5), (2, 0.3))
# Stretched steps: how much longer than the limit, for prompts of how many steps, for what share of
# the gaps, and how many may be saved up. A share of 0.01 would be all of a 99th percentile.
_STRETCH = 4.0
_STRETCHED_PROMPT_STEPS = 2.5
_STRETCHED_GAPS = 0.005
_MOST_STRETCHED = 3


class StepLimits(NamedTuple):
    """What the configuration says of how long steps may take."""

    # How long a step with decodes should take, in milliseconds; 0: as the device's default says.
    target_ms: float
    # How long a worker may be without progress before it is replaced, in seconds.
    watchdog_s: float


class TokenBudget:
    """The limits of one step at a time: `begin`, then `chunk` for each prompt in order.

    Whoever plans adds the chunk to the step's load.
    """

    __slots__ = (
        "_limit_us",
        "_load",
        "_longest_us",
        "_max_tokens",
        "_model",
        "_proven_tokens",
        "_reserved_tokens",
        "_reserved_us",
        "_stretchable_gaps",
        "_stretched",
        "_throughput",
        "target_us",
    )

    def __init__(self, max_tokens: int, model: StepTimeModel) -> None:
        """No limit but `max_tokens` a step, until there are others."""
        self._max_tokens = max_tokens
        self._model = model
        # How long a step with decodes should take at most; None: as long as it takes.
        self.target_us: float | None = None
        # How long any step may take; None: as long as it takes.
        self._longest_us: float | None = None
        # Prompt tokens that a step may have where it may not take as long as it takes.
        self._proven_tokens = _LEAST_CHUNK_TOKENS
        self._throughput = False
        self._load = StepLoad()
        self._limit_us = math.inf
        self._reserved_us = 0.0
        self._reserved_tokens = 0
        # Gaps that may be long ones.
        self._stretchable_gaps = 0.0
        self._stretched = False

    def set_limits(self, limits: StepLimits, on_gpu: bool) -> None:
        """Sets the limits of steps for a device from now on."""
        default_us = _GPU_STEP_US if on_gpu else min(_CPU_STEP_US, 1e6 * _WATCHDOG_SHARE * limits.watchdog_s)
        self.target_us = 1e3 * limits.target_ms or default_us
        self._longest_us = None if on_gpu else max(self.target_us, default_us)

    def note_step(self, load: StepLoad, duration_us: float) -> None:
        """Notes how long a step took."""
        if self._longest_us is None or not load.num_prefill_tokens:
            return
        if duration_us > self._longest_us:
            shorter = int(load.num_prefill_tokens * self._longest_us / duration_us)
            self._proven_tokens = max(_LEAST_CHUNK_TOKENS, min(self._proven_tokens, shorter))
        elif 2 * duration_us <= self._longest_us:
            self._proven_tokens = max(self._proven_tokens, 2 * load.num_prefill_tokens)

    @property
    def throughput(self) -> bool:
        """Whether so many prompts wait that throughput goes first."""
        return self._throughput

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens that are left of the whole budget."""
        return self._max_tokens - self._load.num_tokens

    def note_decodes(self, num_decodes: int) -> None:
        """A step has so many decodes, whether or not it has prompts; before `begin`."""
        if num_decodes:
            saved = self._stretchable_gaps + _STRETCHED_GAPS * num_decodes
            self._stretchable_gaps = min(saved, _MOST_STRETCHED * num_decodes)

    def begin(self, load: StepLoad, backlog_tokens: int) -> None:
        """Begins a step that has its decodes, while so many prompt tokens wait to be computed."""
        self._load = load
        self._reserved_us, self._reserved_tokens = 0.0, 0
        self._stretched = False
        self._limit_us = self._choose_limit_us(backlog_tokens)
        if self._longest_us is not None:
            self._limit_us = min(self._limit_us, self._longest_us)

    def chunk(self, start: int, num_left: int) -> int:
        """How many of a prompt's `num_left` tokens from position `start` the step computes.

        It is 0 if the step computes none.
        """
        most = min(num_left, self.num_tokens_left - self._reserved_tokens, self._num_proven_left)
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
        if self._longest_us is not None and min(fitting, self._proven_tokens) < 2 * _LEAST_CHUNK_TOKENS:
            # A step that holds one chunk can't be shared: all prompts advance if they take turns.
            return False
        return num_left > num_steps * min(fitting, self._max_tokens)

    def reserve(self, share: float) -> None:
        """Reserves a share of what is left for long prompts, which come last.

        `unreserve` gives it to them.
        """
        self._reserved_tokens = int(share * self.num_tokens_left)
        if self._limit_us != math.inf:
            left_us = self._limit_us - self._model.predict_us(self._load)
            self._reserved_us = max(0.0, share * left_us)

    def unreserve(self) -> None:
        """Gives whatever is left to the next chunks."""
        self._reserved_us, self._reserved_tokens = 0.0, 0

    @property
    def _num_proven_left(self) -> int:
        """Prompt tokens that are not too many for what has been measured."""
        if self._longest_us is None:
            return self._max_tokens
        return self._proven_tokens - self._load.num_prefill_tokens

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
        return 0 if load.num_prefill_tokens else self._filling(_LEAST_CHUNK_TOKENS)

    def _may_stretch(self, start: int, num_left: int) -> bool:
        """Whether a prompt is ended in this step although that takes longer than the limit."""
        load = self._load
        if self._stretched or self._throughput or not 0 < load.num_decodes <= self._stretchable_gaps:
            return False
        alone = StepLoad(load.num_decodes, load.context_tokens)
        if num_left <= _STRETCHED_PROMPT_STEPS * self._model.fitting_tokens(alone, start, self._limit_us):
            return False
        most_us = min(_STRETCH * self._limit_us, self._longest_us or math.inf)
        return self._model.fitting_tokens(load, start, most_us) >= num_left

    def _filling(self, count: int) -> int:
        """Rounds `count` tokens up to those that the step is padded with."""
        return self._model.padded(self._load.num_tokens + count) - self._load.num_tokens

    def _choose_limit_us(self, backlog_tokens: int) -> float:
        if self.target_us is None:
            return math.inf
        backlog_us = backlog_tokens * self._crowd_us_per_token()
        self._throughput = backlog_us > (0.0 if self._throughput else _THROUGHPUT_FROM_US)
        if self._throughput or self._load.num_decodes == 0:
            return self._longest_us or self._whole_step_us()
        pressure = max(1.0, backlog_us / _PRESSURE_FROM_US)
        least_us = self._least_chunk_us() + _LEAST_PREFILL_SHARE * self._model.predict_us(self._load)
        return max(pressure * self.target_us, least_us)

    def _least_chunk_us(self) -> float:
        """How long this step takes with the shortest chunk, in microseconds."""
        load = dataclasses.replace(self._load)
        load.add_chunk(0, min(_LEAST_CHUNK_TOKENS, self.num_tokens_left))
        return self._model.predict_us(load)

    def _crowd_us_per_token(self) -> float:
        """What a token costs in a step of nothing but prompts.

        Of a whole step, because its duration is what the model knows well: how much of it belongs
        to products and how much to attention, steps that are all alike don't tell.
        """
        whole = StepLoad()
        whole.add_chunk(0, self._max_tokens)
        return self._model.predict_us(whole) / self._max_tokens

    def _whole_step_us(self) -> float:
        """Upper estimate of how long a step of the whole token budget takes, in microseconds.

        It is the time of one prompt from its beginning, and some more, so that only chunks deep in
        a long context are shorter.
        """
        whole = dataclasses.replace(self._load)
        whole.add_chunk(0, self._max_tokens)
        return _WHOLE_STEP_MARGIN * self._model.predict_us(whole)
