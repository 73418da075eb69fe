"""Asks a process of its own to compile kernels for a card, or to say which it would.

Triton decides at import whether it interprets or compiles.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

from tests.support.warm_python import WarmPython


@functools.cache
def _compiler() -> WarmPython:
    """One for all that this process has compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return WarmPython(["torch", "triton"], environment)


def compiled(module: str, *arguments: str | int) -> list[dict[str, Any]]:
    """Returns what `python -m tests.support.<module>` prints, a line of JSON each.

    Most modules print the resources of the kernels that they compile
    (`compiled_kernels.resources`).
    """
    (ended,) = _compiler().run([(f"tests.support.{module}", [str(each) for each in arguments])])
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]
