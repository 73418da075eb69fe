"""Environment variables that the hub's library would fail on when it is imported."""

from __future__ import annotations

import os

from headrace_hub.errors import HubRefused

_SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")


def check_variables() -> None:
    """Raises HubRefused for a variable whose value the library could not read."""
    for variable in _SECONDS:
        value = os.environ.get(variable, "")
        if value and not (value.isascii() and value.isdecimal()):
            raise HubRefused(f"{variable} must be a whole number of seconds, not {value[:40]!r}")
