"""A file whose lines are the addresses of engines: read again and again while the service runs.

Whoever starts and ends engines (an orchestrator, a script) writes it, best by renaming a new file
over it. Owns its form and what is known of it: one HOST:PORT or unix:PATH a line; empty lines and
lines that begin with # say nothing. A file that cannot be read or has a line that is no address
keeps the addresses that were read before, as a name that resolves to nothing does.
"""

from __future__ import annotations

import asyncio
import pathlib

import structlog

from headrace_health.address import REACHABLE_RULE, is_reachable
from headrace_service.engines.engine_names import Follow

_log = structlog.get_logger("headrace.service")
_LOOK_S = 0.5
_MAX_BYTES = 1 << 20


class InvalidEngineFile(Exception):
    """The file is not taken; the message says which line and why."""


class EngineFile:
    """The addresses that a file names.

    Args:
        path: the file. It may be missing at the start, and come later.
        follow: called with all addresses after each look.

    Attributes:
        failure: why the file is not taken at present; "" while it is.
    """

    def __init__(self, path: pathlib.Path, follow: Follow) -> None:
        self._path = path
        self._follow = follow
        self._addresses: tuple[str, ...] = ()
        self.failure = ""

    async def run(self) -> None:
        """Looks at the file every half second until cancelled."""
        while True:
            self._look()
            # Also where nothing has changed: an engine that left is let go once its streams are
            # over.
            self._follow(self._addresses, {})
            await asyncio.sleep(_LOOK_S)

    def _look(self) -> None:
        try:
            addresses = read(self._path)
        except InvalidEngineFile as error:
            if self.failure != str(error):
                _log.warning("engines.file_not_taken", why=str(error), kept=len(self._addresses))
            self.failure = str(error)
            return
        if self.failure or addresses != self._addresses:
            _log.info("engines.file_taken", file=str(self._path), addresses=len(addresses))
        self.failure, self._addresses = "", addresses


def read(path: pathlib.Path) -> tuple[str, ...]:
    """Returns the addresses in a file, each once, in their order. Raises InvalidEngineFile."""
    try:
        if path.is_fifo():
            # To open it would wait for a writer, and no later file would be read.
            raise InvalidEngineFile(f"engines_file: {path}: is no file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise InvalidEngineFile(f"engines_file: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidEngineFile(f"engines_file: {path}: is not UTF-8") from None
    if len(data) > _MAX_BYTES:
        raise InvalidEngineFile(f"engines_file: {path}: has more than {_MAX_BYTES} bytes")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    named = [(number, line) for number, line in lines if line and not line.startswith("#")]
    for number, line in named:
        if not is_reachable(line):
            raise InvalidEngineFile(f"engines_file: {path}: line {number}: {line[:64]!r} {REACHABLE_RULE}")
    return tuple(dict.fromkeys(line for _, line in named))
