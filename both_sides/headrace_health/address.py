"""What an address for probes looks like. Imports nothing, because every configuration knows it."""

from __future__ import annotations

from typing import Final

# unix:PATH or HOST:PORT.
PATTERN: Final = r"^(unix:.+|.+:\d{1,5})$"
