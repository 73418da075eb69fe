"""Folders that `headrace quantize` makes of the demo model, for `accuracy`.

Owns the commands. The text is of the training split, so that no question and no held-out text is in
it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

from benchmarks.accuracy_tasks import DEMO, training_text

_SEED = 77_021
_DOCUMENTS = 2_000
# Whatever is the same for all: the demo model's MLP has 704 inputs, which groups of 128 do not
# divide.
_OPTIONS = ("--group-size", "64", "--samples", "128", "--sequence-length", "512", "--device", "cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """One way to call `headrace quantize`."""

    name: str
    options: tuple[str, ...]


WRITTEN = (
    Written("rtn int4, groups of 64, folder", ("--method", "rtn", "--asymmetric")),
    Written("gptq int4, groups of 64, folder", ("--method", "gptq", "--asymmetric")),
    Written("awq int4, groups of 64, folder", ("--method", "awq", "--asymmetric")),
    Written("gptq int4, groups of 64, symmetric, folder", ("--method", "gptq")),
)


def write_folder(written: Written, root: pathlib.Path, threads: int) -> pathlib.Path:
    """Makes one of the folders inside `root`, which is empty or has others.

    Raises:
        subprocess.CalledProcessError: The command failed; what it said is on stderr.
    """
    text = root / "calibration.txt"
    if not text.exists():
        text.write_text(training_text(_SEED, _DOCUMENTS), encoding="utf-8")
    out = root / f"demo-{WRITTEN.index(written)}"
    program = [sys.executable, "-m", "headrace_supervisor", "quantize", str(DEMO), str(out)]
    given = ["--calibration", str(text), "--threads", str(threads)]
    subprocess.run([*program, *written.options, *_OPTIONS, *given], check=True, stdout=subprocess.DEVNULL)
    return out
