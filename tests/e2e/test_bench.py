"""`headrace bench` against a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.support.running_server import RunningServer


def command(server: RunningServer, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace_supervisor", "bench", "--server", server.address, "--json", *arguments]


def bench(server: RunningServer, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(command(server, *arguments), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow  # An interrupted bench keeps its levels, below.
def test_a_closed_loop_measures_every_level(server: RunningServer) -> None:
    result = bench(server, "--concurrency", "1,3", "--requests", "4", "--prompt-tokens", "40", "--output-tokens", "6")
    assert [point["concurrency"] for point in result["points"]] == [1, 3]
    for point in result["points"]:
        assert (point["completed"], point["failed"], point["cached_tokens"]) == (4, 0, 0)
        assert point["output_tok_s"] * point["wall_s"] == pytest.approx(24)
        latencies = point["percentiles_ms"]
        assert 0 < latencies["itl"]["p50"] <= latencies["e2e"]["p50"] <= latencies["e2e"]["p99"]


# An open loop is in the interrupted run below, its rate in tests/supervisor/test_bench.
@pytest.mark.slow
def test_an_open_loop_sends_at_its_rate(server: RunningServer) -> None:
    result = bench(server, "--rate", "8", "--seconds", "2", "--output-tokens", "3", "--output-spread", "0.5")
    (point,) = result["points"]
    assert point["failed"] == 0 and 4 <= point["completed"] <= 32
    assert point["wall_s"] >= 1.0


def test_an_interruption_keeps_the_levels_that_are_measured(server: RunningServer) -> None:
    """The second level takes hours."""
    arguments = ("--rate", "20,0.0001,5", "--requests", "3", "--warm-up", "0", "--output-tokens", "3")
    pipe = subprocess.PIPE
    with subprocess.Popen(command(server, *arguments), stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        done = next(line for line in running.stderr if line.startswith("headrace: 20/s: 3 requests, "))
        assert " tok/s, TTFT " in done
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=600)
    assert running.returncode == 130
    assert err.splitlines()[-1] == "headrace: interrupted; not measured: 0.0001/s, 5/s"
    assert "Traceback" not in err
    result = json.loads(out)
    assert [point["completed"] for point in result["points"]] == [3]
    assert result["missing"] == ["0.0001/s", "5/s"]
