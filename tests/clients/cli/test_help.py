"""What every command says of itself, and what is said of mistyped names.

Help is whole at 80 columns, in titled groups.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result
from tests.support.running_server import environment

import headrace
from headrace.cli import main
from headrace.cli.command_table import COMMANDS

_WIDTH = 80


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A command and all below it by their paths, those of an installed server too."""
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from commands(below, (*path, name))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="headrace", env={"COLUMNS": str(_WIDTH)})


def test_every_commands_help_is_whole_at_80_columns() -> None:
    paths = [path for path, _ in commands(main)]
    assert {("serve",), ("admin", "models"), ("keys", "new"), ("bench",)} <= set(paths)
    for path in paths:
        result = run(*path, "--help")
        assert result.exit_code == 0
        usage, _, rest = result.output.partition("\n\n")
        assert usage.startswith(f"Usage: headrace {' '.join(path)}".rstrip())
        for line in result.output.splitlines():
            assert len(line) <= _WIDTH and line == line.rstrip(), (path, line)
        for line in rest.splitlines():
            # A text that was cut, a name that was broken.
            assert not line.endswith(("...", "-")), (path, line)


def test_every_option_says_what_it_does() -> None:
    for path, command in commands(main):
        ctx = click.Context(command)
        for option in command.get_params(ctx):
            assert isinstance(option, click.Argument) or (option.get_help_record(ctx) or ("", ""))[1], (path, option)


def test_options_are_grouped() -> None:
    shown = run("generate", "--help").output
    titles = [line for line in shown.splitlines() if re.fullmatch(r"\w.*:", line)]
    assert titles == ["Options:", "Model, sampling and stop:", "Connection:"]


def test_commands_are_grouped_and_none_is_left_out() -> None:
    shown = run("--help").output
    listed = [line.split()[0] for line in shown.splitlines() if re.match(r"  [a-z]", line)]
    assert "Further commands" not in shown
    assert {path[0] for path, _ in commands(main) if path} <= set(listed)


def test_a_listed_command_is_summed_up_by_the_first_sentence_of_its_help() -> None:
    ctx = click.Context(main)
    for name, listed in COMMANDS.items():
        command = main.get_command(ctx, name)
        assert command is not None and command.get_short_help_str(10_000) == listed.summary


def test_help_and_a_mistyped_name_import_no_command() -> None:
    for typed in ("--help", "sevre"):
        program = f"import sys, headrace.cli as c; c.main([{typed!r}], standalone_mode=False)"
        ended = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", program], capture_output=True, text=True, env=environment()
        )
        imported = set(re.findall(r"\| +(\S+)$", ended.stderr, re.MULTILINE))
        assert "headrace.cli.group" in imported
        assert not imported & {"headrace.cli.chat", "headrace.cli.demo", "headrace_supervisor", "pydantic", "rich"}


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_is_printed(flag: str) -> None:
    assert run(flag).output == f"headrace, version {headrace.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (("sevre",), "No such command 'sevre'. Did you mean 'serve' or 'service'?"),
        (("admin", "lod"), "No such command 'lod'. Did you mean 'load' or 'unload'?"),
        (("xyzzy",), "error: No such command 'xyzzy'; see headrace --help\n"),
        (("generate", "--tempreature", "1"), "No such option '--tempreature'. Did you mean '--temperature'?"),
        (("serve", "--list"), "No such option '--list'. Did you mean '--listen'? See headrace serve --help\n"),
        (("bench", "--zzz"), "error: No such option '--zzz'; see headrace bench --help\n"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest_that_there_is(typed: tuple[str, ...], says: str) -> None:
    result = run(*typed)
    assert result.exit_code == 2 and says in result.stderr
