"""What a start looks like: lines for logs, bars for terminals, and seconds per phase in both."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import msgspec
import pytest
import structlog
from tests.backend.fake_worker import gpu_plan

from headrace_backend.server.logs import configure_logs, format_bytes, get_logger
from headrace_backend.server.workers import start_report
from headrace_backend.server.workers.start_report import StartReport
from headrace_backend.step.messages import LoadProgress, MemoryPlan

PLAN = gpu_plan(0, 40960, 16, is_measured=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Takes the place of stderr; within the test, since pytest has its own there until then."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    return stderr


def lines_of(stderr: Terminal) -> list[dict[str, object]]:
    return [json.loads(line) for line in stderr.getvalue().splitlines()]


def test_a_gpu_plan_is_one_line_with_all_of_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    configure_logs("json", "info")
    report = StartReport(0, shows_bars=False)
    report.on_memory_plan(PLAN)
    report.on_memory_plan(msgspec.structs.replace(PLAN, is_measured=True))
    first, second = lines_of(stderr)
    assert (first["event"], second["event"]) == ("memory plan", "memory plan, measured")
    assert (first["device"], first["device_memory"]) == ("cuda:0", "80.0 GiB")
    assert (first["weight"], first["kv_cache"], first["kv_tokens"]) == ("15.0 GiB", "60.0 GiB", 40960 * 16)
    sizes = [value for name, value in msgspec.structs.asdict(PLAN).items() if name.endswith("_bytes")]
    assert len(sizes) == 14 and all(sizes), "a GPU's plan has a value in every field"
    assert sorted(map(format_bytes, sizes)) == sorted(text for text in first.values() if str(text).endswith("iB"))


def test_a_cpu_plan_leaves_out_what_a_cpu_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    configure_logs("json", "info")
    StartReport(0, shows_bars=False).on_memory_plan(
        MemoryPlan("cpu", 1 << 30, 1 << 20, 1 << 16, 0, 1 << 20, 4096, 256, 16)
    )
    [line] = lines_of(stderr)
    assert line["device"] == "cpu" and not line.keys() & {"graph", "other", "device_memory", "reserve", "pinned_host"}


class Clock:
    """Stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(start_report.time, "monotonic", lambda: self.now)


def test_there_is_a_line_every_few_seconds_and_none_for_what_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, clock = terminal(monkeypatch), Clock(monkeypatch)
    configure_logs("json", "info")
    report = StartReport(0, shows_bars=False)
    for done in range(11):
        report.on_progress(LoadProgress("weights", 2048 * done, 20480, "MiB"))
        clock.now += 1.0
    report.on_progress(LoadProgress("cache", 0, 10, "blocks"))
    report.on_progress(LoadProgress("cache", 10, 10, "blocks"))
    found = [(line["phase"], line["done"], line["progress"], line.get("seconds")) for line in lines_of(stderr)]
    assert found == [
        ("weights", 0, "0.0 of 20.0 GiB, 0%, 0 s so far", None),
        ("weights", 3 * 2048, "6.0 of 20.0 GiB, 30%, 2.0 GiB/s, 7 s left", None),
        ("weights", 6 * 2048, "12.0 of 20.0 GiB, 60%, 2.0 GiB/s, 4 s left", None),
        ("weights", 9 * 2048, "18.0 of 20.0 GiB, 90%, 2.0 GiB/s, 1 s left", None),
        ("weights", 20480, "20.0 GiB in 10.0 s, 2.0 GiB/s", 10.0),
    ]


def test_a_phase_that_reports_nothing_has_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, clock = terminal(monkeypatch), Clock(monkeypatch)
    configure_logs("json", "info")
    report = StartReport(0, shows_bars=False)
    report.on_tick()
    report.on_progress(LoadProgress("imports", 0, 1, ""))
    for _ in range(4):
        clock.now += 2.0
        report.on_tick()
    report.on_progress(LoadProgress("imports", 1, 1, ""))
    report.on_tick()
    found = [line["progress"] for line in lines_of(stderr)]
    assert found == ["0 s so far", "4 s so far", "8 s so far", "8.0 s"]


def test_ranks_but_the_first_have_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    configure_logs("json", "info")
    report = StartReport(1, shows_bars=False)
    report.on_progress(LoadProgress("weights", 3, 14, "MiB"))
    assert stderr.getvalue() == "" and report.position == "is in 'weights', 3 of 14 MiB"


def test_a_terminal_shows_bars_with_log_lines_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    configure_logs("console", "info")
    report = StartReport(0, shows_bars=True)
    report.on_progress(LoadProgress("weights", 3, 14, "MiB"))
    get_logger().warning("a line of someone else")
    report.on_progress(LoadProgress("weights", 14, 14, "MiB"))
    report.on_progress(LoadProgress("graphs", 1, 28, "shapes"))
    report.close()
    report.close()
    text = stderr.getvalue()
    assert "14 MiB in" in text and "1 of 28 shapes" in text and " s" in text
    assert "a line of someone else" in text and "loading" not in text
    assert text.endswith("\x1b[?25h"), "the cursor is still hidden"
    assert sys.stderr is stderr


def test_a_report_of_nothing_leaves_the_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    StartReport(0, shows_bars=True).close()
    assert stderr.getvalue() == ""
