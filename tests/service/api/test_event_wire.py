"""Deltas as bytes: what is joined from kept parts is what protobuf writes."""

from __future__ import annotations

import psutil
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.api import event_wire
from headrace_service.streams.wires import TokenLogprobs

_UINT32 = st.integers(0, (1 << 32) - 1)


def _by_protobuf(output_index: int, first_token_index: int, token_ids: list[int], text: str) -> bytes:
    content = [generation_pb2.Content(text=text)] if text else []
    delta = generation_pb2.Delta(
        output_index=output_index, first_token_index=first_token_index, token_ids=token_ids, content=content
    )
    return inference_pb2.GenerateResponse(event=generation_pb2.GenerationEvent(delta=delta)).SerializeToString()


@given(_UINT32, _UINT32, st.lists(_UINT32, min_size=1, max_size=3), st.text())
@example(0, 0, [0], "")
@example(15, 1 << 20, [151_645], "x" * 127)
@example(0, 127, [127], "x" * 20_000)
def test_a_delta_is_the_bytes_that_protobuf_writes(
    output_index: int, first_token_index: int, token_ids: list[int], text: str
) -> None:
    encoded = event_wire.delta(output_index, first_token_index, token_ids, text, None)
    assert encoded == _by_protobuf(output_index, first_token_index, token_ids, text)


def test_one_answer_serves_generate_chat_and_subscribe() -> None:
    encoded = event_wire.delta(1, 2, [3], "four", None)
    generated = inference_pb2.GenerateResponse.FromString(encoded).event
    assert generated.delta.token_ids == [3]
    assert inference_pb2.ChatResponse.FromString(encoded).event == generated
    assert inference_pb2.SubscribeResponse.FromString(encoded).event == generated


def test_deltas_leave_no_memory_behind() -> None:
    """A message that is filled again and again keeps all that it ever held.

    20,000 answers kept 30 MiB.
    """
    logprobs = [TokenLogprobs(-0.5, 1, list(range(20)), [-1.0] * 20)] * 8
    process = psutil.Process()

    def grown_mib(deltas: int) -> float:
        before = process.memory_info().rss
        for first in range(deltas):
            event_wire.delta(0, first, range(8), "some text", logprobs)
        return (process.memory_info().rss - before) / 2**20

    grown_mib(1_000)

    assert grown_mib(20_000) < 8
