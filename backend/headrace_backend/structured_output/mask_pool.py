"""Threads that compute the masks of steps.

Owns the threads, and which of a step's masks are computed together: as many as can be by the
library's own threads (`mask_batch`), the others by themselves, dealt out to threads of ours. One
thread takes a step after the other, so that a place is worked on by one at a time. Computing
releases the interpreter's lock, so that the engine's thread goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace_backend.engine.output_grammar import MaskOutcome
from headrace_backend.engine.scheduling.masks import MaskCall, MaskJob
from headrace_backend.step.masks import StepMasks, empty_record, mask_words
from headrace_backend.structured_output.banned_tokens import without_bans
from headrace_backend.structured_output.drafted_places import fill_drafted
from headrace_backend.structured_output.mask_batch import BatchRow, batch_row, fill_batch, follow_batch
from headrace_backend.structured_output.mask_bits import Words
from headrace_backend.structured_output.output_place import AHEAD_NS, OutputPlace, failed
from headrace_backend.structured_output.reasoning_place import ReasoningPlace
from headrace_backend.structured_output.stacks import library_threads, thread_pool

# A step's masks are there when the slowest thread has its own, so that more threads than a step
# needs make it later on a machine that has other work.
_MAX_THREADS: Final = 8
# How long a call that nobody waits for looks for what must come: enough to see that something must.
_BRIEF_AHEAD_NS: Final = 300_000
# How long a thread keeps the interpreter's lock that another waits for. Python's own 5 ms are a
# whole step, and a mask would be that much later.
_SWITCH_S: Final = 20e-6

# Take the masks of a call with what came of each job, and later the same with what must come.
Masked = Callable[[MaskCall, StepMasks, list[MaskOutcome]], None]
Computed = Callable[[MaskCall, list[MaskOutcome]], None]


class MaskPool:
    """Computes masks. What is done is told from one of its threads."""

    def __init__(self, vocab_size: int) -> None:
        """No thread yet; `vocab_size` is the number of tokens that a mask is of."""
        self._num_words = mask_words(vocab_size)
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 2) * 3 // 4))
        # Takes calls, one after the other.
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        # Calls: who begins one counts it, and its thread when it leaves the places.
        self._num_begun = self._num_ended = 0

    def start(self, call: MaskCall, masked: Masked, done: Computed) -> None:
        """Begins with the masks of a step.

        Args:
            call: The masks.
            masked: Called when all are there: the step waits for no more.
            done: Called with the same outcomes once what must come was looked for.
        """
        if self._pool is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            self._library = library_threads(self._num_threads)
            self._alone = thread_pool(self._num_threads, "masks")
            self._pool = thread_pool(1, "mask-calls")
        prepared = _Prepared(call)
        # While no thread works on places this one may look at them. It would share the
        # interpreter's lock with the thread that takes calls otherwise, which makes both slower.
        if self._num_begun == self._num_ended:
            # A mistake comes up again in that thread, where it ends the call.
            with contextlib.suppress(Exception):
                prepared.look()
        self._num_begun += 1
        self._pool.submit(self._compute, call, prepared, masked, done)

    def close(self) -> None:
        """Ends the threads once they are through with what they are at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._alone.shutdown(wait=False, cancel_futures=True)

    # In its thread.

    def _compute(self, call: MaskCall, prepared: _Prepared, masked: Masked, done: Computed) -> None:
        record, words = empty_record(prepared.num_lines, self._num_words)
        # The library makes errors of single places of its panics. What is caught is a mistake of
        # all, of which the step must not wait for masks for ever.
        try:
            outcomes = self._filled(call, prepared, words)
        except BaseException as error:
            outcomes = [failed(type(error).__name__) for _ in call.jobs]
        masked(call, step_masks(call, prepared.firsts, words, outcomes, record), outcomes)
        try:
            outcomes = self._followed(call, prepared, words, outcomes)
        except BaseException as error:
            outcomes = [failed(type(error).__name__) for _ in call.jobs]
        self._num_ended += 1
        done(call, outcomes)

    def _filled(self, call: MaskCall, prepared: _Prepared, words: Words) -> list[MaskOutcome]:
        """Writes all masks. What must come is followed for those that are computed alone."""
        jobs, firsts, rows = call.jobs, prepared.firsts, prepared.look()
        lines = [words[first : first + 1 + len(job.drafts)] for first, job in zip(firsts, jobs, strict=True)]
        alone = [number for number, row in enumerate(rows) if row is None]
        # The map has begun before it is waited for.
        waited = self._alone.map(fill_alone, [jobs[number] for number in alone], [lines[number] for number in alone])
        outcomes: dict[int, MaskOutcome] = {}
        if together := [row for row in rows if row is not None]:
            for row, outcome in zip(together, fill_batch(self._library, together, words), strict=True):
                number = row.number
                if outcome is None:
                    outcome = fill_alone(jobs[number], lines[number])
                    rows[number] = None
                outcomes[number] = outcome
        outcomes |= zip(alone, waited, strict=True)
        return [outcomes[number] for number in range(len(jobs))]

    def _followed(
        self, call: MaskCall, prepared: _Prepared, words: Words, outcomes: list[MaskOutcome]
    ) -> list[MaskOutcome]:
        """The outcomes with what must come, for jobs whose masks were computed together."""
        rows = [row for row in prepared.look() if row is not None]
        if not any([row.looks_ahead for row in rows]):
            return outcomes
        ahead_ns = AHEAD_NS if call.is_awaited else _BRIEF_AHEAD_NS
        found = follow_batch(self._library, rows, [outcomes[row.number] for row in rows], words, ahead_ns)
        followed = dict(zip([row.number for row in rows], found, strict=True))
        return [followed.get(number, outcome) for number, outcome in enumerate(outcomes)]


