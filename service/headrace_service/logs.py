"""Logs of the service process: structlog to stderr, for people or as JSON lines.

Owns the one place where a process sets logging up. What is logged anywhere in this room: ids,
counts, durations, codes and the places of exceptions. Never prompts, outputs, stop strings, keys or
an exception's own text, which may quote any of them.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any, Literal

import structlog

from headrace_facts import log_output

_LOOK_EVERY_S = 1.0
_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass(frozen=True, slots=True)
class Switches:
    """Which levels are logged."""

    debug: bool
    info: bool
    warning: bool
    error: bool

    @staticmethod
    def at(level: str) -> Switches:
        """Returns the switches of a lowest level that is logged."""
        lowest = _LEVELS.index(level)
        return Switches(*(lowest <= index for index in range(len(_LEVELS))))


class _Switchboard:
    """Drops events of levels that are switched off; asks for the switches at most once a second."""

    def __init__(self) -> None:
        self.switches = Switches.at("debug")
        self._source: Callable[[], Switches] | None = None
        self._asked_s = 0.0

    def switch_by(self, source: Callable[[], Switches]) -> None:
        self._source, self._asked_s = source, 0.0

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        now_s = time.monotonic()
        if self._source is not None and now_s - self._asked_s >= _LOOK_EVERY_S:
            self.switches, self._asked_s = self._source(), now_s
        # Methods without a switch (critical) always pass, and so do audit lines: who can switch
        # logs must not switch off what is said of him.
        if "audit" not in event and not getattr(self.switches, method, True):
            raise structlog.DropEvent
        return event


_switchboard = _Switchboard()


def switch_by(source: Callable[[], Switches]) -> None:
    """Has the levels that are logged follow `source` from now on, within a second of a change."""
    _switchboard.switch_by(source)


def configure(log_format: Literal["console", "json"], level: str) -> None:
    """Sets up structlog for the process."""
    log_output.keep_going()
    _switchboard.switches = Switches.at(level)
    # Plain tracebacks: the pretty ones print local variables.
    plain = structlog.dev.plain_traceback
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
    structlog.configure(
        processors=[
            _switchboard,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer() if log_format == "json" else console,
        ],
        # Levels can be switched on while the process runs, so that what is filtered before the
        # processors is nothing.
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # grpc.aio logs exceptions of handlers with their text; ours never leave the boundary, and its
    # own are not for this log.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


def places(error: BaseException) -> list[str]:
    """Returns where an exception passed, innermost last, as "file:line function".

    What a log may show of it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
