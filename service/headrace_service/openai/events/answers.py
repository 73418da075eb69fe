"""A generation's events as the choices of one answer.

An `EventWire` for each generation, which writes nothing until all has come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.openai.events import head as heads
from headrace_service.openai.events.head import Head
from headrace_service.openai.events.message_parts import Message
from headrace_service.openai.events.openai_wire import AnswerParts, OpenAIWire
from headrace_service.openai.events.token_report import CompletionReport
from headrace_service.openai.events.usage import Usage
from headrace_service.output_forms.parts import Part
from headrace_service.streams.wires import TokenLogprobs

_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(slots=True)
class _Output:
    """What has come of one output."""

    message: Message = dataclasses.field(default_factory=Message)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    reason: str | None = None
    stop_reason: str | int | None = None


class Answer(OpenAIWire):
    """The choices of one generation.

    Args:
        parts: what the answer is made of.
        with_logprobs: whether choices have log probabilities.
    """

    def __init__(self, parts: AnswerParts, *, with_logprobs: bool) -> None:
        super().__init__(parts)
        self._with_logprobs = with_logprobs
        self._outputs = [_Output() for _ in range(parts.num_outputs)]

    def choices(self, first_index: int) -> list[dict[str, Any]]:
        """Returns the choices, the first of them with this index."""
        make = self._chat_choice if self._head.kind == "chat" else self._completion_choice
        return [
            {
                "index": first_index + index,
                **make(output),
                "finish_reason": output.reason,
                "stop_reason": output.stop_reason,
            }
            for index, output in enumerate(self._outputs)
        ]

    def _chat_choice(self, output: _Output) -> dict[str, Any]:
        logprobs = [one for one in output.logprobs if one is not None]
        return {
            "message": output.message.fields(),
            "logprobs": self._report.chat(output.token_ids, logprobs) if self._with_logprobs else None,
        }

    def _completion_choice(self, output: _Output) -> dict[str, Any]:
        report = CompletionReport(self._report)
        logprobs = report.of(output.token_ids, output.logprobs) if self._with_logprobs else None
        return {"text": output.message.text, "logprobs": logprobs}

    # -- EventWire

    def accepted(self, request_id: str, model_revision: str, prompt_tokens: int) -> None:
        """Notes the prompt, where outputs begin with it."""
        echo = self._echo
        if echo is not None and echo.is_whole_at_once:
            self._add_prompt(echo.text, echo.token_ids, [None] if echo.with_logprobs else [])

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> None:
        """Notes a run of the prompt."""
        if self._echo is not None:
            self._add_prompt(*self._echo.run(first_token_index, columns))

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """Notes new tokens of one output, unless the prompt alone is wanted."""
        if self._only_scores:
            return
        output = self._outputs[output_index]
        output.message.add_text(text)
        output.message.add(parts or ())
        if logprobs is not None:
            output.token_ids.extend(token_ids)
            output.logprobs.extend(logprobs)

    def output_finished(
        self, end: engine_pb2.OutputEnd, stop_strings: Sequence[str], calls_tools: bool = False
    ) -> None:
        """Notes why one output ended."""
        output = self._outputs[end.output_index]
        output.reason = self._finish_reason(end, calls_tools)
        output.stop_reason = heads.matched_stop(end, stop_strings)

    def _add_prompt(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        for output in self._outputs:
            output.message.add_text(text)
            if logprobs:
                output.token_ids.extend(token_ids)
                output.logprobs.extend(logprobs)


def answer_of(head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:
    """Returns the whole answer to a request, from that of each of its prompts."""
    choices: list[dict[str, Any]] = []
    for answer in answers:
        choices += answer.choices(len(choices))
    fields = head.fields(answers[0].request_id, chunk=False)
    return _encode({**fields, "choices": choices, "usage": usage.report()})
