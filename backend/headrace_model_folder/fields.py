"""Typed access to the fields of a JSON object from a model folder.

Owns the wording of "field, rule, value"; knows no field itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from headrace_model_folder.errors import InvalidModelFolder, shown


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object with the name by which messages mention it, such as `config.json`.

    A field that is absent or null takes the default; without a default it is an error. Every getter
    raises InvalidModelFolder.
    """

    name: str
    values: dict[str, Any]

    def get(self, key: str) -> Any:
        """The raw value, None if absent."""
        return self.values.get(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"must be an integer from {low} to {high}, is {shown(value)}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise self.error(key, f"must be a number from {low:g} to {high:g}, is {shown(value)}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, f"must be true or false, is {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {shown(value)}")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """None, one id or a list of ids, each below `vocab_size`."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise self.error(key, f"must be token ids from 0 to {vocab_size - 1}, has {shown(token)}")
        return tuple(dict.fromkeys(ids))

    def error(self, key: str, rule: str) -> InvalidModelFolder:
        """The error for one field; the caller raises it."""
        return InvalidModelFolder(f"{self.name}: {key} {rule}")

    def _value(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing")
        return default
