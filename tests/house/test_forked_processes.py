"""A process that is forked for a test ends, fails and is signalled as one that was started is."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable

import pytest
from tests.support.forked_processes import ForkedProcess, ForkingPython
from tests.support.processes import wait_until

Start = Callable[..., tuple[ForkedProcess, pathlib.Path]]


@pytest.fixture(scope="module")
def python() -> ForkingPython:
    return ForkingPython(["json"], os.environ)


@pytest.fixture
def start(python: ForkingPython, tmp_path: pathlib.Path) -> Start:
    """Runs a script's text; returns the process and the file of its standard error."""

    def run(text: str, *arguments: str) -> tuple[ForkedProcess, pathlib.Path]:
        script, said = tmp_path / "script.py", tmp_path / "stderr"
        script.write_text(text)
        return python.start(script, arguments, said), said

    return run


def test_it_runs_a_script_with_its_arguments_and_what_was_imported(start: Start) -> None:
    before = "import sys; imported = 'json' in sys.modules; print(sys.argv[1:], __name__, imported, file=sys.stderr)"
    process, said = start(f"{before}; sys.exit(7)", "one", "two words")
    assert process.wait(240) == process.poll() == 7
    assert said.read_text() == "['one', 'two words'] __main__ True\n"


def test_an_error_is_its_last_word(start: Start) -> None:
    process, said = start("raise RuntimeError('planted')")
    assert process.wait(240) == 1
    assert said.read_text().endswith("RuntimeError: planted\n")


def test_it_runs_until_it_is_ended(start: Start) -> None:
    process, said = start("import sys, time; print('there', file=sys.stderr, flush=True); time.sleep(600)")
    wait_until(lambda: said.exists() and said.read_text())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(240) == -9
    # Its number may be another's by now.
    process.kill()
    process.terminate()


def test_signals_and_children_are_its_own(start: Start) -> None:
    """Its parent waits for children by a signal and a pipe, of which nothing is left in it."""
    process, said = start(
        "import os, signal, subprocess, sys\n"
        "subprocess.run(['true'], check=True)\n"
        "left = [signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, signal.set_wakeup_fd(-1)]\n"
        "print(left, sorted(map(int, os.listdir('/proc/self/fd'))), file=sys.stderr)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    assert process.wait(240) == -15
    # The last one is the listing's.
    assert said.read_text() == "[True, -1] [0, 1, 2, 3]\n"


def test_several_run_at_once_and_end_in_any_order(python: ForkingPython, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(3)")
    names = [tmp_path / str(number) for number in range(3)]
    running = [python.start(script, [str(name)], name.with_suffix(".log")) for name in names]
    for process, name in reversed(list(zip(running, names, strict=True))):
        assert process.poll() is None
        name.touch()
        assert process.wait(240) == 3
