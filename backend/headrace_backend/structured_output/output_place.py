"""A compiled grammar, and the place of each output in it.

Owns what one mask is: the tokens that the grammar allows, and where it may end, the tokens that end
the output. A mask is computed by itself (`fill_mask`), or by whoever computes those of many places
side by side (`mask_batch`), between `begin` and `finish`. One thread at a time works on places,
whichever it is (`mask_pool`).
"""

from __future__ import annotations

import dataclasses
import re
import time
from array import array
from collections.abc import Collection
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLMatcher

from headrace_backend.engine.output_grammar import COMPLETE, MASKED, MaskOutcome, MaskState
from headrace_backend.structured_output.mask_bits import Words, add, only, remove
from headrace_request.limits import MAX_DRAFTS
from headrace_request.rule_kinds import Violation

# A mask that takes no more computing than this is paid by everybody; an output's masks may take so
# much more in all. Ordinary ones take a tenth of a millisecond.
FREE_NS: Final = 20_000_000
_MAX_EXCESS_NS: Final = 1_000_000_000
# So many masks of a place are computed by themselves, and so timed, once it may be a slow one, and
# once it was.
_NUM_WATCHED_AT_FIRST: Final = 8
_NUM_WATCHED: Final = 64
# Tokens that must come are looked for no further, nor longer: the next plan may wait for them.
MAX_AHEAD: Final = 32
AHEAD_NS: Final = 2_000_000
# Of its limits the library tells by words alone; all else that it stops at is a mistake of ours.
_LIMITS: Final = re.compile(
    r"Too many items \(limit|items; max is|too many states|too many expressions constructed|fuel exhausted"
)
_MAX_WHY_CHARACTERS: Final = 200


class Stops(NamedTuple):
    """Tokens that end an output, and how many it must have before."""

    token_ids: frozenset[int]
    min_tokens: int

    def ends_with(self, token: int, num_before: int) -> bool:
        """Whether an output ends with a token that so many others precede."""
        return token in self.token_ids and num_before >= self.min_tokens


@dataclasses.dataclass(slots=True)
class _Spent:
    """What the masks of one output have taken."""

    # Beyond what is free.
    excess_ns: int = 0
    # So many more masks are computed by themselves.
    num_watched: int = 0


class CompiledGrammar:
    """A grammar at its beginning, from which outputs begin."""

    first_masked = 0
    decides_ends = True

    def __init__(self, matcher: LLMatcher, end_ids: Collection[int], num_bytes: int = 0) -> None:
        """Takes a matcher that nobody else uses, and the end-of-text tokens that it knows.

        `num_bytes` is the memory that the matcher took when it was tried.
        """
        self.num_bytes = num_bytes
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)

    def new_output(self) -> OutputPlace:
        """An output's place at the grammar's beginning."""
        return OutputPlace(self._matcher, self._end_ids)


