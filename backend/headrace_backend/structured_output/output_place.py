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

from llguidance import LLMatcher

from headrace_backend.engine.output_grammar import COMPLETE, MASKED, MaskOutcome, MaskState
from headrace_backend.structured_output.mask_bits import Words, add, remove

# A mask that takes no more computing than this is paid by everybody; an output's masks may take so
# much more in all. Ordinary ones take a tenth of a millisecond.
_FREE_NS: Final = 20_000_000
_MAX_EXCESS_NS: Final = 1_000_000_000


class CompiledGrammar:
    """A grammar at its beginning, from which outputs begin."""

    first_masked = 0
    decides_ends = True

    def __init__(self, matcher: LLMatcher, end_ids: Collection[int]) -> None:
        """Takes a matcher that nobody else uses, and the end-of-text tokens that it knows."""
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)

    def new_output(self) -> OutputPlace:
        """An output's place at the grammar's beginning."""
        return OutputPlace(self._matcher.deep_copy(), self._end_ids)


class OutputPlace:
    """How far one output has come in its grammar."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int]) -> None:
        """Takes a matcher of its own."""
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_consumed = 0
        self._excess_ns = 0
        # A life of workers may end while a thread is at the place, and the next one ask again.
        self._lock = threading.Lock()

    def fill_mask(
        self, words: Words, first: int, tokens: array[int], stop_token_ids: frozenset[int], min_tokens: int
    ) -> MaskOutcome:
        """Writes the mask of the output's next draw.

        Args:
            words: int32 [num_words], written whole.
            first: Position in the output of the first of `tokens`.
            tokens: The output's tokens from there on, up to the draw.
            stop_token_ids: Tokens that end the output where the grammar may end.
            min_tokens: Tokens that the output must have before they may.
        """
        with self._lock:
            began_ns = time.thread_time_ns()
            outcome = self._fill(words, first, tokens, stop_token_ids, min_tokens)
            self._excess_ns += max(time.thread_time_ns() - began_ns - _FREE_NS, 0)
            if self._excess_ns > _MAX_EXCESS_NS and outcome is MASKED:
                return _failed(
                    f"its masks took more than {_MAX_EXCESS_NS // 10**9} s of computing beyond what is usual"
                )
            return outcome

    def _fill(
        self, words: Words, first: int, tokens: array[int], stop_token_ids: frozenset[int], min_tokens: int
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
        remove(words, self._end_ids)
        has_more = bool(words.any())
        if matcher.is_accepting() and self._num_consumed >= min_tokens:
            add(words, stop_token_ids)
        if has_more or words.any():
            return MASKED
        return COMPLETE if matcher.is_accepting() else _failed("no token of the model can follow")


def _failed(why: str) -> MaskOutcome:
    return MaskOutcome(MaskState.FAILED, f"the structured output can't go on: {why.splitlines()[0][:200]}")
