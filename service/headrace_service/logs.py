"""Logs of the service process: structlog to stderr, for people or as JSON lines.

Owns the one place where a process sets logging up. What is logged anywhere in this room: ids, counts, durations, codes and the places of
exceptions. Never prompts, outputs, stop strings, keys or an exception's own text, which may quote any of them.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Literal

import structlog


def configure(log_format: Literal["console", "json"], level: str) -> None:
    """Sets up structlog for the process."""
    renderer = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # grpc.aio logs exceptions of handlers with their text; ours never leave the boundary, and its own are not for this log.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


def places(error: BaseException) -> list[str]:
    """Returns where an exception passed, innermost last, as "file:line function": what a log may show of it."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