class OutputPlace:
    """How far one output has come in its grammar."""

    def __init__(self, start: LLMatcher, end_ids: frozenset[int]) -> None:
        """Begins where `start` is, which is not changed."""
        self._start = start
        self._matcher = start.deep_copy()
        self._end_ids = end_ids
        # The output's tokens that the matcher was given; the last ones may not be drawn yet.
        self._known = array("i")
        self._spent = _Spent()

    @property
    def matcher(self) -> LLMatcher:
        """The library's own state, which it is given between `begin` and `finish`."""
        return self._matcher

    @property
    def end_ids(self) -> frozenset[int]:
        """The model's end-of-text tokens, which the matcher allows at the grammar's end."""
        return self._end_ids

    @property
    def num_known(self) -> int:
        """Tokens that the matcher was given, of which the last may not be drawn yet."""
        return len(self._known)

    def watch(self) -> None:
        """Has the next masks computed by themselves, because one of several was slow."""
        self._spent.num_watched = max(self._spent.num_watched, _NUM_WATCHED_AT_FIRST)

    def copy(self) -> OutputPlace:
        """A place that may go another way. What its masks take is this one's too."""
        copied = OutputPlace(self._matcher, self._end_ids)
        copied._start = self._start
        copied._known = self._known[:]
        copied._spent = self._spent
        return copied

    def renew(self) -> None:
        """Makes the matcher anew, as one that has come upon an error stays in it."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._known.tolist())

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
        began_ns = time.thread_time_ns()
        self._spent.num_watched = max(self._spent.num_watched - 1, 0)
        position, stops = first + len(tokens), Stops(stop_token_ids, min_tokens)
        if position < len(self._known):
            return self._fill_known(words, position)
        outcome = self._fill(words, first, tokens, stops)
        if outcome is MASKED and looks_ahead:
            outcome = self._look_ahead(words, position, stops, began_ns + AHEAD_NS)
        return self._paid(outcome, time.thread_time_ns() - began_ns)

    def begin(self, first: int, tokens: array[int]) -> list[int] | None:
        """The tokens that the matcher is to be given before its mask is computed beside others'.

        At most as many as a step settles. None: the mask is to be computed by itself.
        """
        num_new = first + len(tokens) - len(self._known)
        if self._spent.num_watched or not 0 <= num_new <= 1 + MAX_DRAFTS:
            return None
        return tokens[len(tokens) - num_new :].tolist()

    def fed(self, token: int) -> None:
        """Notes that the matcher was given a token and took it."""
        self._known.append(token)

    def take_back(self) -> None:
        """Takes back the token that the matcher was given last."""
        self._matcher.rollback(1)
        self._known.pop()

    def known_from(self, position: int) -> array[int]:
        """The tokens from a position of the output on that the matcher was given."""
        return self._known[position:]

    def finish(self, words: Words, stops: Stops, has_more: bool | None = None) -> MaskOutcome:
        """Makes the mask whole that the matcher has written, without the end-of-text tokens.

        Args:
            words: int32 [num_words].
            stops: What ends the output.
            has_more: Whether it allows any token; None: nobody has looked.
        """
        matcher = self._matcher
        if matcher.is_error():
            return _matcher_failed(matcher)
        return finished(words, stops, len(self._known), matcher.is_accepting(), has_more)

    def _paid(self, outcome: MaskOutcome, spent_ns: int) -> MaskOutcome:
        """What came of a mask, unless the output's masks have taken too much by now."""
        excess_ns = max(spent_ns - FREE_NS, 0)
        if excess_ns:
            self._spent.num_watched = _NUM_WATCHED
        self._spent.excess_ns += excess_ns
        if self._spent.excess_ns > _MAX_EXCESS_NS and outcome.state is MaskState.MASKED:
            return unmet(f"its masks took more than {_MAX_EXCESS_NS // 10**9} s of computing beyond what is usual")
        return outcome

    def _fill_known(self, words: Words, position: int) -> MaskOutcome:
        """The mask of a draw that was found to have one outcome before its turn came."""
        forced = self._known[position:]
        words[:] = 0
        add(words, forced[:1])
        return MaskOutcome(MaskState.MASKED, forced=forced)

    def _fill(self, words: Words, first: int, tokens: array[int], stops: Stops) -> MaskOutcome:
        new = tokens[len(self._known) - first :]
        if new and not self._matcher.consume_tokens(new.tolist()):
            return _matcher_failed(self._matcher)
        self._known += new
        return self._mask(words, stops)

    def _mask(self, words: Words, stops: Stops) -> MaskOutcome:
        """Writes the mask of the draw behind the tokens that the matcher was given."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        remove(words, self._end_ids)
        return self.finish(words, stops)

    def _look_ahead(self, words: Words, position: int, stops: Stops, until_ns: int) -> MaskOutcome:
        """Goes on for as long as a mask allows one token, from the draw with the mask `words` on.

        The last token of a form that nothing can follow is left to be drawn, as is one that ends
        the output: whoever sees the end must have seen what comes before.
        """
        token = only(words)
        if token is None:
            return MASKED
        following = np.empty_like(words)
        while token is not None and token not in stops.token_ids and len(self._known) - position < MAX_AHEAD:
            if time.thread_time_ns() > until_ns or not self._matcher.consume_token(token):
                break
            self._known.append(token)
            if self._mask(following, stops) is not MASKED:
                self.take_back()
                break
            token = only(following)
        forced = self._known[position:]
        return MaskOutcome(MaskState.MASKED, forced=forced) if forced else MASKED


def finished(words: Words, stops: Stops, num_before: int, accepts: bool, has_more: bool | None = None) -> MaskOutcome:
    """Makes a mask whole: `OutputPlace.finish`, where it is known what the matcher would say.

    Args:
        words: int32 [num_words].
        stops: What ends the output.
        num_before: Tokens before the draw.
        accepts: Whether the grammar may end there.
        has_more: Whether the mask allows any token; None: nobody has looked.
    """
    has_more = bool(words.any()) if has_more is None else has_more
    if accepts and num_before >= stops.min_tokens:
        # Which tokens end the output is the request's own to say.
        add(words, stops.token_ids)
        has_more = has_more or bool(stops.token_ids)
    if has_more:
        return MASKED
    return COMPLETE if accepts else unmet("no token of the model can follow")


def _matcher_failed(matcher: LLMatcher) -> MaskOutcome:
    """What comes of a place whose matcher is in error.

    A grammar that takes more than the library's limits is the request's fault.
    """
    why = matcher.get_error() or "tokens that came before do not follow it"
    return unmet(why) if _LIMITS.search(why) else failed(why)


def unmet(why: str) -> MaskOutcome:
    """What comes of a place whose form can't be met; `why` says what it would take."""
    broken = Violation("spec.structured_output", f"can't be met: {_first_line(why)}; ask for a simpler form")
    return MaskOutcome(MaskState.FAILED, broken=broken)


def failed(why: str) -> MaskOutcome:
    """What comes of a place that the server fails to compute a mask for; `why` says how."""
    return MaskOutcome(MaskState.FAILED, f"the structured output can't go on: {_first_line(why)}")


def _first_line(text: str) -> str:
    return text.splitlines()[0][:_MAX_WHY_CHARACTERS]
