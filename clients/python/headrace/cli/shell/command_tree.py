"""The words that may be typed: commands, options and values, as click knows them.

Owns the walk over the commands. What a value may be is asked of click's own completion of each
parameter: choices, files, or nothing that a shell could know.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import click

# Shells show as much of a text as a line has room for.
_LONGEST_TEXT = 70


class Values(NamedTuple):
    """What may stand for a value: some words, or the names of files."""

    words: tuple[str, ...] = ()
    are_files: bool = False


class OptionWords(NamedTuple):
    """An option by all its names. `values` is None for a switch, which takes none."""

    names: tuple[str, ...]
    text: str
    values: Values | None


class Place(NamedTuple):
    """A command, and what may be typed behind it.

    Attributes:
        path: the command's words without the program's, with spaces between; empty: the program.
        commands: names and texts of the commands below it.
        options: its options.
        arguments: what its arguments may be.
    """

    path: str
    commands: tuple[tuple[str, str], ...]
    options: tuple[OptionWords, ...]
    arguments: Values


def places(command: click.Command, parent: click.Context | None = None, path: str = "") -> Iterator[Place]:
    """Yields a command and all below it."""
    ctx = click.Context(command, parent=parent, info_name=path, **command.context_settings)
    below = _below(command, ctx)
    params = command.get_params(ctx)
    options = tuple(_option(param, ctx) for param in params if isinstance(param, click.Option) and not param.hidden)
    arguments = [_values(param, ctx) for param in params if isinstance(param, click.Argument)]
    texts = tuple((name, each.get_short_help_str(_LONGEST_TEXT)) for name, each in below.items())
    yield Place(path, texts, options, next(iter(arguments), Values()))
    for name, each in below.items():
        yield from places(each, ctx, f"{path} {name}".strip())


def _below(command: click.Command, ctx: click.Context) -> dict[str, click.Command]:
    if not isinstance(command, click.Group):
        return {}
    found = {name: command.get_command(ctx, name) for name in command.list_commands(ctx)}
    return {name: each for name, each in found.items() if each is not None and not each.hidden}


def _option(option: click.Option, ctx: click.Context) -> OptionWords:
    values = None if option.is_flag or option.count else _values(option, ctx)
    # Without what stands behind a description in brackets: range, default, variable.
    text = textwrap.shorten((option.help or "").partition("  [")[0], _LONGEST_TEXT, placeholder=" ...")
    return OptionWords((*option.opts, *option.secondary_opts), text, values)


def _values(param: click.Parameter, ctx: click.Context) -> Values:
    items = param.shell_complete(ctx, "")
    if any(item.type in ("file", "dir") for item in items):
        return Values(are_files=True)
    return Values(tuple(str(item.value) for item in items))
