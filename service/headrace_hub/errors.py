"""The one error of this room: a model that can't be had by its name, and why, in one sentence."""

from __future__ import annotations


class HubRefused(Exception):  # an outcome
    """A model can't be fetched, or not as asked.

    The message is one line without control characters, whatever a hub has sent.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message))


class BadName(HubRefused):  # an outcome
    """What was typed names no model, or names a file that is not there: usage, not the hub."""
