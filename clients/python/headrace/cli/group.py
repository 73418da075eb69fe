"""The command group: built-in commands, an installed server's commands, and exit codes.

Owns the loading of commands, each when it is run and no earlier, a server's from the entry point
group `headrace.commands`, and the exit codes: 0 for success, 1 for an error of the server or of the
connection, 2 for a command line that makes no sense, 130 for Ctrl-C, 141 where the reader of stdout
left. Commands raise, this module ends them; how a failed call is worded is in failures.py, and
which commands there are in command_table.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import IO, Any

import click

from headrace.cli.command_table import COMMANDS, OWN_COMMANDS, SECTIONS, SERVER_COMMANDS
from headrace.cli.failures import FACTS_KEY, CallFacts, leave_stdout, os_sentence, show_failure
from headrace.cli.help import SectionedGroup
from headrace.cli.output import warn
from headrace.errors import HeadraceError
from headrace.local_server.process import LocalServerError

ENTRY_POINT_GROUP = "headrace.commands"
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
# A shell's code for a process that SIGPIPE ended.
EXIT_NO_READER = 141


class UsageSentence(click.ClickException):
    """A command line that makes no sense: one sentence with the place of help, exit code 2."""

    exit_code = EXIT_USAGE

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the sentence."""
        click.echo(f"error: {self.format_message()}", file=file, err=True)


def _with_help(message: str, path: str) -> str:
    """Adds the place of help to a message, which may be a question."""
    return f"{message.rstrip('.')}{' See' if message.endswith(('?', ')')) else '; see'} {path} --help"


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Puts a sentence in place of click's usage, hint, empty line and error.

    A group without a command still shows its help.
    """
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "headrace"
        raise UsageSentence(_with_help(error.format_message(), path)) from None


class CommandGroup(SectionedGroup):
    """Knows the commands of this distribution and of headrace-server, where that is installed."""

    sections = {title: tuple(commands) for title, commands in SECTIONS.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands that can be run."""
        return sorted({*OWN_COMMANDS, *_installed()})

    def summary(self, ctx: click.Context, name: str) -> str | None:
        """Returns what a listed command does; one of another package is imported for it."""
        return COMMANDS[name].summary if name in COMMANDS else super().summary(ctx, name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of that name.

        For a server command without a server it is one that says how to install it.
        """
        if cmd_name in OWN_COMMANDS:
            own: click.Command = getattr(importlib.import_module(f"headrace.cli.{COMMANDS[cmd_name].module}"), cmd_name)
            return own
        installed = _installed().get(cmd_name)
        if installed is not None:
            return _load(cmd_name, installed)
        return _not_installed(cmd_name) if cmd_name in SERVER_COMMANDS else None

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        """Reads the command line up to the command's name.

        Raises:
            UsageSentence: It makes no sense.
        """
        with _one_sentence():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; what it raises ends as one message on stderr and an exit code."""
        try:
            with _one_sentence():
                return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            warn("interrupted")
            ctx.exit(EXIT_INTERRUPTED)
        except HeadraceError as error:
            show_failure(error, ctx.meta.get(FACTS_KEY, CallFacts()))
            ctx.exit(EXIT_ERROR)
        except LocalServerError as error:
            warn(f"error: {error}")
            ctx.exit(EXIT_ERROR)
        except BrokenPipeError:
            leave_stdout()
            ctx.exit(EXIT_NO_READER)
        except OSError as error:
            warn(f"error: {os_sentence(error)}")
            ctx.exit(EXIT_ERROR)


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load(name: str, point: EntryPoint) -> click.Command:
    """The command behind an entry point; a broken installation costs this command only.

    Modules stay: looking for garbage among them would take a sixth of the time.
    """
    gc.disable()
    try:
        command = point.load()
    except Exception as error:  # whatever an installed package raises while it is imported
        return _refusal(name, f"headrace {name} cannot be loaded: {type(error).__name__}: {error}")
    finally:
        gc.enable()
    if not isinstance(command, click.Command):
        return _refusal(name, f"headrace {name} cannot be loaded: {point.value} is no click command")
    return command


def _not_installed(name: str) -> click.Command:
    return _refusal(
        name, f"headrace {name} is part of the server, which is not installed: pip install 'headrace-server[worker]'"
    )


def _refusal(name: str, message: str) -> click.Command:
    """A command that takes anything and ends with a message."""

    def refuse() -> None:
        warn(f"error: {message}")
        sys.exit(EXIT_USAGE)

    return click.Command(
        name,
        callback=refuse,
        help=message,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
