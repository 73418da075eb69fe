"""A Python that has imported what is slow to import, and forks for each program that it runs.

torch and Triton take 2.6 s of a core, a fork none of it.

Owns the process, its requests and how programs end. A program is `python -m MODULE ARGUMENTS`, run
as if in a process of its own. Not for what the product starts as processes: that is to be started
as it always is.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pathlib
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

_ROOT = pathlib.Path(__file__).parents[2]
_ROOMS = ("service", "backend", "both_sides", "kernels", "protos/python", "clients/python", ".")


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str


class WarmPython:
    """Started with the first program, ended with this process."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        """Not started.

        Args:
            imports: Modules that programs find imported.
            environment: Environment of all programs; our packages are in reach.
        """
        path = os.pathsep.join(str(_ROOT / room) for room in _ROOMS)
        self._environment = {**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._imports = imports
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        programs: Sequence[tuple[str, Sequence[str]]],
        timeout_s: float = 800.0,
        variables: Mapping[str, str] | None = None,
    ) -> list[Ended]:
        """Runs programs (module and arguments) at the same time until all have ended.

        All are killed if that takes too long. Variables are added to their environment, after what
        they find imported was imported.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            request = {"folder": folder, "programs": programs, "variables": dict(variables or {})}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                os.killpg(process.pid, 9)
            line = process.stdout.readline()
            files = pathlib.Path(folder)
            outputs = [[(files / f"{i}.{name}").read_text() for name in ("out", "err")] for i in range(len(programs))]
            assert line, f"not within {timeout_s} s, or it ended by itself: {outputs}"
        return [Ended(code, out, err) for code, (out, err) in zip(json.loads(line), outputs, strict=True)]

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_python", *self._imports],
                cwd=_ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # A group of its own, so that it can be killed with its programs.
                start_new_session=True,
            )
            atexit.register(_end, self._process)
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    """It ends with its input."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def _become(index: int, folder: pathlib.Path, module: str, arguments: list[str]) -> NoReturn:
    """Runs a program in a process that was forked for it."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{index}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [module, *arguments]
    # It ends soon, and its memory with it: a fifth of compiling kernels was looking for cycles
    # among what torch and Triton made.
    gc.disable()
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:  # As the interpreter itself ends: reported on stderr, with code 1.
        traceback.print_exc()
        code = 1
    # As the interpreter ends, too: a server that is refused kills the backend that it has begun.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main(imports: list[str]) -> None:
    """Answers each request on a line of standard input with the programs' exit codes.

    Ends with its input.
    """
    for name in imports:
        __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for index, (module, arguments) in enumerate(request["programs"]):
            child = os.fork()
            if child == 0:
                os.environ.update(request["variables"])
                _become(index, pathlib.Path(request["folder"]), module, arguments)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
