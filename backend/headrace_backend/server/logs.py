"""Log set-up of the backend's process, and of the agent of another host.

Structlog writes to stderr, lines for people or JSON.

Never logged: prompts, outputs, secrets. A log line about a request carries its id.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from headrace_facts import log_output

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def configure_logs(log_format: Literal["console", "json"], log_level: str) -> None:
    """Sets up structlog for the whole process. Call once."""
    log_output.keep_going()
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Plain tracebacks: the pretty ones print local variables, and those hold prompts.
        plain = structlog.dev.plain_traceback
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log_level.upper()]),
        # Looked up for every line: while bars are shown, stderr is what writes above them.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(process: str = "backend", **context: object) -> FilteringBoundLogger:
    """A logger with the kind of process and `context` bound to every line."""
    logger: FilteringBoundLogger = structlog.get_logger(process=process, **context)
    return logger


def format_bytes(count: int) -> str:
    """A number of bytes for people: 1536 gives "1.5 KiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.1f} {_UNITS[power]}" if power else f"{count} B"
