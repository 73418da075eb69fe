"""Counters of one process, and their sum over all."""

from __future__ import annotations

import multiprocessing
import pathlib
import shutil
import subprocess
import sys

import pytest
from tests.support.running_server import ROOT, environment

from headrace_service.kserve.statistics import MAX_RESPONSES, Durations, ResponseTimes, Statistics


def test_a_success_counts_everywhere_once(tmp_path: pathlib.Path) -> None:
    statistics = Statistics(tmp_path, "service-0")
    statistics.of("m").succeeded(Durations(100, 10, 20, 30, 40), batch_size=3)
    report = statistics.report("m", decoupled=False)
    assert (report.inference_count, report.execution_count) == (3, 1)
    stats = report.inference_stats
    durations = {
        name: getattr(stats, name).ns
        for name in ("success", "queue", "compute_input", "compute_infer", "compute_output")
    }
    assert durations == {"success": 100, "queue": 10, "compute_input": 20, "compute_infer": 30, "compute_output": 40}
    assert all(getattr(stats, name).count == 1 for name in durations)
    assert stats.fail.count == stats.cache_hit.count == stats.cache_miss.count == 0
    (batch,) = report.batch_stats
    assert (batch.batch_size, batch.compute_infer.count, batch.compute_infer.ns) == (3, 1, 30)
    assert report.last_inference > 1_600_000_000_000


def test_a_failure_is_no_inference(tmp_path: pathlib.Path) -> None:
    statistics = Statistics(tmp_path, "service-0")
    statistics.of("m").failed(7)
    report = statistics.report("m", decoupled=False)
    assert (report.inference_stats.fail.count, report.inference_stats.fail.ns, report.inference_count) == (1, 7, 0)


def test_responses_count_by_their_index(tmp_path: pathlib.Path) -> None:
    statistics = Statistics(tmp_path, "service-0")
    for _ in range(2):
        statistics.of("m").responded(ResponseTimes(100, [110, 125, 140], [115, 130, 141], empty=2))
    statistics.of("m").response_failed(1, 9, cancelled=False)
    statistics.of("m").response_failed(3, 9, cancelled=True)
    stats = statistics.report("m", decoupled=True).response_stats
    assert {index: (entry.success.count, entry.fail.count, entry.empty_response.count, entry.cancel.count) for index,
        entry in stats.items()} == {
        "0": (2, 0, 0, 0),
        "1": (2, 1, 0, 0),
        "2": (0, 0, 2, 0),
        "3": (0, 0, 0, 1),
    }  # fmt: skip
    assert (stats["1"].compute_infer.ns, stats["1"].compute_output.ns, stats["1"].success.ns) == (20, 10, 30)
    assert stats["2"].empty_response.ns == 22
    assert not statistics.report("m", decoupled=False).response_stats


def test_endless_responses_keep_to_their_room(tmp_path: pathlib.Path) -> None:
    statistics = Statistics(tmp_path, "service-0")
    moments = list(range(MAX_RESPONSES + 10))
    statistics.of("m").responded(ResponseTimes(0, moments, moments))
    statistics.of("m").response_failed(MAX_RESPONSES + 10, 1, cancelled=False)
    assert len(statistics.report("m", decoupled=True).response_stats) == MAX_RESPONSES


def _count(folder: pathlib.Path, name: str) -> None:
    counters = Statistics(folder, name).of("m")
    for _ in range(50):
        counters.succeeded(Durations(2, 0, 0, 1, 0))


def test_all_processes_of_a_server_are_one_ledger(tmp_path: pathlib.Path) -> None:
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_count, args=(tmp_path, f"service-{index}")) for index in (1, 2)]
    for process in others:
        process.start()
    mine = Statistics(tmp_path, "service-0")
    mine.of("m").succeeded(Durations(2, 0, 0, 1, 0))
    mine.of("other").succeeded(Durations(2, 0, 0, 1, 0))
    for process in others:
        process.join(120)
        assert process.exitcode == 0
    report = mine.report("m", decoupled=False)
    assert (report.inference_stats.success.count, report.inference_stats.success.ns) == (101, 202)
    assert Statistics(tmp_path, "service-3").report("other", decoupled=False).inference_count == 1


def test_a_process_that_is_started_again_goes_on_counting(tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        Statistics(tmp_path, "service-0").of("m").succeeded(Durations())
    assert Statistics(tmp_path, "service-0").report("m", decoupled=False).inference_count == 2


def test_a_foreign_file_is_begun_anew(tmp_path: pathlib.Path) -> None:
    (tmp_path / "service-0.kserve-statistics").write_bytes(b"something else")
    (tmp_path / "service-1.kserve-statistics").write_bytes(b"")
    statistics = Statistics(tmp_path, "service-0")
    statistics.of("m").succeeded(Durations())
    assert statistics.report("m", decoupled=False).inference_count == 1


@pytest.mark.parametrize("folder", [None])
def test_a_service_alone_counts_for_itself(folder: None) -> None:
    statistics = Statistics(folder, "service")
    statistics.of("m").succeeded(Durations())
    assert statistics.report("m", decoupled=False).inference_count == 1
    assert statistics.report("never", decoupled=False).inference_count == 0


def test_more_models_than_there_is_room_for_are_served_uncounted(tmp_path: pathlib.Path) -> None:
    statistics = Statistics(tmp_path, "service")
    for index in range(130):
        statistics.of(f"m{index}").succeeded(Durations())
    counts = [statistics.report(f"m{index}", decoupled=False).inference_count for index in range(130)]
    assert counts == [1] * 128 + [0, 0]


def test_a_folder_that_takes_no_file_costs_counts_and_no_process(tmp_path: pathlib.Path) -> None:
    statistics = Statistics(tmp_path / "gone", "service")
    statistics.of("m").succeeded(Durations())
    assert statistics.report("m", decoupled=False).inference_count == 1


# Room for nothing, for the names alone, and for the names and one model.
_ON_FULL_DISKS = """
for pages in 2 12 40; do mount -t tmpfs -o size=$((4 * pages))k tmpfs "$1" &&
  "$2" -m tests.kserve.test_statistics "$1" && umount "$1" || exit 1; done
"""


@pytest.mark.slow  # test_full_folder.py has it of one process.
def test_a_full_disk_costs_counts_and_no_process(tmp_path: pathlib.Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace of its own, for a small tmpfs")
    command = [*namespace, "sh", "-c", _ON_FULL_DISKS, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("counted")] == [
        "counted [1, 1] [0, 0]",
        "counted [0, 0] [0, 0]",
        "counted [1, 0] [1, 0]",
    ]


def _count_where_there_is_no_room(folder: pathlib.Path) -> None:
    """Counts two models, and prints both processes' figures of each."""
    statistics = Statistics(folder, "service-0")
    for name in ("m", "n"):
        statistics.of(name).succeeded(Durations())
    counted = []
    for one in (statistics, Statistics(folder, "service-1")):
        counted.append([one.report(name, decoupled=False).inference_count for name in ("m", "n")])
    print("counted", *counted)


if __name__ == "__main__":
    _count_where_there_is_no_room(pathlib.Path(sys.argv[1]))
