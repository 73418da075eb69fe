"""The process in which a chat template runs, and the connection to it.

Owns one life of it. It is started by a child that shares nothing with this process and runs none of
its code before its own program (vfork): the event loop's own way of starting programs forks, and
the copy of a process with gRPC's threads runs Python's and gRPC's fork handlers before it begins.
What runs inside is `template_worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from headrace_service.text import template_worker

_LENGTH = struct.Struct("<I")
# JSON may write one character as twelve bytes (a surrogate pair of escapes).
_MAX_BYTES_PER_CHAR = 12


class TooLong(Exception):
    """The helper's answer is longer than a prompt may be; it was not read."""


class TemplateHelper:
    """A running helper; `start` makes one."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal's number if one ended it; None while it runs."""
        return self._process.poll()

    async def exchange(self, question: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
        """Sends a question and returns the answer.

        Raises:
            TooLong: the answer has more bytes than `max_chars` characters can have.
            asyncio.IncompleteReadError, ConnectionError: the helper ended.
        """
        data = json.dumps(question).encode()
        self._writer.write(_LENGTH.pack(len(data)) + data)
        await self._writer.drain()
        (num_bytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if num_bytes > max_chars * _MAX_BYTES_PER_CHAR + 1024:
            raise TooLong
        reply: dict[str, Any] = json.loads(await self._reader.readexactly(num_bytes))
        return reply

    async def wait(self) -> int:
        """Returns its exit code when it has ended."""
        return await asyncio.to_thread(self._process.wait)

    async def kill(self) -> None:
        """Ends it, and returns when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self.wait()
        self._writer.close()


async def start(memory_bytes: int) -> TemplateHelper:
    """Starts a helper with an address space of `memory_bytes`.

    Raises OSError: it cannot be started.
    """
    ours, its = socket.socketpair()
    with its:
        try:
            process = subprocess.Popen(
                # -P: a script's own folder is no place to import from.
                [sys.executable, "-P", template_worker.__file__, str(memory_bytes)],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
    return TemplateHelper(process, *await asyncio.open_unix_connection(sock=ours))
