"""A small JSON document that all service processes of a server see.

Owns its file, which is replaced whole under a lock, so that a reader never sees half of one, and the copy in memory, which is read again when
the file has changed. For what a client sets through one process and then relies on through another.
"""

from __future__ import annotations

import copy
import fcntl
import os
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

Content = dict[str, Any]


class SharedDocument:
    """One document.

    Args:
        path: its file; None: this process alone has it.
        initial: what it says before anyone has changed it.
    """

    def __init__(self, path: pathlib.Path | None, initial: Content) -> None:
        self._path = path
        self._initial = initial
        self._content = copy.deepcopy(initial)
        self._seen: tuple[int, int] | None = None

    def read(self) -> Content:
        """Returns the document as of now; not to be changed."""
        if self._path is not None:
            self._refresh(self._path)
        return self._content

    def update(self, change: Callable[[Content], None]) -> None:
        """Changes the document; what `change` raises leaves it as it was."""
        if self._path is None:
            content = copy.deepcopy(self._content)
            change(content)
            self._content = content
            return
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._refresh(self._path)
            content = copy.deepcopy(self._content)
            change(content)
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(content))
            os.replace(fresh, self._path)
            self._refresh(self._path)

    def _refresh(self, path: pathlib.Path) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            self._content, self._seen = copy.deepcopy(self._initial), None
            return
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._seen:
            self._content = msgspec.json.decode(path.read_bytes())
            self._seen = seen
