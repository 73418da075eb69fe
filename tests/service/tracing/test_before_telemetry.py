"""A service before its telemetry process has been reached for the first time.

What it tells then is as good as later.
"""

from __future__ import annotations

import pathlib

from headrace_facts.facts import Detail
from headrace_service.tracing.tracer import Tracer


def detail_of(tracer: Tracer, asked: int) -> Detail:
    traced = tracer.generation("demo", "r", "chat", {}, 1, 3, asked, None, None)
    return traced.detail


async def test_a_generation_has_the_detail_that_telemetry_is_configured_with(tmp_path: pathlib.Path) -> None:
    tracer = Tracer(str(tmp_path / "nobody.sock"), "service-0")
    assert not tracer.connected
    # The telemetry process puts its own in the place of DEFAULT.
    assert detail_of(tracer, 0) is Detail.DEFAULT
    assert detail_of(tracer, int(Detail.OFF)) is Detail.OFF