class _Prepared:
    """The lines in which masks of a call's jobs are to lie, and what is computed together."""

    def __init__(self, call: MaskCall) -> None:
        counts = [1 + len(job.drafts) for job in call.jobs]
        ends = list(itertools.accumulate(counts))
        self.num_lines = ends[-1] if ends else 0
        # The first line of each job.
        self.firsts = [end - count for end, count in zip(ends, counts, strict=True)]
        self._jobs = call.jobs
        self._rows: list[BatchRow | None] | None = None

    def look(self) -> list[BatchRow | None]:
        """What is to be computed of each job beside others, which nobody may work on meanwhile."""
        if self._rows is None:
            self._rows = [batch_row(number, job, self.firsts[number]) for number, job in enumerate(self._jobs)]
        return self._rows


def fill_alone(job: MaskJob, lines: Words) -> MaskOutcome:
    """The masks of one job, int32 [1 + num_drafts, num_words].

    Whatever goes wrong is that output's own failure.
    """
    place = job.grammar
    assert isinstance(place, OutputPlace | ReasoningPlace), "grammars are compiled by this room"
    try:
        outcome = place.fill_mask(lines[0], job.first, job.tokens, job.stop_token_ids, job.min_tokens, job.looks_ahead)
        outcome = fill_drafted(place, job, lines, outcome) if job.drafts else outcome
        return outcome if job.bans is None else without_bans(job, job.bans, lines, outcome)
    # A panic of the library's is no Exception.
    except BaseException as error:
        return failed(type(error).__name__)


def step_masks(
    call: MaskCall,
    firsts: Sequence[int],
    words: Words,
    outcomes: Sequence[MaskOutcome],
    record: npt.NDArray[np.uint8] | None = None,
) -> StepMasks:
    """The masks among the lines of a call, as they go to the workers.

    Args:
        call: What was asked for.
        firsts: The first line of each job.
        words: int32 [num_lines, num_words].
        outcomes: What came of each job.
        record: The record that has all lines in their places, if there is one.
    """
    found = [
        (job.sample, place, first + place)
        for job, first, outcome in zip(call.jobs, firsts, outcomes, strict=True)
        for place in outcome.masked_places
    ]
    samples, places, lines = np.array(found, np.int32).reshape(-1, 3).T.copy()
    if len(found) == len(words):
        return StepMasks(call.step_id, samples, places, words, record)
    return StepMasks(call.step_id, samples, places, words[lines])
