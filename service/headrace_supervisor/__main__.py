"""The entry of `python -m headrace_supervisor COMMAND`.

It has the server's commands without the client's `headrace` script.
"""

from __future__ import annotations

import click

from headrace_supervisor import commands


@click.group(context_settings={"help_option_names": ["--help", "-h"]})
def main() -> None:
    """Commands of the Headrace server."""


for command in (
    commands.serve,
    commands.service,
    commands.backend,
    commands.telemetry,
    commands.doctor,
    commands.bench,
    commands.quantize,
):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m headrace_supervisor")
