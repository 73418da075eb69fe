"""The entry of `python -m headrace_supervisor COMMAND`.

It has the server's commands without the client's `headrace` script. Only the command that is run is
imported, with no garbage looked for meanwhile: modules stay. A server's first backend begins before
all that.
"""

from __future__ import annotations

import gc
import importlib
import sys

gc.disable()

# Imported without looking for garbage, as all that follows.
from headrace_supervisor.processes import early_backend  # noqa: E402

if __name__ == "__main__":
    early_backend.begin(sys.argv[1:])

# What takes its time, and so behind the backend that begins.
import click  # noqa: E402

MODULES = {
    "serve": "commands",
    "service": "commands",
    "backend": "commands",
    "ranks": "commands",
    "telemetry": "commands",
    "doctor": "doctor_command",
    "bench": "bench.command",
    "quantize": "quantize_command",
}


class Commands(click.Group):
    """Commands of the Headrace server, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands."""
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of that name, None if there is none."""
        if cmd_name not in MODULES:
            return None
        module = importlib.import_module(f"headrace_supervisor.{MODULES[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["--help", "-h"]})
def main() -> None:
    """Commands of the Headrace server."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main(prog_name="python -m headrace_supervisor")
