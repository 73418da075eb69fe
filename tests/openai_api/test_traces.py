"""What calls of OpenAI's HTTP API report to telemetry, beside what gRPC's do."""

from __future__ import annotations

import pathlib

from tests.openai_api.harness import CHAT, HELLO, running_door
from tests.service.tracing.conftest import SAMPLED, TRACE_ID
from tests.service.tracing.fake_telemetry import FakeTelemetry

from headrace_facts import facts


async def test_a_call_and_its_generation_join_the_callers_trace(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    telemetry = FakeTelemetry(sockets / "telemetry.sock")
    await telemetry.start()
    async with running_door(model_path, sockets, telemetry_socket=str(telemetry.path)) as running:
        tracer = running.door.core.tracer
        assert tracer is not None
        await running.until(lambda: tracer.connected)
        for stream in (True, False):
            response = await running.post(CHAT, {"messages": HELLO, "stream": stream}, **dict(SAMPLED))
            assert response.headers["x-trace-id"] == TRACE_ID
        refused = await running.post(CHAT, {"messages": HELLO, "n": 0})
        assert refused.status_code == 400
        calls = await telemetry.until(facts.CallEnded, 3)
        generations = await telemetry.until(facts.Generation, 2)
        assert tracer.open_calls == 0
    await telemetry.stop()
    assert {(call.method, call.system) for call in calls} == {("openai.v1/CreateChatCompletion", "http")}
    assert [call.status for call in calls] == ["OK", "OK", "INVALID_ARGUMENT"]
    for call, generation, streamed in zip(calls, generations, (True, False), strict=False):
        assert call.span is not None and generation.span is not None
        assert (call.span.trace_id, generation.span.trace_id) == (TRACE_ID, TRACE_ID)
        assert generation.span.parent_span_id == call.span.span_id
        assert call.request_id == generation.request_id != ""
        assert (generation.wire, generation.operation, generation.streamed) == ("openai", "chat", streamed)
        assert (generation.first_chunk_ns > 0) is streamed
