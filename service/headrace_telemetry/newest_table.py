"""A dictionary that holds so many entries and no more: the oldest gives way.

Owns the bound of what telemetry remembers by id, so that no stream of facts makes it grow.
"""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

Value = TypeVar("Value")


class NewestTable(Generic[Value]):
    """The newest `limit` entries by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: collections.OrderedDict[str, Value] = collections.OrderedDict()

    def put(self, key: str, value: Value) -> None:
        """Sets an entry. A key that is there keeps its age."""
        self._entries[key] = value
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: str) -> Value | None:
        """Returns the entry of a key."""
        return self._entries.get(key)

    def pop(self, key: str) -> Value | None:
        """Removes an entry and returns it."""
        return self._entries.pop(key, None)
