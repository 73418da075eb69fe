"""How every command's help is laid out, and what a mistyped command is answered with.

Owns the layout: options under titles, whole sentences beside commands, and no line that ends within
an option's name or a default. The texts are the commands' own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import click

OWN_OPTIONS = "Options"
# Stand for hyphens and spaces at which a line must not end, while click wraps a text.
_KEPT = {"-": "\ue000", " ": "\ue001"}
# An option's name, or a short note in brackets behind a description, such as a default.
_WHOLE = re.compile(r"--[a-z][a-z0-9-]*|\[[^\[\]]{1,36}\]")
_WHOLE_SENTENCE = 10_000
# Longer terms have their meanings below them.
_TERM_WIDTH = 30


class WholeOptionsFormatter(click.HelpFormatter):
    """Wraps help without breaking names of options and short notes in brackets."""

    def write_text(self, text: str) -> None:
        """Writes paragraphs."""
        super().write_text(_kept(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Writes terms with their meanings beside them."""
        super().write_dl([(term, _kept(meaning)) for term, meaning in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        """Returns what was written."""
        return super().getvalue().translate({ord(kept): character for character, kept in _KEPT.items()})


def _kept(text: str) -> str:
    return _WHOLE.sub(lambda found: found[0].replace("-", _KEPT["-"]).replace(" ", _KEPT[" "]), text)


# Commands of an installed server are laid out like ours: click makes a context for each of them,
# whatever package it comes from.
click.Context.formatter_class = WholeOptionsFormatter


class SectionedOption(click.Option):
    """An option that --help shows under a title."""

    def __init__(self, *args: Any, section: str = OWN_OPTIONS, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose --help shows its options under the titles that they name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the command line.

        Raises:
            click.NoSuchOption: An option is unknown; the message names the nearest ones.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # click compares names with their dashes, which makes short ones look alike.
            bare = {name.lstrip("-"): name for option in self.get_params(ctx) for name in option.opts}
            near = difflib.get_close_matches(error.option_name.lstrip("-"), bare)
            raise click.NoSuchOption(error.option_name, possibilities=[bare[name] for name in near], ctx=ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, those without a title first."""
        sections: dict[str, list[tuple[str, str]]] = {OWN_OPTIONS: []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if isinstance(option, click.Option) and record is not None:
                sections.setdefault(getattr(option, "section", OWN_OPTIONS), []).append(record)
        _write_sections(formatter, sections)


class SectionedGroup(click.Group):
    """A group whose --help has a whole sentence for each command.

    A mistyped command is answered with the nearest ones.
    """

    command_class = SectionedCommand
    # Title -> names of commands; those in none come last.
    sections: Mapping[str, tuple[str, ...]] = {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands under their titles."""
        summaries = {name: self.summary(ctx, name) for name in self.list_commands(ctx)}
        rows = {name: (name, summary) for name, summary in summaries.items() if summary is not None}
        shown = {title: [rows.pop(name) for name in names if name in rows] for title, names in self.sections.items()}
        _write_sections(formatter, {**shown, "Further commands" if self.sections else "Commands": list(rows.values())})

    def summary(self, ctx: click.Context, name: str) -> str | None:
        """Returns the sentence beside a command; None for one that is not shown."""
        command = self.get_command(ctx, name)
        return None if command is None or command.hidden else command.get_short_help_str(_WHOLE_SENTENCE)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that the arguments begin with.

        Raises:
            click.UsageError: There is none of that name; the message names the nearest ones.
        """
        name = args[0]
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, self.list_commands(ctx))
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise click.UsageError(f"No such command {name!r}.{hint}", ctx)


def _write_sections(formatter: click.HelpFormatter, sections: Mapping[str, list[tuple[str, str]]]) -> None:
    """Writes what is not empty, the meanings of all sections in one column."""
    width = max((len(term) for rows in sections.values() for term, _ in rows if len(term) <= _TERM_WIDTH), default=0)
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl([(term.ljust(width), meaning) for term, meaning in rows], col_max=width)
