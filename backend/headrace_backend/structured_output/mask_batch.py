"""Masks of many places at once, by the library's own threads.

What a mask costs in Python is paid with the interpreter's lock held, while the engine's thread
wants it too. So the library is given the places of a step together: their tokens in one call and
their masks in another, for both of which it lets the lock go; the second goes along their drafts,
if there are any, and back. What is left for each place is a few comparisons; all else is done with
columns.

Owns which places can be computed so, and the order. What a mask is, `output_place` knows. A place
that is slow to compute is found out here and then computed by itself, where its time is counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from headrace_backend.engine.output_grammar import MASKED, DraftedEnd, MaskOutcome, MaskState
from headrace_backend.engine.scheduling.masks import MaskJob
from headrace_backend.structured_output.mask_bits import BITS, Words, allows, only
from headrace_backend.structured_output.output_place import FREE_NS, MAX_AHEAD, OutputPlace, Stops, finished
from headrace_backend.structured_output.reasoning_place import ReasoningPlace

# What an ordinary mask may take beside others, in the thread that computes it.
_USUAL_NS: Final = 200_000
# Tokens of one byte have the first ids of most vocabularies, so that the first words of most masks
# say that they allow something, and several tokens.
_HEAD_WORDS: Final = 16


class BatchRow(NamedTuple):
    """A place whose masks are computed beside others'."""

    # Which job of the call it is, and the first of its lines among the masks: one for its draw, and
    # one for each that is drafted behind it.
    number: int
    line: int
    place: OutputPlace
    # The tokens that its matcher is to be given first.
    new: list[int]
    # Position of the draw in what the place follows.
    position: int
    stops: Stops
    looks_ahead: bool
    # Drafts behind which there is another draw, as far as they may be.
    drafts: list[int]


def batch_row(index: int, job: MaskJob, line: int | None = None) -> BatchRow | None:
    """The job as one of several; None: its masks are to be computed by themselves.

    Args:
        index: Which job of the call it is.
        job: The job.
        line: First of its lines among the masks; None: `index`, as each job has one.
    """
    if job.bans is not None:
        return None
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
    stops, position = Stops(job.stop_token_ids, job.min_tokens - begins), first + len(tokens)
    drafts = _before_end(job.drafts, place, stops, position)
    return BatchRow(index, index if line is None else line, place, new, position, stops, job.looks_ahead, drafts)


def _before_end(drafts: Sequence[int], place: OutputPlace, stops: Stops, position: int) -> list[int]:
    """The drafts before the first that would end the output; nothing is settled behind it."""
    for index, draft in enumerate(drafts):
        if draft in place.end_ids or stops.ends_with(draft, position + index):
            return list(drafts[:index])
    return list(drafts)


def fill_batch(executor: LLExecutor, rows: Sequence[BatchRow], words: Words) -> list[MaskOutcome | None]:
    """Writes the masks of rows, each in its lines.

    Args:
        executor: The library's threads.
        rows: At least one; their places differ.
        words: int32 [num_lines, num_words].

    Returns:
        What came of each row, without what must come; None: its masks are to be computed by
        themselves.
    """
    began_ns = time.monotonic_ns()
    for index in range(max([len(row.new) for row in rows])):
        _feed(executor, [(row.place, row.new[index]) for row in rows if len(row.new) > index])
    accepting = _write_all(executor, rows, words)
    if time.monotonic_ns() - began_ns > FREE_NS + _USUAL_NS * sum([1 + len(row.drafts) for row in rows]):
        for row in rows:
            row.place.watch()
    allow_some, _ = _looked_at(words[[row.line for row in rows], :_HEAD_WORDS])
    outcomes: list[MaskOutcome | None] = []
    for row, some in zip(rows, allow_some, strict=True):
        if row.drafts and _was_broken(row.place):
            outcomes.append(None)
            continue
        outcome = row.place.finish(words[row.line], row.stops, True if some else None)
        behind = accepting.get(row.number) if outcome is MASKED else None
        outcomes.append(_along_drafts(row, words, outcome, behind) if behind else outcome)
    return outcomes


