"""A compiled grammar, and the place of each output in it.

Owns what one mask is: the tokens that the grammar allows, and where it may end, the tokens that end
the output. Places are worked on by one thread at a time, whichever it is (`mask_pool`).
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from headrace_backend.engine.output_grammar import COMPLETE, MASKED, MaskOutcome, MaskState

# A mask that takes no more computing than this is paid by everybody; an output's masks may take so
# much more in all. Ordinary ones take a tenth of a millisecond.
_FREE_NS: Final = 20_000_000
_MAX_EXCESS_NS: Final = 1_000_000_000
_BITS = 32

Words = npt.NDArray[np.int32]


class CompiledGrammar:
    """A grammar at its beginning, from which outputs begin."""

    def __init__(self, matcher: LLMatcher, end_ids: Collection[int]) -> None:
        """Takes a matcher that nobody else uses, and the end-of-text tokens that it knows."""
        self._matcher = matcher
        self._end_ids = np.array(sorted(end_ids), np.int64)

    def new_output(self) -> OutputPlace:
        """An output's place at the grammar's beginning."""
        return OutputPlace(self._matcher.deep_copy(), self._end_ids)


class OutputPlace:
    """How far one output has come in its grammar."""

    def __init__(self, matcher: LLMatcher, end_ids: npt.NDArray[np.int64]) -> None:
        """Takes a matcher of its own."""
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_consumed = 0
        self._excess_ns = 0
        # A life of workers may end while a thread is at the place, and the next one ask again.
        self._lock = threading.Lock()

    def fill_mask(
        self, words: Words, first: int, tokens: array[int], stop_token_ids: frozenset[int], may_stop: bool
    ) -> MaskOutcome:
        """Writes the mask of the output's next draw.

        Args:
            words: int32 [num_words], written whole.
            first: Position in the output of the first of `tokens`.
            tokens: The output's tokens from there on, up to the draw.
            stop_token_ids: Tokens that end the output where the grammar may end.
            may_stop: Whether the output is long enough for that.
        """
        with self._lock:
            began_ns = time.thread_time_ns()
            outcome = self._fill(words, first, tokens, stop_token_ids, may_stop)
            self._excess_ns += max(time.thread_time_ns() - began_ns - _FREE_NS, 0)
            if self._excess_ns > _MAX_EXCESS_NS and outcome is MASKED:
                return _failed(
                    f"its masks took more than {_MAX_EXCESS_NS // 10**9} s of computing beyond what is usual"
                )
            return outcome

    def _fill(
        self, words: Words, first: int, tokens: array[int], stop_token_ids: frozenset[int], may_stop: bool
    ) -> MaskOutcome:
        matcher = self._matcher
        new = tokens[self._num_consumed - first :].tolist()
        if new and not matcher.consume_tokens(new):
            return _failed(matcher.get_error() or "tokens that came before do not follow it")
        self._num_consumed += len(new)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            return _failed(matcher.get_error())
        # llguidance allows the model's end-of-text tokens at the grammar's end. Which tokens end
        # the output is the request's own to say.
        _clear(words, self._end_ids)
        has_more = bool(words.any())
        if matcher.is_accepting() and may_stop:
            _set(words, np.fromiter(stop_token_ids, np.int64, len(stop_token_ids)))
        if has_more or words.any():
            return MASKED
        return COMPLETE if matcher.is_accepting() else _failed("no token of the model can follow")


def _clear(words: Words, ids: npt.NDArray[np.int64]) -> None:
    np.bitwise_and.at(words.view(np.uint32), ids // _BITS, ~(np.uint32(1) << (ids % _BITS).astype(np.uint32)))


def _set(words: Words, ids: npt.NDArray[np.int64]) -> None:
    np.bitwise_or.at(words.view(np.uint32), ids // _BITS, np.uint32(1) << (ids % _BITS).astype(np.uint32))


def _failed(why: str) -> MaskOutcome:
    return MaskOutcome(MaskState.FAILED, f"the structured output can't go on: {why.splitlines()[0][:200]}")
