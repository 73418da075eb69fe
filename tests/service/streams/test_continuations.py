"""A stream whose engine is lost, at any moment, and that another engine goes on with.

What was emitted and what follows are the whole answer, and the ledger's parts are the whole time.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.api import event_wire
from headrace_service.engines.step_dealing import deal
from headrace_service.streams import generation_stream, ledger
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.ledger import DeliveryClock
from headrace_service.streams.render_state import RenderState
from headrace_service.text.detokenizer import PieceTable

# Words, and byte tokens that are characters only together, or not at all.
TABLE = PieceTable([b" word", b"A", b"\xc3", b"\xb6", b"\xff"], (), False, 5, fallback_ids={1, 2, 3, 4})
PROMPT = 12
FAILURE = errors.unavailable("lost")


@dataclasses.dataclass
class Answer:
    """What any engine computes for the request."""

    outputs: list[list[int]]
    with_logprobs: bool
    with_prompt: bool


def u32(values: list[int]) -> bytes:
    return np.array(values, "<u4").tobytes()


def columns(ids: list[int]) -> engine_pb2.LogprobColumns:
    """One entry beside each token."""
    values = (-np.array(ids, "<f4")).tobytes()
    counts = np.ones(len(ids), "<u2").tobytes()
    return engine_pb2.LogprobColumns(
        sampled=values, ranks=u32(ids), top_counts=counts, top_token_ids=u32(ids), top_logprobs=values
    )


class Engine:
    """One life of an engine; `num_before` tokens of each output came from lives before."""

    def __init__(self, answer: Answer, emitted: list[engine_pb2.EmittedTokens], part: int) -> None:
        self.answer = answer
        self.released = [len(one.token_ids) // 4 for one in emitted] or [0] * len(answer.outputs)
        self.ended = [one.HasField("end") for one in emitted] or [False] * len(answer.outputs)
        for one, tokens in zip(emitted, answer.outputs, strict=False):
            assert one.token_ids == u32(tokens)[: len(one.token_ids)]
        self.prompt = answer.with_prompt and not emitted
        self.part = part
        self.has_started = False

    def step(self) -> engine_pb2.StepOutputs:
        """One token of each output that has not ended."""
        step, handles, indices, tokens = engine_pb2.StepOutputs(), [], [], []
        if not self.has_started:
            self.has_started = True
            step.events.add(handle=1, started=engine_pb2.RequestStarted(cached_tokens=3))
            for first in range(1, PROMPT, self.part) if self.prompt else ():
                ids = list(range(first, min(first + self.part, PROMPT)))
                part = engine_pb2.PromptLogprobColumns(first_token_index=first, columns=columns(ids))
                step.events.add(handle=1, prompt_logprobs=part)
            return step
        for index, ids in enumerate(self.answer.outputs):
            if self.ended[index]:
                continue
            handles.append(1)
            indices.append(index)
            tokens.append(ids[self.released[index]])
            self.released[index] += 1
            if self.released[index] == len(ids):
                self.ended[index] = True
                end = engine_pb2.OutputEnd(output_index=index, reason=engine_pb2.OUTPUT_END_REASON_LENGTH)
                step.events.add(handle=1, output_end=end)
        step.handles, step.tokens = u32(handles), u32(tokens)
        step.output_indices = np.array(indices, "<u2").tobytes()
        if self.answer.with_logprobs:
            step.logprob_rows = u32(list(range(len(tokens))))
            step.logprobs.CopyFrom(columns(tokens))
        return step


@dataclasses.dataclass
class Read:
    """What a reader got."""

    deltas: dict[int, tuple[list[int], str, list[float]]] = dataclasses.field(default_factory=dict)
    prompt: list[int] = dataclasses.field(default_factory=list)
    kinds: list[str] = dataclasses.field(default_factory=list)

    def take(self, messages: list[bytes]) -> None:
        for message in messages:
            event = inference_pb2.GenerateResponse.FromString(message).event
            self.kinds.append(str(event.WhichOneof("event")))
            if event.HasField("delta"):
                delta = event.delta
                ids, text, logprobs = self.deltas.get(delta.output_index, ([], "", []))
                assert delta.first_token_index == len(ids)
                more = list(delta.logprobs.sampled)
                text += "".join(piece.text for piece in delta.content)
                self.deltas[delta.output_index] = ([*ids, *delta.token_ids], text, logprobs + more)
            elif event.HasField("prompt_logprobs"):
                first = event.prompt_logprobs.first_token_index
                self.prompt += range(first, first + len(event.prompt_logprobs.logprobs.sampled))


def read(answer: Answer, losses: list[int], takes: list[bool], part: int) -> tuple[Read, Any]:
    """Reads an answer whose engine is lost after so many steps, each time anew."""
    clock = iter(range(1_000, 10_000_000, 10))
    now_ns = 0

    def tick() -> int:
        nonlocal now_ns
        now_ns = next(clock)
        return now_ns

    with mock.patch.object(generation_stream.time, "monotonic_ns", tick):
        render = RenderState(skip_special=True, with_logprobs=answer.with_logprobs)
        stream = GenerationStream(1, "r", TABLE, render, DeliveryClock(500, subscribed=False), event_wire)
        stream.rescue = lambda failure: True
        got, engine, left, reads = Read(), Engine(answer, [], part), list(losses), iter(takes * 200)
        began_ns, num_steps = tick(), 0
        while not all(engine.ended):
            if left and num_steps == left[0]:
                left.pop(0)
                num_steps = 0
                stream.engine_lost(FAILURE)
                assert stream.failure is None
                engine = Engine(answer, stream.emitted(len(answer.outputs)), part + len(left) + 1)
                began_ns = tick()
            deal(engine.step(), {1: stream})
            num_steps += 1
            if next(reads):
                got.take(stream.take())
        queued_ns, spent_ns = began_ns - 500 + 5, tick() - began_ns - 5
        done = engine_pb2.RequestDone(
            queued_ns=queued_ns, prefill_ns=spent_ns // 3, decode_ns=spent_ns - spent_ns // 3, ttft_ns=queued_ns + 7
        )
        stream.note(engine_pb2.RequestEvent(handle=1, done=done))
        got.take(stream.take())
        whole = ledger.close(stream.done, stream.clock, now_ns) if stream.done is not None else None
        return got, (whole, queued_ns + spent_ns, done.ttft_ns)


tokens = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@given(
    st.lists(tokens, min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 8), max_size=3),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_what_was_emitted_and_what_follows_are_the_whole_answer(
    outputs: list[list[int]], logprobs: bool, prompt: bool, losses: list[int], takes: list[bool], part: int
) -> None:
    answer = Answer(outputs, logprobs, prompt)
    whole, _ = read(answer, [], [True], 3)
    got, (account, total_ns, _) = read(answer, losses, takes, part)
    assert got.deltas == whole.deltas
    assert [ids for ids, _, _ in got.deltas.values()] != [] and got.prompt == whole.prompt
    assert got.kinds.count("started") == 1 and got.kinds.count("output_finished") == len(outputs)
    assert got.kinds.count("resumed") <= len(losses)
    parts = [account.queued_ns, account.prefill_ns, account.decode_ns, account.preempted_ns, account.engine_restart_ns]
    assert all(part_ns >= 0 for part_ns in parts) and sum(parts) == total_ns


def test_a_reader_learns_of_the_pause_and_the_ledger_has_it_as_restart() -> None:
    got, (account, _, last_ttft_ns) = read(Answer([[1] * 6], False, False), [3], [True], 1)
    assert got.kinds.count("resumed") == 1 and account.engine_restart_ns > 0
    # The first token came from the engine that was lost.
    assert account.ttft_ns < last_ttft_ns or account.ttft_ns < account.end_to_end_ns
    _, (unbroken, _, _) = read(Answer([[1] * 6], False, False), [], [True], 1)
    assert unbroken.engine_restart_ns == 0


def test_an_engine_that_is_lost_before_it_began_leaves_no_pause() -> None:
    got, (account, _, _) = read(Answer([[1] * 6], False, False), [0], [True], 1)
    assert "resumed" not in got.kinds and account.engine_restart_ns == 0
