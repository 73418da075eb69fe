"""A compiled grammar, and the place of each output in it.

Owns what one mask is: the tokens that the grammar allows, and where it may end, the tokens that end
the output. Places are worked on by one thread at a time, whichever it is (`mask_pool`).
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Collection
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLMatcher

from headrace_backend.engine.output_grammar import COMPLETE, MASKED, MaskOutcome, MaskState
from headrace_backend.structured_output.mask_bits import Words, add, only, remove

# A mask that takes no more computing than this is paid by everybody; an output's masks may take so
# much more in all. Ordinary ones take a tenth of a millisecond.
_FREE_NS: Final = 20_000_000
_MAX_EXCESS_NS: Final = 1_000_000_000
# Tokens that must come are looked for no further, nor longer: the step waits for its masks.
_MAX_AHEAD: Final = 32
_AHEAD_NS: Final = 2_000_000


class _Stops(NamedTuple):
    """Tokens that end an output, and how many it must have before."""

    token_ids: frozenset[int]
    min_tokens: int


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
        # The output's tokens that the matcher was given; the last ones may not be drawn yet.
        self._known = array("i")
        self._excess_ns = 0
        # A life of workers may end while a thread is at the place, and the next one ask again.
        self._lock = threading.Lock()

    def fill_mask(
        self,
        words: Words,
        first: int,
        tokens: array[int],
        stop_token_ids: frozenset[int],
        min_tokens: int,
        looks_ahead: bool = False,
    ) -> MaskOutcome:
        """Writes the mask of the output's next draw.

        Args:
            words: int32 [num_words], written whole.
            first: Position in the output of the first of `tokens`.
            tokens: The output's tokens from there on, up to the draw.
            stop_token_ids: Tokens that end the output where the grammar may end.
            min_tokens: Tokens that the output must have before they may.
            looks_ahead: Whether the outcome is to say which tokens must come.
        """
        with self._lock:
            began_ns = time.thread_time_ns()
            position, stops = first + len(tokens), _Stops(stop_token_ids, min_tokens)
            if position < len(self._known):
                return self._fill_known(words, position)
            outcome = self._fill(words, first, tokens, stops)
            if outcome is MASKED and looks_ahead:
                outcome = self._look_ahead(words, position, stops, began_ns + _AHEAD_NS)
            self._excess_ns += max(time.thread_time_ns() - began_ns - _FREE_NS, 0)
            if self._excess_ns > _MAX_EXCESS_NS and outcome.state is MaskState.MASKED:
                return _failed(
                    f"its masks took more than {_MAX_EXCESS_NS // 10**9} s of computing beyond what is usual"
                )
            return outcome

    def _fill_known(self, words: Words, position: int) -> MaskOutcome:
        """The mask of a draw that was found to have one outcome before its turn came."""
        forced = self._known[position:]
        words[:] = 0
        add(words, forced[:1])
        return MaskOutcome(MaskState.MASKED, forced=forced)

    def _fill(self, words: Words, first: int, tokens: array[int], stops: _Stops) -> MaskOutcome:
        new = tokens[len(self._known) - first :]
        if new and not self._matcher.consume_tokens(new.tolist()):
            return _failed(self._matcher.get_error() or "tokens that came before do not follow it")
        self._known += new
        return self._mask(words, stops)

    def _mask(self, words: Words, stops: _Stops) -> MaskOutcome:
        """Writes the mask of the draw behind the tokens that the matcher was given."""
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            return _failed(matcher.get_error())
        # llguidance allows the model's end-of-text tokens at the grammar's end. Which tokens end
        # the output is the request's own to say.
        remove(words, self._end_ids)
        has_more = bool(words.any())
        if matcher.is_accepting() and len(self._known) >= stops.min_tokens:
            add(words, stops.token_ids)
        if has_more or words.any():
            return MASKED
        return COMPLETE if matcher.is_accepting() else _failed("no token of the model can follow")

    def _look_ahead(self, words: Words, position: int, stops: _Stops, until_ns: int) -> MaskOutcome:
        """Goes on for as long as a mask allows one token, from the draw with the mask `words` on.

        The last token of a form that nothing can follow is left to be drawn, as is one that ends
        the output: whoever sees the end must have seen what comes before.
        """
        token = only(words)
        if token is None:
            return MASKED
        following = np.empty_like(words)
        while token is not None and token not in stops.token_ids and len(self._known) - position < _MAX_AHEAD:
            if time.thread_time_ns() > until_ns or not self._matcher.consume_token(token):
                break
            self._known.append(token)
            if self._mask(following, stops) is not MASKED:
                self._matcher.rollback(1)
                self._known.pop()
                break
            token = only(following)
        forced = self._known[position:]
        return MaskOutcome(MaskState.MASKED, forced=forced) if forced else MASKED


def _failed(why: str) -> MaskOutcome:
    return MaskOutcome(MaskState.FAILED, f"the structured output can't go on: {why.splitlines()[0][:200]}")
