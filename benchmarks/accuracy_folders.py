"""Folders that `headrace quantize` makes of the demo model, for `accuracy`: how each is made, and the text that they are calibrated on.

Owns the text: documents of the corpus as training saw their like, other ones by their seed, none with values or phrasings that questions and held-out text have.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from corpus import render, training_item  # noqa: I001  # accuracy_tasks puts the demo's scripts on the path
from corpus_draw import Draw

from benchmarks.accuracy_tasks import DEMO

_SEED = 77_021
_DOCUMENTS = 2_000
# Whatever is the same for all: the demo model's MLP has 704 inputs, which groups of 128 do not divide.
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


def calibration_text() -> str:
    """Documents as the model reads them, one after the other."""
    draw = Draw(_SEED, "train")
    items = [training_item(draw) for _ in range(_DOCUMENTS)]
    return "".join(f"<|bos|>{render(item.turns)}{'<|eos|>' if item.turns[0][0] == 'text' else ''}" for item in items)


def written_folders(root: pathlib.Path, threads: int) -> Iterator[tuple[str, pathlib.Path]]:
    """Makes the folders one by one: name and place of each.

    Raises:
        subprocess.CalledProcessError: A command failed; what it said is on stderr.
    """
    text = root / "calibration.txt"
    text.write_text(calibration_text(), encoding="utf-8")
    for index, written in enumerate(WRITTEN):
        out = root / f"demo-{index}"
        command = [
            sys.executable,
            "-m",
            "headrace_supervisor",
            "quantize",
            str(DEMO),
            str(out),
            *written.options,
            *_OPTIONS,
        ]
        given = ["--calibration", str(text), "--threads", str(threads)]
        subprocess.run([*command, *given], check=True, stdout=subprocess.DEVNULL)
        yield written.name, out
