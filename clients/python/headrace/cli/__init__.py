"""The `headrace` command.

Owns the program's own line of help and its version. Which commands there are is in
command_table.py, how they are found and how they fail in group.py, what they do in one file per
kind, which is imported when one of them is run.
"""

from __future__ import annotations

import click

import headrace
from headrace.cli.group import CommandGroup


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headrace.__version__, "-V", "--version", prog_name="headrace")
def main() -> None:
    """Talk to a Headrace server, and run one where headrace-server is installed.

    Exit codes: 0 success, 1 a call failed, 2 wrong usage, 130 Ctrl-C, 141 the reader of stdout
    left.
    """
