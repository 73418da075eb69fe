"""Telemetry beside the others.

Its settings are serve's, it starts first and ends last, and its deaths are its own affair.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.processes import wait_until

from headrace_supervisor import commands, service_settings
from headrace_supervisor import config as configs
from headrace_supervisor.runtime_folder import RuntimeFolderError
from headrace_supervisor.settings import ConfigError
from headrace_supervisor.supervisor import telemetry_process

MODEL = {"model": "folder"}
DRIVER = pathlib.Path(__file__).with_name("driver.py")
UNTIL_TERM = """
signal.signal(signal.SIGTERM, lambda *_: (open('ends', 'a').write(f'{NAME}\\n'), sys.exit(0)))
up()
while True: signal.pause()
"""


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def words(path: pathlib.Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(telemetry: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(DRIVER), str(tmp_path), UNTIL_TERM, UNTIL_TERM, "60", telemetry]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def starts(folder: pathlib.Path, name: str) -> list[int]:
    lines = (folder / "starts").read_text().splitlines() if (folder / "starts").exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(name + " ")]


def test_it_ends_after_all_others(run: Callable[[str], subprocess.Popen[str]], tmp_path: pathlib.Path) -> None:
    process = run(UNTIL_TERM)
    wait_until(lambda: len(words(tmp_path / "up")) == 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0
    ends = words(tmp_path / "ends")
    assert sorted(ends) == ["backend", "service-0", "service-1", "telemetry"]
    assert ends[2:] == ["backend", "telemetry"]


# 2 ends what is no telemetry, and this as little as 1.
@pytest.mark.parametrize("exit_code", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_may_die_as_often_as_it_likes(
    run: Callable[[str], subprocess.Popen[str]], tmp_path: pathlib.Path, exit_code: int
) -> None:
    process = run(f"sys.exit({exit_code})")
    # More often than a service may before the server was ready.
    wait_until(lambda: len(starts(tmp_path, "telemetry")) >= 6)
    (tmp_path / "ready").touch()
    assert process.stdout is not None
    assert "listening on" in process.stdout.readline()
    assert len(starts(tmp_path, "service-0")) == len(starts(tmp_path, "backend")) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0


def test_a_killed_one_is_started_again(run: Callable[[str], subprocess.Popen[str]], tmp_path: pathlib.Path) -> None:
    process = run(UNTIL_TERM)
    wait_until(lambda: len(words(tmp_path / "up")) == 4)
    os.kill(starts(tmp_path, "telemetry")[0], signal.SIGKILL)
    wait_until(lambda: len(starts(tmp_path, "telemetry")) == 2)
    assert len(starts(tmp_path, "service-0")) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0


def test_it_is_on_by_default_and_all_get_its_socket(tmp_path: pathlib.Path) -> None:
    config = configs.load_server({**MODEL, "metrics_ttft_buckets": ("0.001,0.01", "0.1"), "trace_detail": "span"}, None)
    assert config.telemetry is not None
    assert config.telemetry.metrics_ttft_buckets == (0.001, 0.01, 0.1)
    assert config.telemetry.trace_sample_ratio == 0.01
    process = telemetry_process(config, tmp_path)
    assert process is not None and process.spec.command[1:3] == ("-m", "headrace_telemetry")
    written = (tmp_path / "telemetry.json").read_text()
    assert str(tmp_path / "telemetry.sock") in written
    service = service_settings.addressed(
        config.service, ("127.0.0.1:7",), "unix:/c.sock", str(tmp_path / "telemetry.sock")
    )
    assert service.telemetry_socket == str(tmp_path / "telemetry.sock")


def test_a_runtime_folder_that_takes_no_configuration_is_named(tmp_path: pathlib.Path) -> None:
    # As on a disk that is full: nothing more can be written there.
    (tmp_path / "telemetry.json").symlink_to("/dev/full")
    config = configs.load_server({**MODEL}, None)
    with pytest.raises(RuntimeFolderError, match=rf"runtime folder {tmp_path}: No space left on device"):
        telemetry_process(config, tmp_path)


def test_it_can_be_off(tmp_path: pathlib.Path) -> None:
    config = configs.load_server({**MODEL, "telemetry": "off"}, None)
    assert config.telemetry is None
    assert telemetry_process(config, tmp_path) is None
    assert service_settings.addressed(config.service, ("127.0.0.1:7",), "unix:/c.sock").telemetry_socket == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"telemetry": "off", "trace_ring": "1MiB"}, "trace_ring: telemetry is off; --trace-ring needs it"),
        ({"trace_sample_ratio": "2"}, "--trace-sample-ratio: must be at most 1"),
        ({"otlp_endpoint": "collector:4317"}, "otlp_endpoint: must be http://HOST:PORT"),
        ({"metrics_tpot_buckets": ("1,x",)}, "--metrics-tpot-buckets: must be a number"),
        ({"metrics_tpot_buckets": ("2,1",)}, "metrics_tpot_buckets: every bound must be above the one before it"),
        ({"trace_file": "/nowhere/at/all"}, "trace_file: there is no folder /nowhere/at"),
        ({"otlp_endpoint": "http://c", "otlp_headers_file": "/nowhere"}, "otlp_headers_file: /nowhere: No such file"),
        ({"telemetry_attributes": ("x",)}, "telemetry_attributes: every attribute must be NAME=VALUE"),
    ],
)
def test_absurd_settings_refuse_the_start_with_the_reason(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configs.load_server({**MODEL, **flags}, None)
    assert message in str(refused.value)


def test_alone_it_needs_a_socket_and_takes_one_as_services_do() -> None:
    with pytest.raises(ConfigError, match="telemetry_socket is needed"):
        configs.load_telemetry({}, None)
    config = configs.load_telemetry({"telemetry_socket": "unix:/run/t.sock"}, None)
    assert config.telemetry_socket == pathlib.Path("/run/t.sock")


def test_help_groups_its_settings() -> None:
    for command in (commands.serve, commands.telemetry):
        text = CliRunner().invoke(command, ["--help"]).output
        assert "Telemetry" in text
        assert "--trace-sample-ratio" in text
        assert "--metrics-ttft-buckets" in text and "NUMBERS" in text
    assert "on|off" in CliRunner().invoke(commands.serve, ["--help"]).output
