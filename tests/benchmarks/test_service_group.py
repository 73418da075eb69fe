"""A service group is measured on hosts that share nothing, where the machine has the cores."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from benchmarks import bench_service_group, figures
from benchmarks.bench_service_group import Host


@pytest.mark.parametrize("threads_of_a_core", [1, 2])
def test_each_host_has_cores_of_its_own(threads_of_a_core: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Linux numbers them: the second threads of all cores behind the first ones.
    num_cores = 16 // threads_of_a_core
    monkeypatch.setattr(bench_service_group, "_siblings", lambda core: core % num_cores)
    hosts = Host.deal(range(16), 4)
    dealt = [core for host in hosts for cores in host for core in cores]
    assert sorted(dealt) == list(range(16))
    hardware = [{core % num_cores for cores in host for core in cores} for host in hosts]
    assert sum(map(len, hardware)) == num_cores, "no core of the processor is in two hosts"
    # A service never shares its core with an engine.
    for host in hosts:
        assert {core % num_cores for core in host.service}.isdisjoint(core % num_cores for core in host.engine)


def test_too_few_cores_are_shared_and_the_result_says_so() -> None:
    hosts = Host.deal(range(2), 3)
    assert hosts == [Host(*[frozenset({0, 1})] * 3)] * 3


# What is dealt out and how it is started is covered above and by `bench_front`'s own parts. On a
# busy machine clients may not get to read within a second, so it is tried with a longer window.
@pytest.mark.slow
def test_each_service_and_all_are_measured_in_turns(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "group.json"
    for seconds in (1, 5, 25):
        command = [sys.executable, "-m", "benchmarks.bench_service_group", "--json", str(path)]
        command += ["--services", "2", "--turns", "1", "--seconds", str(seconds), "--streams", "8"]
        subprocess.run(command, cwd=figures.ROOT, env=figures.environment(), check=True, timeout=300)
        [turn] = json.loads(path.read_text())["turns"]
        if min(turn["together"]["messages_per_s_of_each"]) > 0:
            break
    assert min(turn["together"]["messages_per_s_of_each"]) > 0
    assert [one["services"] for one in (*turn["alone"], turn["together"])] == [[0], [1], [0, 1]]
    rates = [one["messages_per_s"] for one in turn["alone"]]
    assert turn["times_best"] == round(turn["together"]["messages_per_s"] / max(rates), 3)
