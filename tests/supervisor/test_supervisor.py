"""The supervisor over fake processes: restarts, its end, and nothing outlives it."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.support.memory_group import TAKES_MEMORY, memory_group
from tests.support.processes import alive, wait_until

DRIVER = pathlib.Path(__file__).with_name("driver.py")
RUN_ON = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nup()\nwhile True: time.sleep(0.05)"
# Says in a file when it was asked to end, and takes a moment for it.
SLOW_END = (
    "def end(*_):\n    open('ends', 'a').write(f'{NAME} asked\\n'); time.sleep(0.3); open('ends', 'a').write(f'{NAME} "
    "ended\\n'); os._exit(0)\n"
    "signal.signal(signal.SIGTERM, end)\nup()\nwhile True: time.sleep(0.05)"
)
# Says in a file that it was asked to end, and goes on.
DEAF = (
    "signal.signal(signal.SIGTERM, lambda *_: open('asked', 'a').write(f'{NAME}\\n'))\nup()\nwhile True: "
    "time.sleep(0.05)"
)


class Run:
    """One driver process in its own folder."""

    def __init__(
        self, folder: pathlib.Path, backend: str, service: str, grace_s: float, inside: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        # The suite itself may run under nohup.
        hangs_up = ("env", "--default-signal=HUP")
        self.process = subprocess.Popen(
            [*hangs_up, *inside, sys.executable, str(DRIVER), str(folder), backend, service, str(grace_s)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def starts(self, name: str = "") -> list[int]:
        """Process ids of all starts so far, of one process or of all."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(name)]

    def started(self) -> None:
        wait_until(lambda: (self.folder / "up").exists() and len((self.folder / "up").read_text().splitlines()) >= 3)

    def end(self, within_s: float = 60.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, err

    def alive(self) -> list[int]:
        return alive(self.starts())


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(backend: str = RUN_ON, service: str = RUN_ON, grace_s: float = 1.0, inside: Sequence[str] = ()) -> Run:
        runs.append(Run(tmp_path, backend, service, grace_s, inside))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_with_exit_code_0(run: Callable[..., Run], number: signal.Signals) -> None:
    server = run()
    server.started()
    server.process.send_signal(number)
    assert server.end()[0] == 0
    assert server.alive() == []


def test_a_server_under_nohup_stays_when_its_terminal_goes(run: Callable[..., Run]) -> None:
    server = run(inside=["nohup"])
    server.started()
    server.process.send_signal(signal.SIGHUP)
    os.kill(server.starts("service")[0], signal.SIGKILL)
    wait_until(lambda: len(server.starts("service")) >= 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_services_end_before_the_backend_is_asked_to(run: Callable[..., Run]) -> None:
    server = run(backend=SLOW_END, service=SLOW_END)
    server.started()
    server.process.terminate()
    assert server.end()[0] == 0
    order = (server.folder / "ends").read_text().splitlines()
    assert order.index("backend asked") > max(order.index("service-0 ended"), order.index("service-1 ended"))


def test_a_process_that_dies_is_started_again_and_the_others_run_on(run: Callable[..., Run]) -> None:
    server = run()
    server.started()
    os.kill(server.starts("service-0")[0], signal.SIGKILL)
    wait_until(lambda: len(server.starts("service-0")) == 2)
    assert len(server.starts("backend")) == len(server.starts("service-1")) == 1
    os.kill(server.starts("backend")[0], signal.SIGKILL)
    wait_until(lambda: len(server.starts("backend")) == 2)
    assert len(server.starts("service-0")) == 2


def test_an_end_for_want_of_memory_is_reported_from_another(run: Callable[..., Run]) -> None:
    # Its first life takes all memory once the server has started.
    hungry = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nup()\n"
        "if len(open('starts').read().split('backend')) == 2:\n"
        "    while not os.path.exists('hungry'): time.sleep(0.05)\n"
        f"    {TAKES_MEMORY.replace(chr(10), chr(10) + '    ')}\n"
        "while True: time.sleep(0.05)"
    )
    with memory_group(512 << 20) as inside:
        server = run(backend=hungry, inside=inside)
        server.started()
        os.kill(server.starts("service-0")[0], signal.SIGKILL)
        wait_until(lambda: len(server.starts("service-0")) == 2)
        (server.folder / "hungry").touch()
        wait_until(lambda: len(server.starts("backend")) == 2)
        server.process.terminate()
        code, out, err = server.end()
    assert code == 0
    [by_hand] = [line for line in (out + err).splitlines() if "service-0 ended" in line]
    assert "SIGKILL, which was no OOM kill of the kernel's" in by_hand
    [for_memory] = [line for line in (out + err).splitlines() if "backend ended" in line]
    assert "SIGKILL, the kernel's for want of memory (OOM kill)" in for_memory


def test_pauses_between_restarts_double(run: Callable[..., Run]) -> None:
    server = run(backend="open('times', 'a').write(f'{time.monotonic()}\\n'); sys.exit(1)")
    (server.folder / "ready").touch()
    wait_until(
        lambda: (server.folder / "times").exists() and len((server.folder / "times").read_text().splitlines()) >= 6
    )
    times = [float(line) for line in (server.folder / "times").read_text().splitlines()]
    pauses = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    # A pause includes the start of an interpreter; the waits alone are 0.05, 0.1, 0.2, 0.4, 0.8 s.
    assert all(pause >= 0.05 * 2**index for index, pause in enumerate(pauses[:5]))
    server.process.terminate()
    assert server.end()[0] == 0


def test_before_the_server_was_ever_ready_restarts_are_bounded(run: Callable[..., Run]) -> None:
    server = run(backend="sys.exit(1)")
    code, _, err = server.end()
    assert code == 1
    assert "backend ended 4 times before the server was ready (exit code 1)" in err
    assert len(server.starts("backend")) == 4
    assert server.alive() == []


@pytest.mark.parametrize("which", ["backend", "service"])
def test_a_process_that_refuses_its_configuration_ends_the_server_with_2(run: Callable[..., Run], which: str) -> None:
    server = run(**{which: "sys.exit(2)"})
    code, _, err = server.end()
    assert code == 2
    assert "refused to start" in err
    assert "Traceback" not in err
    assert server.alive() == []


def test_a_deaf_process_is_killed_after_the_grace(run: Callable[..., Run]) -> None:
    server = run(service=DEAF)
    server.started()
    began = time.monotonic()
    server.process.terminate()
    assert server.end()[0] == 0
    assert time.monotonic() - began >= 1.0
    assert server.alive() == []


def test_a_second_signal_is_faster(run: Callable[..., Run]) -> None:
    server = run(service=DEAF, grace_s=600)
    server.started()
    server.process.send_signal(signal.SIGINT)
    # Two signals at once would be one.
    wait_until(lambda: (server.folder / "asked").exists())
    server.process.send_signal(signal.SIGINT)
    # The whole grace is ten times as long as this waits.
    assert server.end()[0] == 0
    assert server.alive() == []


def test_a_killed_supervisor_leaves_nothing(run: Callable[..., Run]) -> None:
    server = run(backend=DEAF, service=DEAF)
    server.started()
    server.process.kill()
    wait_until(lambda: server.alive() == [], timeout_s=120.0)


def test_what_a_process_left_in_its_session_ends_with_it(run: Callable[..., Run]) -> None:
    grandchild = (
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', \"import os, time; open('starts', "
        "'a').write(f'helper {os.getpid()}\\\\n'); time.sleep(300)\"])\n"
    )
    server = run(backend=grandchild + RUN_ON)
    wait_until(lambda: server.starts("helper"))
    server.process.terminate()
    assert server.end()[0] == 0
    # It was killed, which takes its moment.
    wait_until(lambda: server.alive() == [], timeout_s=120.0)


def test_a_signal_while_processes_start_ends_them_too(run: Callable[..., Run]) -> None:
    server = run()
    wait_until(lambda: server.starts())
    server.process.terminate()
    assert server.end()[0] == 0
    assert server.alive() == []


def test_the_ready_line_is_printed_once_and_only_when_ready(run: Callable[..., Run]) -> None:
    server = run()
    server.started()
    (server.folder / "ready").touch()
    assert server.process.stdout is not None
    line = server.process.stdout.readline()
    assert line.startswith("listening on 127.0.0.1:1 ")
    os.kill(server.starts("backend")[0], signal.SIGKILL)
    wait_until(lambda: len(server.starts("backend")) == 2)
    server.process.terminate()
    assert "listening" not in server.end()[1]
