"""Threads that compute the masks of steps.

Owns the threads, and how the rows of a step are dealt out to them. Computing releases the
interpreter's lock, so that the engine's thread goes on. What a mask is, `output_place` knows.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from collections.abc import Callable

import numpy as np

from headrace_backend.engine.output_grammar import MaskOutcome, MaskState
from headrace_backend.engine.scheduling.masks import MaskCall, MaskJob
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.structured_output.mask_bits import Words
from headrace_backend.structured_output.output_place import OutputPlace
from headrace_backend.structured_output.reasoning_place import ReasoningPlace
from headrace_backend.structured_output.stacks import thread_pool

# A mask takes a tenth of a millisecond, so that a few rows are not worth another thread.
_ROWS_PER_THREAD = 8
_MAX_THREADS = 8

# Takes the masks of a call, and what came of each job.
Computed = Callable[[MaskCall, StepMasks, list[MaskOutcome]], None]


class MaskPool:
    """Computes masks. What is done is told from one of its threads."""

    def __init__(self, vocab_size: int) -> None:
        """No thread yet; `vocab_size` is the number of tokens that a mask is of."""
        self._num_words = mask_words(vocab_size)
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 2) // 2))
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def start(self, call: MaskCall, done: Computed) -> None:
        """Begins with the masks of a step; `done` is called when all are there."""
        if self._pool is None:
            self._pool = thread_pool(self._num_threads, "masks")
        num_jobs = len(call.jobs)
        words = np.empty((num_jobs, self._num_words), np.int32)
        num_parts = min(self._num_threads, -(-num_jobs // _ROWS_PER_THREAD)) or 1
        parts = [
            self._pool.submit(_fill_all, call.jobs[part::num_parts], words[part::num_parts])
            for part in range(num_parts)
        ]
        # One call finds itself the last, whichever threads they come from.
        num_done = itertools.count(1)

        def on_part(_: concurrent.futures.Future[list[MaskOutcome]]) -> None:
            if next(num_done) == num_parts:
                outcomes: list[MaskOutcome | None] = [None] * num_jobs
                for index, each in enumerate(parts):
                    outcomes[index::num_parts] = each.result()
                _finish(call, words, [outcome for outcome in outcomes if outcome is not None], done)

        for part in parts:
            part.add_done_callback(on_part)

    def close(self) -> None:
        """Ends the threads once they are through with what they are at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _fill_all(jobs: list[MaskJob], words: Words) -> list[MaskOutcome]:
    return [_fill(job, row) for job, row in zip(jobs, words, strict=True)]


def _fill(job: MaskJob, row: Words) -> MaskOutcome:
    """One mask. Whatever goes wrong is that output's own failure."""
    place = job.grammar
    assert isinstance(place, OutputPlace | ReasoningPlace), "grammars are compiled by this room"
    try:
        return place.fill_mask(row, job.first, job.tokens, job.stop_token_ids, job.min_tokens, job.looks_ahead)
    # A panic of the library's is no Exception.
    except BaseException as error:
        return MaskOutcome(MaskState.FAILED, f"the structured output can't go on: {type(error).__name__}")


def _finish(call: MaskCall, words: Words, outcomes: list[MaskOutcome], done: Computed) -> None:
    masked = [index for index, outcome in enumerate(outcomes) if outcome.state is MaskState.MASKED]
    samples = np.array([call.jobs[index].sample for index in masked], np.int32)
    done(call, StepMasks(call.step_id, samples, words[masked]), outcomes)
