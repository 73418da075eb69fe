"""`python -m headrace_quantize --config-json FILE`: started by `headrace quantize`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from headrace_backend.spinning import bound_spinning
from headrace_progress.shown import ShownProgress

_INTERRUPTED = 130


def _loaded() -> Callable[[list[str]], int]:
    """The program, which loads torch, by name: so that it is imported now and not with this file.

    Prints a line and ends the process if it is interrupted.
    """
    bound_spinning()
    try:
        with ShownProgress() as progress:
            progress.begin("loading torch", 1, "")
            program = importlib.import_module("headrace_quantize.main")
            progress.advance("loading torch")
    except KeyboardInterrupt:
        print("headrace: interrupted; nothing was written", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    main: Callable[[list[str]], int] = program.main
    return main


if __name__ == "__main__":
    sys.exit(_loaded()(sys.argv[1:]))
