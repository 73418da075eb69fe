"""The process in which grammars are tried, as those see it who ask it.

Owns the process's life: it is started with the first grammar, and anew after each that it did not
survive, which is how a limit is noticed. Does not own the limits (`trial`).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import BinaryIO

import msgspec

from headrace_backend.structured_output.trial import (
    MAX_COMPILE_BYTES,
    MAX_COMPILE_S,
    Verdict,
    read_record,
    write_record,
)
from headrace_backend.structured_output.vocabulary import Vocabulary
from headrace_request.structured_output import StructuredOutput

# The kernel counts computing time. On a machine that is busy the clock may show many times as much.
_MAX_WAIT_S = 60.0
_COMMAND = (sys.executable, "-m", "headrace_backend.structured_output.trial")
_TOO_LONG = f"takes more than {MAX_COMPILE_S} s of computing to compile"
_TOO_LARGE = f"takes more than {MAX_COMPILE_BYTES >> 20} MiB, or nests too deeply, to compile"


class TrialProcess:
    """Tries one grammar after the other, for one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """No process yet."""
        self._vocabulary = msgspec.msgpack.encode(vocabulary)
        self._process: subprocess.Popen[bytes] | None = None

    def try_grammar(self, asked: StructuredOutput) -> Verdict:
        """Waits for the verdict on a structured output.

        Raises:
            OSError: The process can't be started.
        """
        process = self._process if self._process is not None else self._started()
        stdin, stdout = _pipes(process)
        try:
            write_record(stdin, msgspec.msgpack.encode(asked))
            answer = read_record(stdout) if select.select([stdout], [], [], _MAX_WAIT_S)[0] else None
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Verdict)
        return Verdict(_TOO_LONG if self._end() in (-signal.SIGPROF, -signal.SIGKILL) else _TOO_LARGE)

    def close(self) -> None:
        """Has the process end, if there is one; who waits for its verdict learns that it did."""
        process = self._process
        if process is not None:
            process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        # An arena of malloc's for each thread would count as memory that is used.
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
        process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        write_record(_pipes(process)[0], self._vocabulary)
        self._process = process
        return process

    def _end(self) -> int:
        """Ends the process and returns its exit code, which is its own where it has ended."""
        process, self._process = self._process, None
        assert process is not None, "somebody asked it"
        try:
            exit_code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            exit_code = process.wait()
        for pipe in _pipes(process):
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        return exit_code


def _pipes(process: subprocess.Popen[bytes]) -> tuple[BinaryIO, BinaryIO]:
    assert process.stdin is not None and process.stdout is not None, "both are piped"
    return process.stdin, process.stdout  # type: ignore[return-value]  # IO[bytes] is one here
