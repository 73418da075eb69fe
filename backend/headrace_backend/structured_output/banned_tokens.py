"""Masks of which a request's own bans leave nothing.

A worker bans tokens of bad words, and stop tokens below min_tokens, whatever a mask allows. Where
they are all that the mask allows, no token could be drawn: the request can't be met, and the output
ends before the draw. So a draw that comes to nothing all the same is the model's fault.

Owns which tokens are banned at a draw, by the worker's rules (`worker.sampling.logit_changes`), and
what becomes of the output. Biases are finite, and ban nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Set

from headrace_backend.engine.output_grammar import DraftedEnd, MaskOutcome, MaskState
from headrace_backend.engine.scheduling.masks import Bans, MaskJob
from headrace_backend.structured_output.mask_bits import Words, remove
from headrace_request.rule_kinds import TOKEN_BYTES, Violation


def without_bans(job: MaskJob, bans: Bans, lines: Words, outcome: MaskOutcome) -> MaskOutcome:
    """What comes of a job when its request's bans are known.

    Args:
        job: The draw, with what is drafted behind it.
        bans: Its bans.
        lines: int32 [1 + num_drafts, num_words], as far as the outcome says that there are masks;
            they stay as they are.
        outcome: What came of it without bans.
    """
    for place in outcome.masked_places:
        by_words, by_stops = _banned(job, bans, place)
        left = lines[place].copy()
        remove(left, by_words | by_stops)
        if not left.any():
            unmet = MaskOutcome(MaskState.FAILED, broken=_broken(is_word=bool(by_words)))
            if place == 0:
                return unmet
            masked = tuple(each for each in outcome.masked_places if each < place)
            return outcome.along(masked, DraftedEnd(place, unmet))
    return outcome


def _banned(job: MaskJob, bans: Bans, place: int) -> tuple[Set[int], Set[int]]:
    """The tokens that bad words and min_tokens ban behind a job's first `place` drafts."""
    before = bans.latest + array("i", job.drafts[:place]).tobytes()
    by_words = {
        int.from_bytes(word[-TOKEN_BYTES:], "little") for word in bans.bad_words if before.endswith(word[:-TOKEN_BYTES])
    }
    is_short = bans.stops and job.first + len(job.tokens) + place < job.min_tokens
    return by_words, job.stop_token_ids if is_short else frozenset()


def _broken(*, is_word: bool) -> Violation:
    if is_word:
        rule = "ban every token that the form of the output, or the end of its reasoning, allows at one place"
        return Violation("spec.stop.bad_words", f"{rule}; leave out one of them, or ask for another form")
    rule = "bans the only token that ends the reasoning, which is a stop token"
    return Violation("spec.stop.min_tokens", f"{rule}; ask for fewer tokens, or leave out that stop token")
