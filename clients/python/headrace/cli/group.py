"""The command group: built-in commands, an installed server's commands, and exit codes.

Owns the loading of the entry point group `headrace.commands` and the exit codes: 0 for success, 1
for an error of the server or of the connection, 2 for a command line that makes no sense, 130 for
Ctrl-C. Commands raise, this module prints.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from headrace.cli.output import error_as_dict, warn
from headrace.errors import HeadraceError, Unauthenticated, Unavailable
from headrace.server_process import LocalServerError

ENTRY_POINT_GROUP = "headrace.commands"
SERVER_COMMANDS = ("serve", "service", "backend", "bench", "doctor", "keys", "certs", "health", "telemetry", "trace")
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
JSON_KEY = "headrace.json"


class CommandGroup(click.Group):
    """Knows the commands of this distribution and of headrace-server, where that is installed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands that can be run."""
        return sorted({*super().list_commands(ctx), *_installed()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of that name.

        For a server command without a server it is one that says how to install it.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        installed = _installed().get(cmd_name)
        if installed is not None:
            return _load(cmd_name, installed)
        return _not_installed(cmd_name) if cmd_name in SERVER_COMMANDS else None

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; what it raises ends as one message on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            warn("interrupted")
            ctx.exit(EXIT_INTERRUPTED)
        except HeadraceError as error:
            _print_error(error, as_json=bool(ctx.meta.get(JSON_KEY)))
            ctx.exit(EXIT_ERROR)
        except LocalServerError as error:
            warn(f"error: {error}")
            ctx.exit(EXIT_ERROR)


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load(name: str, point: EntryPoint) -> click.Command:
    """The command behind an entry point; a broken installation costs this command only."""
    try:
        command = point.load()
    except Exception as error:  # whatever an installed package raises while it is imported
        return _refusal(name, f"headrace {name} cannot be loaded: {type(error).__name__}: {error}")
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


def _print_error(error: HeadraceError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": error_as_dict(error)}), err=True)
        return
    warn(f"error: {error.code.name}: {error}")
    if error.request_id:
        warn(f"request: {error.request_id}")
    if error.retry_after is not None:
        warn(f"try again in {error.retry_after:g} s")
    elif isinstance(error, Unauthenticated):
        warn(
            "the server asks for a key or a client certificate: HEADRACE_API_KEY, or --client-certificate and "
            "--client-key"
        )
    elif isinstance(error, Unavailable) and "CERTIFICATE_VERIFY_FAILED" in error.message:
        warn(
            "the server's certificate is not vouched for by a trusted authority, or is for another name: --ca, "
            "--server-name"
        )
    elif isinstance(error, Unavailable):
        warn(
            "is a server running? start one with: headrace serve --model <folder> (see --server); one that speaks TLS "
            "wants --ca, or --tls"
        )
