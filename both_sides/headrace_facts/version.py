"""The version that every process tells of itself: that of the installed server."""

from __future__ import annotations

import importlib.metadata

_DISTRIBUTION = "headrace-server"


def server_version() -> str:
    """The installed version; "" where the server runs from a source tree that is not installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""
