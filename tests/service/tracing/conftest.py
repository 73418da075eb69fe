"""Fixtures: a service with a fake telemetry process, and one whose calls nobody records."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from tests.kserve.conformance_models import all_models
from tests.service.harness import Running, running_service
from tests.service.tracing.fake_telemetry import FakeTelemetry

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"), ("tracestate", "vendor=value"))
UNSAMPLED = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00"),)


@dataclasses.dataclass
class TracedService:
    """A service and what it tells."""

    running: Running
    telemetry: FakeTelemetry

    @property
    def stub(self) -> Any:
        return self.running.stub

    @property
    def engine(self) -> Any:
        return self.running.engine


@pytest_asyncio.fixture
async def traced(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[TracedService]:
    telemetry = FakeTelemetry(sockets / "telemetry.sock")
    await telemetry.start()
    async with running_service(
        model_path, sockets, telemetry_socket=str(telemetry.path), conformance_models=all_models.__name__
    ) as running:
        tracer = running.service.core.tracer
        assert tracer is not None
        await running.until(lambda: tracer.connected)
        yield TracedService(running, telemetry)
    await telemetry.stop()
