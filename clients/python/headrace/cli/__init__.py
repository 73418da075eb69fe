"""The `headrace` command.

Owns the list of commands of this distribution. How commands are found and how they fail is in
group.py, what they do in one file per kind.
"""

from __future__ import annotations

import click

import headrace
from headrace.cli.admin import admin
from headrace.cli.chat import chat
from headrace.cli.demo import demo
from headrace.cli.generation import cancel, generate, submit, subscribe
from headrace.cli.group import CommandGroup
from headrace.cli.listing import load, models, requests
from headrace.cli.shell.command import completion


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headrace.__version__, "-V", "--version", prog_name="headrace")
def main() -> None:
    """Talk to a Headrace server, and run one where headrace-server is installed.

    Exit codes: 0 success, 1 a call failed, 2 wrong usage, 130 Ctrl-C, 141 the reader of stdout
    left.
    """


for _command in (generate, chat, submit, subscribe, cancel, requests, models, load, admin, demo, completion):
    main.add_command(_command)
