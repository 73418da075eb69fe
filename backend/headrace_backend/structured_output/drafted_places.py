"""The masks of draws behind drafts, of one output by itself.

Each of them supposes that the drafts before it are right. So a copy of the output's place goes
along the drafts, and the place itself stays where the output is: whatever becomes of the copy, a
grammar that fails on the way of a wrong draft included, is nothing to the output unless the drafts
are drawn.

A draft that may not be drawn where it stands is not going to be, as that draw has its mask: behind
it nothing is settled, and no mask is needed. Nor is one behind a draft that ends the output.
"""

from __future__ import annotations

from array import array

from headrace_backend.engine.output_grammar import DraftedEnd, MaskOutcome, MaskState
from headrace_backend.engine.scheduling.masks import MaskJob
from headrace_backend.structured_output.mask_bits import Words, allows
from headrace_backend.structured_output.output_place import OutputPlace, Stops, failed
from headrace_backend.structured_output.reasoning_place import ReasoningPlace


def fill_drafted(place: OutputPlace | ReasoningPlace, job: MaskJob, lines: Words, outcome: MaskOutcome) -> MaskOutcome:
    """Writes the masks of the draws behind a job's drafts.

    Args:
        place: The output's place behind its tokens.
        job: With at least one draft.
        lines: int32 [1 + num_drafts, num_words]; the first one is there.
        outcome: What came of that.

    Returns:
        That outcome with what is known behind the drafts.
    """
    if outcome.state not in (MaskState.MASKED, MaskState.OPEN):
        return outcome
    copied, tokens, end = place.copy(), job.tokens[:], None
    masked = list(outcome.masked_places)
    for index, draft in enumerate(job.drafts):
        if index in masked and not allows(lines[index], draft):
            break
        if Stops(job.stop_token_ids, job.min_tokens).ends_with(draft, job.first + len(tokens)):
            break
        tokens.append(draft)
        behind = _outcome(copied, job, tokens, lines[index + 1])
        if behind.state not in (MaskState.MASKED, MaskState.OPEN):
            end = DraftedEnd(index + 1, behind)
            break
        if behind.state is MaskState.MASKED:
            masked.append(index + 1)
    return outcome.along(tuple(masked), end)


def _outcome(copied: OutputPlace | ReasoningPlace, job: MaskJob, tokens: array[int], words: Words) -> MaskOutcome:
    try:
        return copied.fill_mask(words, job.first, tokens, job.stop_token_ids, job.min_tokens)
    # A panic of the library's is no Exception.
    except BaseException as error:
        return failed(type(error).__name__)
