"""What was typed in earlier chats, in a file of the user's own.

Owns the file: $XDG_STATE_HOME/headrace/chat_history (by default below ~/.local/state), readable by
its owner alone, a JSON string a line, oldest first. A file that cannot be read or written costs the
history and not the chat.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable

# Beyond so many entries the oldest are dropped, when a chat begins.
MAX_ENTRIES = 1_000
_OWNER_ONLY = 0o600


def default_path() -> pathlib.Path:
    """Returns the file of the history, by the XDG base directory specification."""
    state = pathlib.Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = pathlib.Path.home() / ".local" / "state"
    return state / "headrace" / "chat_history"


class HistoryFile:
    """The history of one user; several chats may append to it at once."""

    def __init__(self, path: pathlib.Path) -> None:
        """Makes the file where there is none, and drops what is too old.

        Raises:
            OSError: It cannot be read or written.
        """
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._append("")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        self.entries = [entry for entry in map(_entry, lines) if entry][-MAX_ENTRIES:]
        if len(lines) > MAX_ENTRIES:
            self._replace(self.entries)

    def add(self, text: str) -> None:
        """Appends an entry, unless it is the same as the last.

        Raises:
            OSError: The file cannot be written.
        """
        if text.strip() and text != (self.entries[-1] if self.entries else None):
            self.entries.append(text)
            self._append(json.dumps(text) + "\n")

    def _append(self, line: str) -> None:
        _write(self._path, os.O_APPEND, [line])

    def _replace(self, entries: Iterable[str]) -> None:
        anew = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        _write(anew, os.O_TRUNC, (json.dumps(entry) + "\n" for entry in entries))
        anew.replace(self._path)


def _write(path: pathlib.Path, how: int, lines: Iterable[str]) -> None:
    """Writes lines in one go to a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, _OWNER_ONLY)
    with open(descriptor, "wb", buffering=0) as file:
        # It may have been made by another program, for all to read.
        os.chmod(path, _OWNER_ONLY)
        file.write("".join(lines).encode())


def _entry(line: str) -> str:
    """The entry of a line; "" for one that is damaged."""
    try:
        value = json.loads(line)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
