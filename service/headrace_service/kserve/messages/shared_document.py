"""A small JSON document that all service processes of a server see.

Owns its file, which is replaced whole under a lock, so that a reader never sees half of one, and
the copy in memory, which is read again when the file has changed. For what a client sets through
one process and then relies on through another. A file system that takes no change (it is full)
costs that change alone, which is refused.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from headrace_service import errors

Content = dict[str, Any]
_RETRY_S = 5.0


class SharedDocument:
    """One JSON document that all processes of a server share.

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
        """Returns the document as of now, or as last read where its file can't be read now.

        Not to be changed.
        """
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._refresh(self._path)
        return self._content

    def update(self, change: Callable[[Content], None]) -> None:
        """Changes the document; what `change` raises leaves it as it was.

        Raises:
            ServiceError: UNAVAILABLE; its file can't be written, and the document is as it was.
        """
        if self._path is None:
            self._content = self._changed(change)
            return
        try:
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._refresh(self._path)
                _replace(self._path, msgspec.json.encode(self._changed(change)))
                self._refresh(self._path)
        except OSError as error:
            raise errors.unavailable(
                f"the server's runtime folder takes no change ({error.strerror}); all is as it was", _RETRY_S
            ) from None

    def _changed(self, change: Callable[[Content], None]) -> Content:
        content = copy.deepcopy(self._content)
        change(content)
        return content

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


def _replace(path: pathlib.Path, data: bytes) -> None:
    """Gives a file another content in one step. Raises OSError; it has the one it had."""
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    except OSError:
        # What was written of it takes room, where there is none.
        fresh.unlink(missing_ok=True)
        raise
