"""A start's stretches add up to the whole, whichever rank was the slowest; medians are of each."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from benchmarks import figures
from benchmarks.bench_start_up import Start, medians, table


def start(seconds: float, ready_s: float = 20.0) -> Start:
    """Two ranks, of which the second takes a second longer for its weights."""
    phases = {"process": [0.5, 0.5], "weights": [seconds, seconds + 1], "other": [0.25, 0.25]}
    return Start(1.0, 2.0, phases, ready_s, ready_s + 0.5, {"serve": 1.0, "worker 0": seconds})


def test_the_stretches_with_the_slowest_rank_s_phases_are_the_whole_start() -> None:
    rows = start(4.0).rows()
    whole, token = rows.pop("in all"), rows.pop("with one token")
    assert sum(max(seconds) for seconds in rows.values()) == pytest.approx(whole[0])
    assert rows["ready line"] == [pytest.approx(20 - 3 - 5.75)] and token == [20.5]


def test_medians_are_of_each_phase_and_rank() -> None:
    found = medians([start(4.0, 21.0), start(9.0, 20.0), start(5.0, 22.0)])
    assert found.phases_s["weights"] == [5.0, 6.0] and found.ready_s == 21.0
    assert found.cpu_s == {"serve": 1.0, "worker 0": 5.0}
    lines = list(table(found))
    assert lines[0].split() == ["seconds", "rank", "0", "rank", "1"]
    assert "weights              5.000     6.000" in lines
    assert lines[-1] == "processor time: serve 1.00, worker 0 5.00"


# Two starts of a whole server.
@pytest.mark.slow
def test_a_server_s_start_is_reported_by_phase_and_process(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "start.json"
    command = [sys.executable, "-m", "benchmarks.bench_start_up", "--device", "cpu", "--runs", "2", "--json", str(path)]
    done = subprocess.run(
        command, cwd=figures.ROOT, env=figures.environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(path.read_text())
    assert len(result["runs"]) == 2 and not result["incomplete"]
    assert set(result["median"]["cpu_s"]) == {"serve", "backend", "service", "worker 0"}
    assert result["median"]["phases_s"].keys() >= {"process", "imports", "device", "weights", "warm_up", "other"}
    # What nothing accounts for is the way from the last rank to the line on the terminal.
    assert min(Start(**result["median"]).rows()["ready line"]) >= -0.1


def test_a_model_that_cannot_be_served_is_no_measurement(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "start.json"
    command = [sys.executable, "-m", "benchmarks.bench_start_up", "--model", str(tmp_path), "--json", str(path)]
    done = subprocess.run(
        command, cwd=figures.ROOT, env=figures.environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1 and "NOT MEASURED" in done.stderr and "config.json" in done.stderr
    assert json.loads(path.read_text())["runs"] == []
