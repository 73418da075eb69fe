"""Threads that compute the masks of steps.

Owns the threads, and which of a step's masks are computed together: as many as can be by the
library's own threads (`mask_batch`), the others by themselves, dealt out to threads of ours. One
thread takes a step after the other, so that a place is worked on by one at a time. Computing
releases the interpreter's lock, so that the engine's thread goes on.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from headrace_backend.engine.output_grammar import MaskOutcome, MaskState
from headrace_backend.engine.scheduling.masks import MaskCall, MaskJob
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.structured_output.mask_batch import batch_row, fill_batch
from headrace_backend.structured_output.mask_bits import Words
from headrace_backend.structured_output.output_place import OutputPlace, failed
from headrace_backend.structured_output.reasoning_place import ReasoningPlace
from headrace_backend.structured_output.stacks import library_threads, thread_pool

# A step's masks are there when the slowest thread has its own, so that more threads than a step
# needs make it later on a machine that has other work.
_MAX_THREADS: Final = 8
# How long a thread keeps the interpreter's lock that another waits for. Python's own 5 ms are a
# whole step, and a mask would be that much later.
_SWITCH_S: Final = 100e-6

# Takes the masks of a call, and what came of each job.
Computed = Callable[[MaskCall, StepMasks, list[MaskOutcome]], None]


class MaskPool:
    """Computes masks. What is done is told from one of its threads."""

    def __init__(self, vocab_size: int) -> None:
        """No thread yet; `vocab_size` is the number of tokens that a mask is of."""
        self._num_words = mask_words(vocab_size)
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 2) * 3 // 4))
        # Takes calls, one after the other.
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def start(self, call: MaskCall, done: Computed) -> None:
        """Begins with the masks of a step; `done` is called when all are there."""
        if self._pool is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            self._library = library_threads(self._num_threads)
            self._alone = thread_pool(self._num_threads, "masks")
            self._pool = thread_pool(1, "mask-calls")
        self._pool.submit(self._compute, call, done)

    def close(self) -> None:
        """Ends the threads once they are through with what they are at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._alone.shutdown(wait=False, cancel_futures=True)

    # In its thread.

    def _compute(self, call: MaskCall, done: Computed) -> None:
        words = np.empty((len(call.jobs), self._num_words), np.int32)
        try:
            outcomes = self._filled(call.jobs, words)
        # The library makes errors of single places of its panics. This is a mistake of all, of
        # which the step must not wait for masks for ever.
        except BaseException as error:
            outcomes = [failed(type(error).__name__) for _ in call.jobs]
        _finish(call, words, outcomes, done)

    def _filled(self, jobs: Sequence[MaskJob], words: Words) -> list[MaskOutcome]:
        rows = [batch_row(number, job) for number, job in enumerate(jobs)]
        alone = [number for number, row in enumerate(rows) if row is None]
        # The map has begun before it is waited for.
        waited = self._alone.map(fill_alone, [jobs[number] for number in alone], [words[number] for number in alone])
        outcomes: dict[int, MaskOutcome] = {}
        if together := [row for row in rows if row is not None]:
            filled = fill_batch(self._library, together, words)
            outcomes |= {row.number: outcome for row, outcome in zip(together, filled, strict=True)}
        outcomes |= zip(alone, waited, strict=True)
        return [outcomes[number] for number in range(len(jobs))]


def fill_alone(job: MaskJob, row: Words) -> MaskOutcome:
    """One mask. Whatever goes wrong is that output's own failure."""
    place = job.grammar
    assert isinstance(place, OutputPlace | ReasoningPlace), "grammars are compiled by this room"
    try:
        return place.fill_mask(row, job.first, job.tokens, job.stop_token_ids, job.min_tokens, job.looks_ahead)
    # A panic of the library's is no Exception.
    except BaseException as error:
        return failed(type(error).__name__)


def _finish(call: MaskCall, words: Words, outcomes: list[MaskOutcome], done: Computed) -> None:
    masked = [index for index, outcome in enumerate(outcomes) if outcome.state is MaskState.MASKED]
    samples = np.array([call.jobs[index].sample for index in masked], np.int32)
    done(call, StepMasks(call.step_id, samples, words if len(masked) == len(words) else words[masked]), outcomes)
