"""Runs a command and draws what it printed as an SVG picture of a terminal, for the documentation.

    .venv/bin/python tools/terminal_picture.py docs/images/plan.svg -- .venv/bin/headrace plan ...

The picture holds the command and its real output, nothing else. What the command says of its
progress on stderr is in it too, as it would be on a screen.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys

import rich.console
import rich.terminal_theme
import rich.text

# rich names a font of the network in its pictures; every reader has some monospaced font.
FONT_OF_THE_NETWORK = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
TIME_LIMIT_S = 600


def printed(command: list[str], columns: int) -> str:
    """What the command prints on a terminal of so many columns, stderr included.

    Raises:
        SystemExit: It failed.
    """
    environment = os.environ | {"COLUMNS": str(columns)}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, timeout=TIME_LIMIT_S
    )
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def shown(command: list[str]) -> str:
    """The command as one types it where the environment is active."""
    return shlex.join([pathlib.Path(command[0]).name, *command[1:]])


def picture(command: list[str], output: str, columns: int) -> str:
    """SVG of the command and its output."""
    console = rich.console.Console(
        record=True, width=columns, file=open(os.devnull, "w", encoding="utf-8"), color_system="truecolor"
    )
    console.print(rich.text.Text(f"$ {shown(command)}", style="bold"), soft_wrap=False)
    console.print(rich.text.Text.from_ansi(output.strip("\n")))
    drawn = console.export_svg(title="", theme=rich.terminal_theme.DEFAULT_TERMINAL_THEME)
    return "\n".join(line.rstrip() for line in FONT_OF_THE_NETWORK.sub("", drawn).splitlines()) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Draw what a command prints.")
    parser.add_argument("out", type=pathlib.Path, help="SVG file to write")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("command", nargs="+", help="after --: the command and its arguments")
    options = parser.parse_args()
    output = printed(options.command, options.columns)
    options.out.write_text(picture(options.command, output, options.columns), encoding="utf-8")
    print(f"{options.out}: {len(output.splitlines())} lines of output")


if __name__ == "__main__":
    main()
