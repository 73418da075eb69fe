"""Looks after files of keys and certificates while the server runs.

Owns the rhythm only: what a change means is the owner's of the file. Files are read in another
thread, as a mounted folder may take its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol


class Reloadable(Protocol):
    """An object that follows the changes of a file."""

    def reload(self) -> None:
        """Takes the file's new content, or logs why not. Never raises for what is in the file."""


async def watch(sources: Sequence[Reloadable], interval_s: float, looked: Callable[[], None]) -> None:
    """Asks each source in turn, for ever; calls `looked` on the event loop after each round."""
    while True:
        await asyncio.sleep(interval_s)
        for source in sources:
            await asyncio.to_thread(source.reload)
        looked()
