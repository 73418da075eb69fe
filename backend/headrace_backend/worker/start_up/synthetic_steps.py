"""Synthetic steps: plans that start-up runs to measure memory and to have everything compiled.

Owns their columns. Row i is entry i of a step. Rows share the few blocks there are: what they write
and read there is nobody's, so that a context of any length needs no cache of that length.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headrace_backend.step.plan import (
    MAX_PROMPT_LOGPROBS,
    NO_PROMPT_LOGPROBS,
    ForwardPlan,
    Int32Column,
    PromptLogprobPlan,
    RowAdmission,
    SamplePlan,
    StepPlan,
)
from headrace_request.sampling import Sampling

_NOTHING: Int32Column = np.empty(0, np.int32)
_TOKEN = np.int32(0).tobytes()
# Most that a request may ask for.
_MOST_LOGPROBS = 20


class SamplingKind(enum.Enum):
    """What the rows of a step want of the sampler."""

    GREEDY = enum.auto()
    RANDOM = enum.auto()
    TRUNCATED = enum.auto()
    # The longest way: truncation, penalties, changed logits, masks and log probabilities, those of
    # as much of the prompts as a step can report too.
    EVERYTHING = enum.auto()


class Chunk(NamedTuple):
    """One row's tokens: `num_tokens` of them from position `start`."""

    start: int
    num_tokens: int


class BlockPool(NamedTuple):
    """The cache that the steps may use."""

    num_blocks: int
    block_size: int


# A row that wants nothing but its most likely token.
GREEDY = RowAdmission(row=0, sampling=Sampling(temperature=0.0))
_RANDOM = RowAdmission(row=0, sampling=Sampling(temperature=1.0))
_TRUNCATED = RowAdmission(row=0, sampling=Sampling(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01))
_EVERYTHING = RowAdmission(
    row=0,
    sampling=msgspec.structs.replace(
        _TRUNCATED.sampling,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias_ids=_TOKEN,
        logit_bias_values=np.float32(1).tobytes(),
        bad_words=(_TOKEN + _TOKEN,),
    ),
    num_logprobs=_MOST_LOGPROBS,
    is_masked=True,
    min_tokens=1,
    stop_token_ids=_TOKEN,
)
_ADMISSIONS = {
    SamplingKind.GREEDY: GREEDY,
    SamplingKind.RANDOM: _RANDOM,
    SamplingKind.TRUNCATED: _TRUNCATED,
    SamplingKind.EVERYTHING: _EVERYTHING,
}


def make_step(chunks: Sequence[Chunk], pool: BlockPool, sampling: SamplingKind, draws: bool = True) -> StepPlan:
    """Makes a step with one row per chunk of known tokens, and draws one token for each row.

    Args:
        chunks: At most as many as there are rows.
        pool: Blocks to write to and to read from.
        sampling: Kind of sampling that every row asks for.
        draws: False: nothing is drawn, and each row's last token checked, as in the middle of a
            long prompt.
    """
    rows = np.arange(len(chunks), dtype=np.int32)
    starts, counts = (_column(values) for values in zip(*chunks, strict=True))
    num_blocks = -(-(starts + counts) // pool.block_size)
    forward = ForwardPlan(
        rows=rows,
        starts=starts,
        counts=counts,
        known_counts=counts,
        token_ids=np.zeros(int(counts.sum()), np.int32),
        table_rows=rows,
        table_starts=np.zeros_like(rows),
        table_counts=num_blocks,
        table_blocks=np.arange(int(num_blocks.sum()), dtype=np.int32) % pool.num_blocks,
    )
    admissions = [msgspec.structs.replace(_ADMISSIONS[sampling], row=row) for row in range(len(chunks))]
    sample = _draws(rows, counts, output_position=0) if draws else SamplePlan()
    if not draws:
        forward.checked_indices = np.cumsum(counts, dtype=np.int32) - 1
    prompt_logprobs = _prompt_logprobs(counts) if sampling is SamplingKind.EVERYTHING else NO_PROMPT_LOGPROBS
    num_masked = len(rows) if draws and sampling is SamplingKind.EVERYTHING else 0
    return StepPlan(0, _NOTHING, admissions, forward, sample, prompt_logprobs, num_masked=num_masked)


def prompts(num_tokens: int, max_model_len: int) -> list[Chunk]:
    """Chunks of `num_tokens` tokens in all, in as few rows as they fit into."""
    return [Chunk(0, min(max_model_len, num_tokens - first)) for first in range(0, num_tokens, max_model_len)]


def next_step(before: StepPlan, pool: BlockPool) -> StepPlan:
    """Each row of a step computes the token that it drew there, and draws another.

    The token's block must be in its table already, as it is where the step left one unfilled.
    """
    rows, starts = before.forward.rows, before.forward.starts + before.forward.counts
    assert (starts % pool.block_size).all(), "the drawn token begins a block"
    ones = np.ones_like(rows)
    forward = ForwardPlan(rows=rows, starts=starts, counts=ones, known_counts=np.zeros_like(rows))
    return StepPlan(0, _NOTHING, [], forward, _draws(rows, ones, output_position=1))


def drafted_step(before: StepPlan, num_drafts: int) -> StepPlan:
    """Each row of a step computes the token that it drew there, and drafts behind it.

    They may lie beyond the blocks of its table: what stands there is a block all the same.
    """
    rows, starts = before.sample.rows, before.forward.starts + before.forward.counts
    counts = np.full_like(rows, 1 + num_drafts)
    forward = ForwardPlan(rows=rows, starts=starts, counts=counts, known_counts=np.zeros_like(rows))
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    return StepPlan(0, _NOTHING, [], forward, SamplePlan(rows, firsts, np.ones_like(rows)))


def copying_step() -> StepPlan:
    """Copies block 0 to block 1."""
    return StepPlan(0, _NOTHING, [], ForwardPlan(copy_sources=_column([0]), copy_targets=_column([1])), SamplePlan())


def release_step(num_rows: int) -> StepPlan:
    """Gives back the rows of a step of `num_rows` chunks."""
    return StepPlan(0, np.arange(num_rows, dtype=np.int32), [], ForwardPlan(), SamplePlan())


def _column(values: Sequence[int]) -> Int32Column:
    return np.array(values, np.int32)


def _prompt_logprobs(counts: Int32Column) -> PromptLogprobPlan:
    """Asks for log probabilities of as many of the step's prompt tokens as a step may report."""
    ends = np.minimum(np.cumsum(counts, dtype=np.int32), MAX_PROMPT_LOGPROBS)
    counts_reported = np.diff(ends, prepend=np.int32(0))
    counts_reported = counts_reported[counts_reported > 0]
    return PromptLogprobPlan(
        first_indices=np.cumsum(counts_reported, dtype=np.int32) - counts_reported,
        counts=counts_reported,
        num_tops=np.full_like(counts_reported, _MOST_LOGPROBS),
        token_ids=np.zeros(int(counts_reported.sum()), np.int32),
    )


def _draws(rows: Int32Column, counts: Int32Column, output_position: int) -> SamplePlan:
    """Each row draws from its last token."""
    last = np.cumsum(counts, dtype=np.int32) - 1
    return SamplePlan(rows, last, np.full_like(rows, output_position))
