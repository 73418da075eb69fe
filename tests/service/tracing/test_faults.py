"""A telemetry process that is absent, hangs or dies changes nothing for callers.

And nothing of OpenTelemetry is loaded here.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from tests.service.harness import ANSWER, events_of, running_service, text_of
from tests.service.tracing.conftest import SAMPLED, TracedService
from tests.service.tracing.fake_telemetry import FakeTelemetry

from headrace.v1 import generation_pb2, inference_pb2
from headrace_facts import facts

REQUEST = inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="hello"))


@pytest.mark.parametrize("hung", [False, True], ids=["absent", "hung"])
async def test_nobody_who_listens_changes_nothing(model_path: pathlib.Path, sockets: pathlib.Path, hung: bool) -> None:
    telemetry = FakeTelemetry(sockets / "telemetry.sock", hung=True)
    if hung:
        await telemetry.start()
    async with running_service(model_path, sockets, telemetry_socket=str(telemetry.path)) as running:
        tracer = running.service.core.tracer
        assert tracer is not None
        if hung:
            await running.until(lambda: tracer.connected)
        feed = tracer._feed
        feed._max_buffered_bytes = 4096
        for _ in range(30):
            assert text_of(await events_of(running.stub.Generate(REQUEST, metadata=SAMPLED))) == ANSWER
        if not hung:
            assert feed.num_dropped_facts > 0 and feed._num_bytes <= 4096
    if hung:
        await telemetry.stop()


async def test_a_telemetry_process_that_dies_between_is_reported_the_rest(traced: TracedService) -> None:
    await events_of(traced.stub.Generate(REQUEST, metadata=SAMPLED))
    await traced.telemetry.until(facts.Generation)
    await traced.telemetry.stop()
    tracer = traced.running.service.core.tracer
    await traced.running.until(lambda: not tracer.connected)  # type: ignore[union-attr]
    await events_of(traced.stub.Generate(REQUEST, metadata=SAMPLED))
    second = traced.telemetry = FakeTelemetry(traced.telemetry.path)
    await second.start()
    (generation,) = await second.until(facts.Generation)
    assert isinstance(second.reported[0], facts.Hello) and generation.span is not None


def test_nothing_of_the_service_imports_opentelemetry() -> None:
    code = """
import pkgutil, importlib, sys
import headrace_service, headrace_facts
for package in (headrace_service, headrace_facts):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
forbidden = ("opentelemetry", "prometheus_client", "headrace_telemetry")
print([name for name in sys.modules if name.split(".")[0] in forbidden])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
