"""Log probabilities of one prompt: which tokens are planned, and what was reported.

Owns the two marks and the parts that were read. Does not own how much a step computes (`scheduler`)
nor who gets them (`settlement`). As with a sequence's tokens there are two views, because steps are
planned before the results of those before them were read:

    planned   num_planned    tokens before it are reported already or will be by a step in flight;
                             no step is asked for them again
    settled   parts          what was read, in order and without gaps, kept for readers that come
                             later

The hidden state at p - 1 reports the token at position p, so nothing reports the one at
position 0. A prompt that is computed again after a preemption goes on where the planned mark
stands; only if steps in flight are lost with their worker does the mark go back to what was read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from headrace_backend.engine.events import LogprobColumns, PromptLogprobs
from headrace_backend.step.plan import StepResult


class PromptRun(NamedTuple):
    """Consecutive prompt tokens that a step reports."""

    first_token: int
    num_tokens: int


class PromptLog:
    """The marks and the parts of a prompt of `num_tokens` tokens."""

    __slots__ = ("num_bytes", "num_planned", "num_tokens", "num_tops", "parts")

    def __init__(self, num_tokens: int, num_tops: int) -> None:
        """Starts with nothing planned.

        Each token is reported with the `num_tops` most likely ones, at most the vocabulary.
        """
        self.num_tokens = num_tokens
        self.num_tops = num_tops
        # The first token counts as planned, since there is nothing to report about it.
        self.num_planned = 1
        self.parts: list[PromptLogprobs] = []
        self.num_bytes = 0

    @property
    def num_settled(self) -> int:
        """Tokens before it were reported."""
        return self.parts[-1].end if self.parts else 1

    @property
    def num_reusable(self) -> int:
        """Tokens from the front whose hidden states nobody needs any more.

        Only these may come from the prefix cache.
        """
        return self.num_planned - 1

    def most_computed(self, start: int, num_wanted: int, num_left: int) -> int:
        """How many of `num_wanted` tokens from position `start` a step may compute.

        The step can report `num_left` more prompt tokens.
        """
        if self.num_tokens - self.num_planned <= num_left:
            return num_wanted
        return min(num_wanted, max(start, self.num_planned - 1) + num_left - start)

    def plan(self, start: int, end: int) -> PromptRun | None:
        """Plans the prompt tokens that a step over tokens [start, end) reports, each token once.

        It returns None if there are none.
        """
        first = max(start + 1, self.num_planned)
        last = min(end, self.num_tokens - 1)
        if last < first:
            return None
        self.num_planned = last + 1
        return PromptRun(first, last + 1 - first)

    def resume(self, parts: Iterable[PromptLogprobs]) -> None:
        """Takes what an earlier attempt reported, in order: no step is asked for it again."""
        self.parts = list(parts)
        self.num_bytes = sum(part.columns.num_bytes for part in self.parts)
        self.num_planned = self.num_settled

    def forget_unread(self) -> None:
        """Plans again what the steps in flight would have reported; they will never be read."""
        self.num_planned = self.num_settled

    def append(self, run: PromptRun, result: StepResult, first: int, top_first: int) -> PromptLogprobs:
        """Keeps what a result reports about a run of prompt tokens.

        The run begins at entry `first` of the prompt columns and at entry `top_first` of the flat
        columns.
        """
        assert run.first_token == self.num_settled, "parts come in order, each once"
        end, top_end = first + run.num_tokens, top_first + run.num_tokens * self.num_tops
        columns = LogprobColumns(
            array("f", result.prompt_sampled[first:end].tobytes()),
            array("I", result.prompt_ranks[first:end].tobytes()),
            array("H", [self.num_tops]) * run.num_tokens,
            array("I", result.prompt_top_token_ids[top_first:top_end].tobytes()),
            array("f", result.prompt_top_logprobs[top_first:top_end].tobytes()),
        )
        part = PromptLogprobs(run.first_token, columns)
        self.parts.append(part)
        self.num_bytes += columns.num_bytes
        return part
