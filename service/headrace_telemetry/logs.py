"""Logs of the telemetry process: structlog to stderr, for people or as JSON lines.

Owns the one place where it is set up. What is logged: counts, codes, paths. No fact's content.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from headrace_facts import log_output


def configure(log_format: Literal["console", "json"], level: str) -> None:
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
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
