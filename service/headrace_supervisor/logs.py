"""Log set-up of the supervisor process: structlog to stderr, as lines for people or as JSON."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from headrace_facts import log_output


def configure(log_format: Literal["console", "json"], log_level: str) -> None:
    """Sets up structlog for the process. Call once, before anything logs."""
    log_output.keep_going()
    # Plain tracebacks: the pretty ones print local variables.
    plain = structlog.dev.plain_traceback
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer() if log_format == "json" else console,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
