"""click options made from configuration fields, and a --help that groups them.

Owns the form of the command line only: every option's name, description and default comes from its
field, every check from `settings.merge`, so options pass text through as it was typed.
"""

from __future__ import annotations

import io
import shutil
import types
import typing
from collections.abc import Callable
from typing import Any

import click
import rich.box
import rich.console
import rich.table
import rich.text
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace_supervisor.settings import PREFIX, Group, flag_name

_KINDS = {bool: "", int: "INTEGER", float: "NUMBER", str: "TEXT", ByteSize: "SIZE"}
# Settings that may be repeated take names, but for these.
_ADDRESSES = frozenset({"listen"})
# Names of the field's other places for the same option.
_ALIASES = {"max_model_len": ("--max-seq-len",)}


class GroupedCommand(click.Command):
    """A command whose --help shows one table of options per group of settings."""

    groups: tuple[Group, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the tables, widths fitted to the terminal."""
        width = min(shutil.get_terminal_size((110, 24)).columns, 140)
        console = rich.console.Console(file=io.StringIO(), width=width, highlight=False, force_terminal=False)
        ours = {name for group in self.groups for name in group.fields()}
        shown: set[str] = set()
        for group in self.groups:
            fields = {name: field for name, field in group.fields().items() if name not in shown}
            shown |= set(fields)
            console.print(_table(group.title, [_row(name, field) for name, field in fields.items()]))
        general = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and p.name not in ours]
        console.print(_table("General", [(", ".join(p.opts), p.help or "", "") for p in general]))
        output = console.file
        assert isinstance(output, io.StringIO)
        formatter.write("\n" + output.getvalue())
        formatter.write(
            f"Each option is also {PREFIX}NAME in the environment and name = value in the --config file; flags win, "
            "then the environment.\n"
        )


def settings_options(groups: tuple[Group, ...]) -> Callable[[click.Command], click.Command]:
    """Adds the options of these groups to a GroupedCommand."""

    def add(command: click.Command) -> click.Command:
        assert isinstance(command, GroupedCommand)
        command.groups = groups
        fields = {name: field for group in reversed(groups) for name, field in group.fields().items()}
        command.params[:0] = [_option(name, field) for name, field in fields.items()]
        return command

    return add


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that were typed."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def _option(name: str, field: FieldInfo) -> click.Option:
    flag = flag_name(name)
    if field.annotation is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=field.description)
    multiple = typing.get_origin(field.annotation) is tuple
    names = [flag, *_ALIASES.get(name, ()), name]
    return click.Option(names, default=None, multiple=multiple, metavar=_kind(name, field), help=field.description)


def _kind(name: str, field: FieldInfo) -> str:
    """What an option takes, for people: alternatives, or the kind of value."""
    if typing.get_origin(field.annotation) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(field.annotation))
    if typing.get_origin(field.annotation) is types.UnionType:
        return "PATH"
    if isinstance(field.annotation, type) and field.annotation in _KINDS:
        return _KINDS[field.annotation]
    if typing.get_origin(field.annotation) is tuple:
        if float in typing.get_args(field.annotation):
            return "NUMBERS"
        return "ADDRESS" if name in _ADDRESSES else "NAME"
    return "PATH"


def _row(name: str, field: FieldInfo) -> tuple[str, str, str]:
    flag = flag_name(name)
    left = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else f"{flag} {_kind(name, field)}"
    return left, (field.description or "") + _range(field), _default(field)


def _range(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{words[key]} {getattr(rule, key):,}"
        for rule in field.metadata
        for key in words
        if getattr(rule, key, None) is not None
    ]
    return f" ({', '.join(limits)})" if limits else ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    if field.default is None or field.default == "":
        return ""
    return (
        " ".join(map(str, field.default))
        if isinstance(field.default, tuple)
        else str(field.default).lower()
        if isinstance(field.default, bool)
        else str(field.default)
    )


def _table(title: str, rows: list[tuple[str, str, str]]) -> rich.table.Table:
    table = rich.table.Table(
        title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE, show_header=False, expand=True
    )
    table.add_column("option", ratio=5, overflow="fold")
    table.add_column("meaning", ratio=7)
    table.add_column("default", ratio=2, min_width=15, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(rich.text.Text(cell) for cell in row))
    return table
