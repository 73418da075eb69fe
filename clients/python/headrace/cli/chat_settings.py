"""The generation options of a chat: set, checked at once, shown.

Owns `/set`. The command line's own table knows names and types; ranges are the server's, so a value
is checked by asking it: a Complete whose prompt is empty is refused by every server before anything
is computed, and the refusal lists every rule that the options break. So a chat refuses exactly what
an answer would be refused for, with the limits of this very model.
"""

from __future__ import annotations

import re
from typing import Any, cast

import click

from headrace.cli.failures import CallFacts, sentence
from headrace.cli.options import GENERATION_OPTIONS, given_options
from headrace.cli.output import warn
from headrace.client import Client
from headrace.errors import DeadlineExceeded, HeadraceError, InvalidRequest, Unavailable
from headrace.spec import GenerationOptions, path_of

NOT_FOR_CHAT = {
    "n": "one answer: -n is not for chat",
    "token_ids_only": "the text of an answer: --token-ids-only is not for chat",
}
SETTABLE = {name: option for name, option in GENERATION_OPTIONS.items() if name not in NOT_FOR_CHAT}
_CHECK_TIMEOUT_S = 10.0
_PROMPT = "spec.text"
# In a chat options are set by name, without dashes.
FIELD_NAMES = {path_of(name): name for name in SETTABLE} | {"messages": "the conversation"}


class Settings:
    """The options in force."""

    def __init__(self, client: Client, options: GenerationOptions) -> None:
        """Begins with the options of the command line, unchecked."""
        self._client = client
        self._values: dict[str, Any] = dict(options)

    @property
    def options(self) -> GenerationOptions:
        """The options as keyword arguments of a call."""
        return cast(GenerationOptions, self._values)

    def check(self) -> None:
        """Asks the server whether it takes the options.

        Raises:
            HeadraceError: It does not, or cannot be asked.
        """
        _check(self._client, self.options)

    def set(self, line: str) -> None:
        """Runs `/set LINE`: a name and a value, a name alone (back to its default), or nothing.

        NAME=VALUE is understood as well; what follows a space is the value as it is.
        """
        word = re.split(r"[\s=]", line, maxsplit=1)[0]
        text = line[len(word) + 1 :]
        name = word.replace("-", "_")
        if not name:
            self._show()
        elif name not in SETTABLE:
            warn(f"there is no option {name}; /set lists them")
        elif not text.strip():
            self._values.pop(name, None)
            warn(f"[{name} is back to its default]")
        else:
            self._set(name, text.strip())

    def _set(self, name: str, text: str) -> None:
        option = SETTABLE[name]
        try:
            value = option.type.convert(text, option, None)
        except click.UsageError as error:
            warn(f"not set: {name}: {error.message}")
            return
        values = {**self._values, **given_options({name: [value] if option.multiple else value})}
        note = ""
        try:
            _check(self._client, cast(GenerationOptions, values))
        except (Unavailable, DeadlineExceeded) as error:
            note = f", not checked: {sentence(error, CallFacts())}"
        except HeadraceError as error:
            warn(f"not set: {sentence(error, CallFacts(names=FIELD_NAMES))}")
            return
        self._values = values
        warn(f"[{name} = {_shown(values[name])}{note}]")

    def _show(self) -> None:
        """Lists all options, those that are set with their values, within the terminal's width."""
        formatter = click.HelpFormatter()
        rows = [
            (f"{name} = {_shown(self._values[name])}" if name in self._values else name, option.help or "")
            for name, option in SETTABLE.items()
        ]
        formatter.write_dl(rows, col_max=30)
        warn(formatter.getvalue().rstrip())


def _check(client: Client, options: GenerationOptions) -> None:
    asked = options.copy()
    # Of conversations alone, which Complete has none of: the answer is refused for it.
    asked.pop("max_reasoning_tokens", None)
    asked.pop("reasoning_effort", None)
    try:
        client.complete("", timeout=_CHECK_TIMEOUT_S, **asked)
    except InvalidRequest as error:
        broken = tuple(violation for violation in error.violations if violation.field != _PROMPT)
        if broken or not error.violations:
            raise InvalidRequest(error.message, violations=broken) from None


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}={item:g}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
