"""`headrace bench` against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.support.running_server import RunningServer


def bench(server: RunningServer, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace_supervisor", "bench", "--server", server.address, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_closed_loop_measures_every_level(server: RunningServer) -> None:
    result = bench(server, "--concurrency", "1,3", "--requests", "4", "--prompt-tokens", "40", "--output-tokens", "6")
    assert [point["concurrency"] for point in result["points"]] == [1, 3]
    for point in result["points"]:
        assert (point["completed"], point["failed"], point["cached_tokens"]) == (4, 0, 0)
        assert point["output_tok_s"] * point["wall_s"] == pytest.approx(24)
        latencies = point["percentiles_ms"]
        assert 0 < latencies["itl"]["p50"] <= latencies["e2e"]["p50"] <= latencies["e2e"]["p99"]


def test_an_open_loop_sends_at_its_rate(server: RunningServer) -> None:
    result = bench(server, "--rate", "8", "--seconds", "2", "--output-tokens", "3", "--output-spread", "0.5")
    (point,) = result["points"]
    assert point["failed"] == 0 and 4 <= point["completed"] <= 32
    assert point["wall_s"] >= 1.0
