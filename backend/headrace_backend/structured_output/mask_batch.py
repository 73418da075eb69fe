"""Masks of many places at once, by the library's own threads.

What a mask costs in Python is paid with the interpreter's lock held, while the engine's thread
wants it too. So the library is given the places of a step together: their tokens in one call and
their masks in another, for both of which it lets the lock go. What is left for each place is a few
comparisons; all else is done with columns.

Owns which places can be computed so, and the order. What a mask is, `output_place` knows. A place
that is slow to compute is found out here and then computed by itself, where its time is counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from headrace_backend.engine.output_grammar import MASKED, MaskOutcome, MaskState
from headrace_backend.engine.scheduling.masks import MaskJob
from headrace_backend.structured_output.mask_bits import BITS, Words, only
from headrace_backend.structured_output.output_place import AHEAD_NS, FREE_NS, MAX_AHEAD, OutputPlace, Stops
from headrace_backend.structured_output.reasoning_place import ReasoningPlace

# What an ordinary mask may take beside others, in the thread that computes it.
_USUAL_NS: Final = 200_000
# Tokens of one byte have the first ids of most vocabularies, so that the first words of most masks
# say that they allow something, and several tokens.
_HEAD_WORDS: Final = 16


class BatchRow(NamedTuple):
    """A place whose mask is computed beside others'."""

    # Which job of the call it is, and which row of the masks.
    number: int
    place: OutputPlace
    # The token that its matcher is to be given first, or none.
    new: list[int]
    # Position of the draw in what the place follows.
    position: int
    stops: Stops
    looks_ahead: bool


def batch_row(index: int, job: MaskJob) -> BatchRow | None:
    """The job as one of several; None: its mask is to be computed by itself."""
    place, first, tokens, begins = job.grammar, job.first, job.tokens, 0
    if isinstance(place, ReasoningPlace):
        answer = place.answer_at(first, tokens)
        if answer is None:
            return None
        place, first, tokens, begins = answer
    assert isinstance(place, OutputPlace), "grammars are compiled by this room"
    new = place.begin(first, tokens)
    if new is None:
        return None
    stops = Stops(job.stop_token_ids, job.min_tokens - begins)
    return BatchRow(index, place, new, first + len(tokens), stops, job.looks_ahead)


def fill_batch(executor: LLExecutor, rows: Sequence[BatchRow], words: Words) -> list[MaskOutcome]:
    """Writes the masks of rows, each where its number says.

    Args:
        executor: The library's threads.
        rows: At least one; their places differ.
        words: int32 [num_jobs, num_words].

    Returns:
        What came of each row.
    """
    began_ns = time.monotonic_ns()
    indices = np.array([row.number for row in rows])
    places = [row.place for row in rows]
    _feed(executor, [(row.place, row.new[0]) for row in rows if row.new])
    _write(executor, places, indices, words)
    if time.monotonic_ns() - began_ns > FREE_NS + _USUAL_NS * len(rows):
        for place in places:
            place.watch()
    allows, may_be_single = _looked_at(words[indices, :_HEAD_WORDS])
    outcomes = [
        row.place.finish(words[row.number], row.stops, True if some else None)
        for row, some in zip(rows, allows, strict=True)
    ]
    ahead = [
        (row, token)
        for row, outcome, single in zip(rows, outcomes, may_be_single, strict=True)
        if single and row.looks_ahead and outcome is MASKED and (token := only(words[row.number])) is not None
    ]
    if ahead:
        _look_ahead(executor, ahead, words.shape[1], time.monotonic_ns() + AHEAD_NS)
    forced = [row.place.known_from(row.position) for row in rows]
    return [
        MaskOutcome(MaskState.MASKED, forced=known) if known and outcome is MASKED else outcome
        for outcome, known in zip(outcomes, forced, strict=True)
    ]


def _feed(executor: LLExecutor, tokens: Sequence[tuple[OutputPlace, int]]) -> None:
    """Gives each place a token. One that does not take it is in error, which its mask will say."""
    if not tokens:
        return
    taken = executor.consume_token_par([(place.matcher, token) for place, token in tokens])
    for (place, token), fits in zip(tokens, taken, strict=True):
        if fits:
            place.fed(token)


def _write(executor: LLExecutor, places: Sequence[OutputPlace], rows: npt.NDArray[np.int64], words: Words) -> None:
    """Writes the masks of places into rows of `words`, without the model's end-of-text tokens."""
    wanted = [(place.matcher, row) for place, row in zip(places, rows.tolist(), strict=True)]
    executor.unsafe_compute_mask_ptr(wanted, words.ctypes.data, words.strides[0], len(words))
    # All places are of one model.
    for token in places[0].end_ids:
        words[rows, token // BITS] &= np.uint32(~(1 << token % BITS) & 0xFFFFFFFF).view(np.int32)


def _looked_at(head: Words) -> tuple[list[bool], list[bool]]:
    """Whether each mask is known to allow a token, and whether it may allow one only."""
    num_set = np.bitwise_count(head.view(np.uint32)).sum(axis=1)
    return (num_set > 0).tolist(), (num_set < 2).tolist()


def _look_ahead(executor: LLExecutor, ahead: list[tuple[BatchRow, int]], num_words: int, until_ns: int) -> None:
    """Goes on with rows for as long as their masks allow one token, as `OutputPlace` does alone.

    Args:
        executor: The library's threads.
        ahead: Rows, each with the one token that its mask allows.
        num_words: Words of a mask.
        until_ns: Time of the monotonic clock from which on nothing more is begun.
    """
    scratch = np.empty((len(ahead), num_words), np.int32)
    while time.monotonic_ns() < until_ns:
        ahead = [(row, token) for row, token in ahead if _may_skip(row, token)]
        if not ahead:
            return
        words, places = scratch[: len(ahead)], [row.place for row, _ in ahead]
        _feed(executor, [(row.place, token) for row, token in ahead])
        _write(executor, places, np.arange(len(ahead)), words)
        ahead = [
            (row, token)
            for (row, _), mask in zip(ahead, words, strict=True)
            if _goes_on(row, mask) and (token := only(mask)) is not None
        ]


def _may_skip(row: BatchRow, token: int) -> bool:
    """Whether a token that must come may be taken as drawn."""
    return token not in row.stops.token_ids and row.place.num_known - row.position < MAX_AHEAD


def _goes_on(row: BatchRow, mask: Words) -> bool:
    """Whether something follows the token that the place was given last; else takes it back."""
    if row.place.finish(mask, row.stops) is MASKED:
        return True
    row.place.take_back()
    return False
