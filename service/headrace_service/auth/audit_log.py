"""The logger of everything that an auditor wants to know.

Owns one property: its lines are written whatever the log level, and carry audit=true, by which a
collector keeps them apart.
"""

from __future__ import annotations

from typing import Any

import structlog

_ALL_LEVELS = 0


def logger() -> Any:
    """Returns the audit logger."""
    return structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(_ALL_LEVELS), audit=True)