def follow_batch(
    executor: LLExecutor, rows: Sequence[BatchRow], outcomes: Sequence[MaskOutcome], words: Words, ahead_ns: int
) -> list[MaskOutcome]:
    """Looks for what must come, where rows are asked to; their masks stay as they are.

    Args:
        executor: The library's threads.
        rows: Rows whose masks `fill_batch` has written.
        outcomes: What came of each.
        words: int32 [num_lines, num_words].
        ahead_ns: How long it may take.

    Returns:
        The outcomes, with the tokens that must come.
    """
    masked = [
        row for row, outcome in zip(rows, outcomes, strict=True)
        if row.looks_ahead and outcome.state is MaskState.MASKED
    ]  # fmt: skip
    if not masked:
        return list(outcomes)
    _, may_be_single = _looked_at(words[[row.line for row in masked], :_HEAD_WORDS])
    ahead = [
        (row, token)
        for row, single in zip(masked, may_be_single, strict=True)
        if single and (token := only(words[row.line])) is not None
    ]
    if ahead:
        _look_ahead(executor, ahead, words.shape[1], time.monotonic_ns() + ahead_ns)
    found = {row.number: known for row, _ in ahead if (known := row.place.known_from(row.position))}
    return [
        outcome.followed(found[row.number]) if row.number in found else outcome
        for row, outcome in zip(rows, outcomes, strict=True)
    ]


def _was_broken(place: OutputPlace) -> bool:
    """Whether a matcher came upon an error, maybe on the way of its drafts only; it is renewed."""
    if not place.matcher.is_error():
        return False
    place.renew()
    return True


def _along_drafts(row: BatchRow, words: Words, outcome: MaskOutcome, accepting: Sequence[bool]) -> MaskOutcome:
    """Makes the masks behind a row's drafts whole.

    Args:
        row: A row with drafts.
        words: Its masks behind drafts are as the library has written them, zero where it came to a
            draft that may not be drawn.
        outcome: What came of the row's draw.
        accepting: Whether the grammar may end behind each draft.
    """
    masked, end = [0], None
    for index, draft in enumerate(row.drafts):
        if not allows(words[row.line + index], draft):
            break
        num_before = row.position + index + 1
        behind = finished(words[row.line + index + 1], row.stops, num_before, accepting[index])
        if behind is not MASKED:
            end = DraftedEnd(index + 1, behind)
            break
        masked.append(index + 1)
    return outcome.along(tuple(masked), end)


def _write_all(executor: LLExecutor, rows: Sequence[BatchRow], words: Words) -> dict[int, Sequence[bool]]:
    """Writes the masks of rows, those behind drafts too, without the model's end-of-text tokens.

    Args:
        executor: The library's threads.
        rows: At least one.
        words: int32 [num_lines, num_words].

    Returns:
        By the number of each row with drafts whether its grammar may end behind each of them.
    """
    drafted, plain = [row for row in rows if row.drafts], [row for row in rows if not row.drafts]
    if plain:
        _write(executor, [row.place for row in plain], np.array([row.line for row in plain]), words)
    if not drafted:
        return {}
    lines = np.array([row.line for row in drafted])
    behind = np.concatenate([np.arange(len(row.drafts)) + row.line + 1 for row in drafted])
    words[behind] = 0
    wanted = [(row.place.matcher, row.line, row.drafts) for row in drafted]
    executor.unsafe_compute_mask_ptr_with_draft_token(wanted, words.ctypes.data, words.strides[0], len(words))
    # The library allows these tokens where the grammar may end, and only there.
    token = next(iter(drafted[0].place.end_ids))
    accepting = iter((words[behind, token // BITS] >> token % BITS & 1).astype(bool).tolist())
    _remove_ends(drafted[0].place, np.concatenate((lines, behind)), words)
    return {row.number: list(itertools.islice(accepting, len(row.drafts))) for row in drafted}


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
    _remove_ends(places[0], rows, words)


def _remove_ends(place: OutputPlace, lines: npt.NDArray[np.int64], words: Words) -> None:
    """Takes the end-of-text tokens of a place's model away from some masks."""
    for token in place.end_ids:
        words[lines, token // BITS] &= np.uint32(~(1 << token % BITS) & 0xFFFFFFFF).view(np.int32)


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
