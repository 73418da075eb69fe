"""headrace.local is a server for the length of a block.

Nothing is left afterwards, however the block ends.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from tests.clients.canned_service import answer, canned_server
from tests.support.processes import alive, wait_until

import headrace
from headrace.cli import main
from headrace.local_server import installed
from headrace.local_server import server as server_module

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fake_server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Puts the fake headrace_supervisor first on the path of child processes.

    Returns the folder for temporary files.
    """
    package = tmp_path / "path" / "headrace_supervisor"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text((ROOT / "tests/clients/fake_supervisor.py").read_text())
    path = os.pathsep.join((str(package.parent), str(ROOT), str(ROOT / "clients/python")))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(package.parent))
    # Short, because a socket's path must be.
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield pathlib.Path(folder)


def _server_pid(local: headrace.LocalServer) -> int:
    server = local._server
    assert server is not None
    return server._process.pid


def test_a_block_has_a_client_and_leaves_nothing(fake_server: pathlib.Path) -> None:
    lines: list[str] = []
    local = headrace.local(
        "demo", kv_blocks=64, quiet=True, prefix_cache=False, listen_also=["a", "b"], on_line=lines.append
    )
    with local as client:
        assert client.generate("hello").result().text == answer(5)
        folders = list(fake_server.iterdir())
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700]
        pid = _server_pid(local)
    assert not alive([pid])
    assert list(fake_server.iterdir()) == []
    assert "--kv-blocks 64 --quiet --no-prefix-cache --listen-also a --listen-also b" in lines[0]
    assert "loading" in lines


async def test_an_async_block_has_an_async_client_and_leaves_nothing(fake_server: pathlib.Path) -> None:
    local = headrace.local("demo")
    async with local as client:
        assert (await client.generate("hello").result()).text == answer(5)
        pid = _server_pid(local)
    assert not alive([pid])
    assert list(fake_server.iterdir()) == []


def test_a_callback_that_fails_does_not_stop_the_reading(
    fake_server: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    local = headrace.local("demo", on_line=lambda line: 1 / 0)
    with local:
        server = local._server
        assert server is not None and wait_until(lambda: "loading" in server.lines)
    assert capfd.readouterr().err.count("ZeroDivisionError") == 1


def test_an_exception_in_the_block_stops_the_server_too(fake_server: pathlib.Path) -> None:
    local = headrace.local("demo")
    with pytest.raises(ZeroDivisionError), local:
        1 / 0  # noqa: B018
    assert not alive([_server_pid(local)])
    assert list(fake_server.iterdir()) == []


def test_a_server_that_ends_early_is_an_error_with_its_last_line(fake_server: pathlib.Path) -> None:
    begun = time.monotonic()
    with pytest.raises(headrace.LocalServerError, match=r"exit code 2: models/broken/config.json: architecture 'Foo'"):
        with headrace.local("broken"):
            pass
    # It would wait ten minutes for a server to be ready.
    assert time.monotonic() - begun < 60
    assert list(fake_server.iterdir()) == []


def test_a_server_that_is_never_ready_is_an_error(fake_server: pathlib.Path) -> None:
    local = headrace.local("never", start_timeout=6.0)
    with pytest.raises(headrace.LocalServerError, match=r"not ready after 6 s: .*slow disk"), local:
        pass
    assert not alive([_server_pid(local)])
    assert list(fake_server.iterdir()) == []


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(fake_server: pathlib.Path) -> None:
    lines: list[str] = []
    local = headrace.local("stubborn", stop_grace=0.3, on_line=lines.append)
    with local:
        child = int(next(line for line in lines if line.startswith("child")).split()[1])
        assert alive([child])
    assert not alive([_server_pid(local)]) and wait_until(lambda: not alive([child]))
    assert list(fake_server.iterdir()) == []


def test_a_killed_program_leaves_no_server_behind(fake_server: pathlib.Path) -> None:
    script = (
        "import tempfile, time, headrace; "
        f"tempfile.tempdir = {str(fake_server)!r}\n"
        "local = headrace.local('demo')\n"
        "with local:\n    print(local._server._process.pid, flush=True)\n    time.sleep(300)"
    )
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    server = int(program.stdout.readline())
    assert alive([server])
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    wait_until(lambda: not alive([server]))
    wait_until(lambda: list(fake_server.iterdir()) == [])


def test_a_missing_server_distribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "SUPERVISOR_MODULE", "headrace_supervisor_that_is_not_there")
    with pytest.raises(headrace.LocalServerError, match="pip install 'headrace-server"), headrace.local("demo"):
        pass


def test_a_server_without_its_worker_is_refused_before_anything_starts(
    fake_server: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "WORKER_MODULES", ("sys", "torch_that_is_not_there"))
    with pytest.raises(headrace.LocalServerError, match=r"extra `worker`.*\(looked for torch_that_is_not_there in"):
        with headrace.local("demo"):
            pass
    refused = CliRunner().invoke(main, ["demo"])
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1 and "pip install 'headrace-server[worker]'" in refused.stderr


def test_the_demo_model_is_the_packages_before_the_checkouts(
    fake_server: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real ones would be found first: a module that another test of this process has imported,
    # and the model of an installed wheel.
    monkeypatch.delitem(sys.modules, "headrace_supervisor", raising=False)
    monkeypatch.setattr(installed, "DEMO_PACKAGE", "demo_model_of_this_test")
    with pytest.raises(headrace.LocalServerError, match="no demo model .* --model"):
        installed.demo_model()
    # The fake supervisor lies in path/ as the real one lies in service/.
    for folder in (tmp_path / "models/demo", tmp_path / "path/demo_model_of_this_test/demo"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        importlib.invalidate_caches()
        assert installed.demo_model() == folder


def test_a_block_is_entered_once() -> None:
    local = headrace.local("demo")
    with local:
        pass
    with pytest.raises(RuntimeError, match="once"), local:
        pass


def test_a_long_temporary_folder_does_not_break_the_socket(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with headrace.local("demo") as client:
        assert client.load().serving


def test_the_demo_tells_its_story_and_leaves_nothing(fake_server: pathlib.Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--model", "models/other"], env={"PROMPT": "what now?"})
    assert result.exit_code == 0
    assert result.stdout == f"> what now?\n{answer(200)}\n"
    for part in (
        "starting a server for models/other",
        "  loading\n",
        "loading weights: 7 of 14 MiB\n",
        "loading weights: 14 of 14 MiB, 0.5 s\n",
        "memory plan: kv_cache 128.0 MiB",
        "slow disk",
        "ready on 127.0.0.1:",
        "7.5 M parameters",
        "TTFT",
        "ITL p50",
        "ITL p99",
        "output tokens/s",
        "where the time went",
        "headrace serve --model models/other --listen 127.0.0.1:50051",
    ):
        assert part in result.stderr
    assert result.stderr.count("headrace demo --prompt") == 3
    assert "nobody asked" not in result.stderr
    assert list(fake_server.iterdir()) == []


def test_a_demo_that_cannot_start_says_why(fake_server: pathlib.Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--model", "broken"])
    assert result.exit_code == 1
    assert result.stderr.count("models/broken/config.json: architecture 'Foo' is not known") == 1
    assert result.stderr.endswith("error: the server did not start, for the reason above\n")
    assert list(fake_server.iterdir()) == []


def test_a_server_without_health_is_not_ready() -> None:
    with canned_server() as server:
        assert not server_module.is_serving(server.address)
    assert not server_module.is_serving("unix:/nowhere/server.sock")
