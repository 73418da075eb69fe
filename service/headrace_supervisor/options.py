"""click options made from configuration fields, with help that says range and default.

Owns the form of the command line only: every option's name, description and default comes from its
field, every check from `settings.merge`, so options pass text through as it was typed. How help is
laid out is the client's `headrace.cli.help`, so that all commands look alike.
"""

from __future__ import annotations

import pathlib
import types
import typing
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.cli.help import SectionedCommand, SectionedOption
from headrace_supervisor import foreign_names
from headrace_supervisor.settings import PREFIX, Group, flag_name

_KINDS = {bool: "", int: "INTEGER", float: "NUMBER", str: "TEXT", ByteSize: "SIZE"}
# What would be shown as taking names or paths, but takes addresses.
_ADDRESSES = frozenset({"listen", "openai_listen", "probe"})
# Characters of alternatives that stand beside an option in 80 columns; longer ones stand behind its
# description.
_LONGEST_KIND = 60
_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "": 1}
_EPILOG = (
    f"Each option is also {PREFIX}NAME in the environment and name = value in the --config file; flags win, then the "
    "environment."
)


class Refusal(click.ClickException):
    """A command line that can't be followed: one sentence on stderr, exit code 2."""

    exit_code = 2

    def show(self, file: typing.IO[Any] | None = None) -> None:
        """Prints the sentence."""
        click.echo(f"headrace: {self.format_message()}", file=file, err=True)


class ServerCommand(SectionedCommand):
    """A command of the server, which knows what it has instead of other servers' options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the command line.

        Raises Refusal for an option that only other servers have.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ours = {name for option in self.get_params(ctx) for name in option.opts}
            instead = foreign_names.instead_of(error.option_name, ours)
            if instead is None:
                raise
            raise Refusal(f"there is no {error.option_name} here: {instead}") from None


class SettingOption(SectionedOption):
    """The option of one field.

    Other servers' names of the field are taken, and stand behind its description.
    """

    def __init__(self, name: str, field: FieldInfo, section: str) -> None:
        self._field = field
        flag, others = flag_name(name), foreign_names.ALIASES.get(name, ())
        is_switch = field.annotation in (bool, bool | None)
        flags = [f"{each}/--no-{each.lstrip('-')}" for each in (flag, *others)] if is_switch else [flag, *others]
        self._shown = f"{flag} / --no-{flag[2:]}" if is_switch else f"{flag} {_kind(name, field)}"
        multiple = typing.get_origin(field.annotation) is tuple
        help_text = f"{field.description or ''}{_also(others)}{_extra(field)}"
        super().__init__([*flags, name], section=section, default=None, multiple=multiple, help=help_text)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The option with what it takes, and its description."""
        return self._shown, self.help or ""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Values for the shell: those of a choice, or files where a path is wanted."""
        if typing.get_origin(self._field.annotation) is typing.Literal:
            return [CompletionItem(str(value)) for value in typing.get_args(self._field.annotation)]
        return files(ctx, self, incomplete) if self._shown.endswith(" PATH") else []


def files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Has the shell complete the names of files and folders."""
    return [CompletionItem(incomplete, type="file")]


model_argument = click.argument("named_model", metavar="[MODEL]", required=False, shell_complete=files)


def typed_model(argument: str | None, option: str | None) -> str | None:
    """Returns the model that was typed, as an argument or with --model. Raises Refusal."""
    if "" in (argument, option):
        # A variable of the shell that is not set; the empty path would be the current folder.
        raise Refusal("the model is named by an empty text")
    if argument is not None and option is not None and pathlib.Path(argument) != pathlib.Path(option):
        raise Refusal(f"two models are named, {argument} and --model {option}: one of them is to be left out")
    return argument if argument is not None else option


def settings_options(groups: tuple[Group, ...]) -> Callable[[click.Command], click.Command]:
    """Adds the options of these groups to a command.

    A setting that stands in several groups is shown with the first.
    """

    def add(command: click.Command) -> click.Command:
        options: dict[str, SettingOption] = {}
        for group in groups:
            for name, field in group.fields().items():
                options.setdefault(name, SettingOption(name, field, group.title))
        command.params += options.values()
        command.epilog = f"{command.epilog}\n{_EPILOG}" if command.epilog else _EPILOG
        return command

    return add


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that were typed."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def _kind(name: str, field: FieldInfo) -> str:
    """What an option takes, for people: alternatives, or the kind of value."""
    if alternatives := _alternatives(field):
        written = "|".join(alternatives)
        return written if len(written) <= _LONGEST_KIND else "NAME"
    # What may be left open, and else has one type.
    kind = next(iter(typing.get_args(field.annotation)), None) if _is_union(field) else field.annotation
    if name in _ADDRESSES and _is_union(field):
        return "ADDRESS"
    if isinstance(kind, type) and kind in _KINDS:
        return _KINDS[kind]
    if typing.get_origin(field.annotation) is tuple:
        if float in typing.get_args(field.annotation):
            return "NUMBERS"
        return "ADDRESS" if name in _ADDRESSES else "NAME"
    return "PATH"


def _is_union(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is types.UnionType


def _also(others: tuple[str, ...]) -> str:
    return f" (also {', '.join(others)})" if others else ""


def _extra(field: FieldInfo) -> str:
    """Range and default of a field, in brackets behind its description."""
    parts = [part for part in (_range(field), _default(field)) if part]
    return f"  [{'; '.join(parts)}]" if parts else ""


def _alternatives(field: FieldInfo) -> list[str]:
    """The values that a field may have, if these are few words."""
    is_literal = typing.get_origin(field.annotation) is typing.Literal
    return [str(value) for value in typing.get_args(field.annotation)] if is_literal else []


def _range(field: FieldInfo) -> str:
    alternatives = _alternatives(field)
    if len("|".join(alternatives)) > _LONGEST_KIND:
        return ", ".join(alternatives)
    limits = {
        key: _number(field, getattr(rule, key))
        for rule in field.metadata
        for key in ("ge", "gt", "le", "lt")
        if getattr(rule, key, None) is not None
    }
    if limits == {"ge": "0"}:
        return ""
    if {"ge", "le"} <= set(limits):
        return f"{limits['ge']} to {limits['le']}"
    words = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    return ", ".join(words[key].format(limit) for key, limit in limits.items())


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or field.default == "" or field.default == ():
        return ""
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    return f"default: {', '.join(_number(field, value) for value in values)}"


def _number(field: FieldInfo, value: Any) -> str:
    """A value as it may be typed: sizes in the largest unit that divides them."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.15g}"
    if field.annotation is not ByteSize or not value:
        return str(value)
    unit, size = next((unit, size) for unit, size in _UNITS.items() if value % size == 0)
    return f"{value // size}{unit}"
