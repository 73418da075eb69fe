"""An output that may have a section of reasoning, and behind it an answer with its calls.

Owns the order of the two readers, and which tokens are counted as reasoning.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace_service.output_forms.call_format import Spelling
from headrace_service.output_forms.output_plan import OutputPlan
from headrace_service.output_forms.parts import Part
from headrace_service.output_forms.plain import AnswerReader
from headrace_service.output_forms.reasoning import ReasoningReader


class SectionedReader:
    """Reads a whole output, reasoning first.

    Args:
        plan: what to look for.
        parts: where parts of reasoning are appended.
        spelling: of markers.
        answer: makes the reader of the answer, given whether a marker stands before it.

    Attributes:
        num_reasoning_tokens: tokens of reasoning so far, its markers included.
    """

    def __init__(
        self, plan: OutputPlan, parts: list[Part], spelling: Spelling, answer: Callable[[bool], AnswerReader]
    ) -> None:
        self._make_answer = answer
        self._answer: AnswerReader | None = None
        self._reasoning: ReasoningReader | None = None
        if plan.reasoning is not None:
            start, end = map(spelling, plan.reasoning)
            self._reasoning = ReasoningReader(parts, (start, end), plan.begins_inside, self._feed_answer)
        self.num_reasoning_tokens = 0
        self._num_undecided_tokens = 0

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        reasoning, answer = self._reasoning, self._answer
        return (reasoning is not None and reasoning.holds) or (answer is not None and answer.holds)

    def feed(self, num_tokens: int, text: str) -> None:
        """Takes the text of the next tokens: of one, or of some that are a character together."""
        if self._reasoning is None:
            self._feed_answer(text, False)
        else:
            self._feed_reasoning(num_tokens, text, self._reasoning)

    def finish(self) -> None:
        """The output ends here."""
        if self._reasoning is not None:
            self._reasoning.finish()
        if self._answer is not None:
            self._answer.finish()

    def _feed_reasoning(self, num_tokens: int, text: str, reader: ReasoningReader) -> None:
        was_inside, was_undecided = reader.is_inside, reader.is_undecided
        reader.feed(text)
        if was_undecided:
            self._num_undecided_tokens += num_tokens
            if reader.is_inside:
                self.num_reasoning_tokens += self._num_undecided_tokens
        elif was_inside:
            self.num_reasoning_tokens += num_tokens

    def _feed_answer(self, text: str, is_after_marker: bool) -> None:
        if self._answer is None:
            self._answer = self._make_answer(is_after_marker)
        self._answer.feed(text)
