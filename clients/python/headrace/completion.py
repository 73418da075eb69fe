"""Whole answers: collected from a stream's events, or taken from a Complete response.

Owns Completion, Output and the Transcript that every stream keeps of what it has yielded (its
positions are what a broken subscription continues from). Does not read sockets. Events go in one by
one, a Completion comes out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from headrace.conversations.content import CollectedContent, ToolCall
from headrace.conversations.messages import Message
from headrace.errors import Internal
from headrace.events import (
    Accepted,
    Delta,
    Done,
    Event,
    FinishReason,
    Ledger,
    Logprobs,
    OutputFinished,
    PromptLogprobs,
    Usage,
    finished_from_proto,
    ledger_from_proto,
    logprobs_from_proto,
    prompt_logprobs_from_proto,
    text_of,
    usage_from_proto,
)
from headrace.v1 import generation_pb2, inference_pb2

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Output:
    """One of the n outputs, whole.

    `reasoning` is what the model wrote for itself, `tool_calls` are the functions that it called.
    """

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: int | str | None = None
    logprobs: Logprobs | None = None
    # What it was chosen by: the mean log probability of its tokens (`best_of`), or the score of a
    # search (`beam_search`); None where outputs are not chosen.
    score: float | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """This output as the assistant's message of a conversation that goes on."""
        return Message("assistant", self.text, self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    The properties speak of the first output, which is the only one unless n was asked for.
    """

    request_id: str
    model_revision: str
    outputs: tuple[Output, ...]
    usage: Usage
    ledger: Ledger
    # Of the whole prompt from its second token on, if asked for.
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Functions that the first output called."""
        return self.outputs[0].tool_calls

    @property
    def message(self) -> Message:
        """The first output as a message of a conversation that goes on."""
        return self.outputs[0].message

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> Logprobs | None:
        """Log probabilities of the first output, if asked for."""
        return self.outputs[0].logprobs


@dataclass(slots=True)
class OutputTranscript:
    """What has been yielded of one output so far."""

    first_token_index: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    content: CollectedContent = field(default_factory=CollectedContent)
    # Length of all contents, as Delta.num_units counts it.
    num_units: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    finished: OutputFinished | None = None
    # Position and length of the contents where last no character can have been left open; None
    # before the first such place.
    sure_token_index: int | None = None
    sure_num_units: int = 0

    def add(self, delta: Delta) -> None:
        """Appends new tokens."""
        if self.first_token_index is None:
            self.first_token_index = self.sure_token_index = delta.first_token_index
        self.token_ids += delta.token_ids
        self.text.append(delta.text)
        self.content.add(delta.content)
        self.num_units += delta.num_units
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        self._note_sure_place(delta)

    def _note_sure_place(self, delta: Delta) -> None:
        """Notes the last place of which the text is certain.

        After a replacement character nobody can tell from the text whether the bytes behind it
        might have become a character yet.
        """
        was_sure = self.sure_num_units == self.num_units - delta.num_units
        if delta.text[-1:] != _REPLACEMENT if delta.text else was_sure or bool(delta.content):
            self.sure_token_index, self.sure_num_units = self.next_token_index, self.num_units

    @property
    def next_token_index(self) -> int:
        """Position in the output of the token that follows."""
        return (self.first_token_index or 0) + len(self.token_ids)


class Transcript:
    """What a stream has yielded so far, by output."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.outputs: defaultdict[int, OutputTranscript] = defaultdict(OutputTranscript)
        self.done: Done | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []

    def add(self, event: Event) -> None:
        """Takes the next event."""
        if isinstance(event, Delta):
            self.outputs[event.output_index].add(event)
        elif isinstance(event, OutputFinished):
            self.outputs[event.output_index].finished = event
        elif isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs.append(event)
        elif isinstance(event, Done):
            self.done = event

    @property
    def request_id(self) -> str | None:
        """The request's name, once it is accepted."""
        return self.accepted.request_id if self.accepted else None

    def completion(self) -> Completion:
        """The whole answer, once done.

        Raises:
            HeadraceError: An output ended with an error; an incomplete answer is never returned as
                if it were whole.
        """
        if self.accepted is None or self.done is None or not self.outputs:
            raise Internal("the stream ended before the generation did", request_id=self.request_id)
        outputs = tuple(_output(index, self.outputs[index], self.request_id) for index in sorted(self.outputs))
        return Completion(
            self.accepted.request_id,
            self.accepted.model_revision,
            outputs,
            self.done.usage,
            self.done.ledger,
            PromptLogprobs.joined(self.prompt_logprobs),
        )


def completion_from_proto(response: inference_pb2.CompleteResponse) -> Completion:
    """The answer of a Complete call.

    Raises:
        HeadraceError: An output ended with an error.
    """
    outputs = tuple(_output_from_proto(output, response.request_id) for output in response.outputs)
    if not outputs:
        raise Internal("the answer holds no output", request_id=response.request_id)
    return Completion(
        response.request_id,
        response.model_revision,
        outputs,
        usage_from_proto(response.usage),
        ledger_from_proto(response.ledger),
        PromptLogprobs.joined([prompt_logprobs_from_proto(part) for part in response.prompt_logprobs]),
    )


def _output(index: int, transcript: OutputTranscript, request_id: str | None) -> Output:
    finished = _checked(transcript.finished, request_id)
    return Output(
        index,
        "".join(transcript.text),
        tuple(transcript.token_ids),
        finished.reason,
        finished.matched_stop,
        Logprobs.joined(transcript.logprobs) if transcript.logprobs else None,
        finished.score,
        "".join(transcript.content.reasoning),
        transcript.content.tool_calls(),
    )


def _output_from_proto(output: inference_pb2.Output, request_id: str) -> Output:
    finished = _checked(finished_from_proto(output.finished), request_id)
    return Output(
        output.output_index,
        text_of(output.content),
        tuple(output.token_ids),
        finished.reason,
        finished.matched_stop,
        logprobs_from_proto(output.logprobs) if _has_logprobs(output.logprobs) else None,
        finished.score,
    )


def _has_logprobs(logprobs: generation_pb2.Logprobs) -> bool:
    return len(logprobs.sampled) > 0


def _checked(finished: OutputFinished | None, request_id: str | None) -> OutputFinished:
    """The end of an output that may be shown as an answer."""
    if finished is None:
        raise Internal("the generation is done, but an output never finished", request_id=request_id)
    if finished.reason is FinishReason.ERROR:
        raise finished.error or Internal("the engine could not go on with this output", request_id=request_id)
    return finished
