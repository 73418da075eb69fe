"""Toolchains of other languages that tests use where the machine has them.

Owns the rule: a toolchain that is missing skips its tests with a reason that begins with LEFT_OUT,
and the end of the run names each of them with the way to get it. Where DEMAND_TOOLCHAINS is 1, as
in CI, they fail instead. The reasons travel from xdist's processes inside the skipped tests'
reports, which is why they are text. What a language needs beyond its program (modules, artifacts)
is for its own tests to find out; they call `left_out` as well.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

LEFT_OUT = "left out: "
_DEMAND = "DEMAND_TOOLCHAINS"


@dataclass(frozen=True)
class Toolchain:
    """A program that tests run.

    Attributes:
        name: What is tested with it, for people: "the Go client".
        program: Looked for on PATH.
        version: Arguments that make it print its version.
        oldest: The first version that will do, as numbers.
        how: How to get it, as the rest of a sentence that begins with "to run them".
    """

    name: str
    program: str
    version: tuple[str, ...]
    oldest: tuple[int, ...]
    how: str


GO = Toolchain(
    name="the Go client",
    program="go",
    version=("env", "GOVERSION"),
    oldest=(1, 23),
    how="install Go 1.23 or newer (.ci/install_go does it on Debian) and let it reach a Go module proxy",
)

_HOW_JAVA = (
    "install JDK 17 or newer and Maven (`apt-get install default-jdk-headless maven` does it on Debian) and let Maven "
    "reach its repository"
)
JAVA = Toolchain(name="the Java client", program="javac", version=("-version",), oldest=(17,), how=_HOW_JAVA)
MAVEN = Toolchain(name="the Java client", program="mvn", version=("--version",), oldest=(3, 8), how=_HOW_JAVA)

NODE = Toolchain(
    name="OpenAI's Node client",
    program="node",
    version=("--version",),
    oldest=(18,),
    how="install Node 18 or newer with npm (`apt-get install npm` does it on Debian) and let it reach its registry",
)


def require(toolchain: Toolchain) -> str:
    """Path of the toolchain's program; the test is left out where it is missing or too old."""
    path = shutil.which(toolchain.program)
    if path is None:
        left_out(toolchain, f"there is no `{toolchain.program}` on PATH")
    answer = subprocess.run([path, *toolchain.version], capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r"\d+(\.\d+)+", answer.stdout + answer.stderr)
    if answer.returncode != 0 or found is None:
        left_out(toolchain, f"`{toolchain.program} {' '.join(toolchain.version)}` fails")
    if tuple(int(part) for part in found[0].split(".")) < toolchain.oldest:
        left_out(toolchain, f"{toolchain.program} is {found[0]}, {'.'.join(map(str, toolchain.oldest))} is needed")
    return path


def left_out(toolchain: Toolchain, why: str) -> NoReturn:
    """Skips the test, or fails it where toolchains are demanded."""
    reason = f"{LEFT_OUT}tests of {toolchain.name}, because {why}; to run them, {toolchain.how}"
    if os.environ.get(_DEMAND) == "1":
        pytest.fail(f"{_DEMAND} is 1, but {reason}", pytrace=False)
    pytest.skip(reason)


def summary(reports: Iterable[Any]) -> list[str]:
    """What skipped tests' reports say was left out, one line for each reason, sorted.

    A line has the number of tests.
    """
    reasons = [report.longrepr[2] for report in reports if isinstance(getattr(report, "longrepr", None), tuple)]
    texts = [reason.removeprefix("Skipped: ") for reason in reasons]
    counted = {text: texts.count(text) for text in texts if text.startswith(LEFT_OUT)}
    return [f"{text} ({count} test{'s' if count > 1 else ''})" for text, count in sorted(counted.items())]
