"""`headrace completion`: prints a shell's script, or puts it where the shell finds it.

Owns the places of these files, and what is left to do by hand.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import NamedTuple

import click

import headrace
from headrace.cli.help import SectionedCommand
from headrace.cli.output import warn
from headrace.cli.shell.command_tree import places
from headrace.cli.shell.scripts import SCRIPTS

# click keeps the lines of a paragraph that begins with \b.
_EXAMPLES = """\b
Examples:
  headrace completion bash --install
  headrace completion zsh > ~/.zfunc/_headrace
"""


class _Home(NamedTuple):
    """A file that a shell looks for, and what else the shell needs to find it."""

    path: pathlib.Path
    needs: str


@click.command(cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(list(SCRIPTS)))
@click.option("--install", is_flag=True, help="Write the script where the shell looks for it, instead of printing it.")
@click.pass_context
def completion(ctx: click.Context, shell: str, install: bool) -> None:
    """Print a script that completes commands, options and values in SHELL.

    It serves every `headrace`, also one that is typed with its path, and starts no Python. Make it
    again after an upgrade.
    """
    header = (
        f"# Made by `headrace completion {shell}` of version {headrace.__version__}; make it again after an upgrade."
    )
    script = SCRIPTS[shell](list(places(ctx.find_root().command)), header)
    home = _home(shell)
    if install:
        _write(home.path, script)
        warn(f"{home.path} is written; {home.needs}")
        return
    click.echo(script, nl=False)
    if sys.stdout.isatty():
        warn(f"\nTo have it in every shell: headrace completion {shell} --install, which writes {home.path}")


def _home(shell: str) -> _Home:
    data = _folder("XDG_DATA_HOME", ".local/share")
    if shell == "bash":
        path = data / "bash-completion" / "completions" / "headrace"
        return _Home(path, f"new shells use it where bash-completion is installed, others with: source {path}")
    if shell == "zsh":
        path = data / "zsh" / "site-functions" / "_headrace"
        return _Home(path, f"new shells use it with this line in ~/.zshrc, before compinit: fpath+=({path.parent})")
    return _Home(_folder("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "headrace.fish", "new shells use it")


def _folder(variable: str, default: str) -> pathlib.Path:
    named = pathlib.Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else pathlib.Path.home() / default


def _write(path: pathlib.Path, script: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename or path}: {error.strerror}") from None
