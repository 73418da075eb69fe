"""Writes the PTX of our kernels for sm_90, so that two states of the tree can be compared.

    python -m tests.support.kernel_code FOLDER [ROOM ...]

compiles what the tests of compilation compile (`compiled_kernels`' rooms, and the modules of other
rooms) and writes the PTX of each kernel to a file, without what says where a line stands in the
source. After a change that is to leave the code of a card as it was, `diff -rq` of the folders of
both states prints nothing.
"""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import sys
from typing import Any
from unittest import mock

import triton
from tests.support import compiled_kernels

_ARCH = 90
# Modules that print the resources of their kernels, by the room that they compile.
_MODULES = {
    "recurrence": "compiled_recurrence",
    "sampling": "compiled_sampling",
    "speculation": "compiled_speculation",
    "suffix": "compiled_suffix",
    "all_reduce": "compiled_all_reduce",
}


def without_places(ptx: str) -> str:
    """The PTX without lines, files and comments of the source."""
    # Sections for debuggers stand last; labels of theirs are in the code.
    code = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    code = re.sub(r"^\$L__(?:tmp|func_begin|func_end)\w*:\n", "", code, flags=re.MULTILINE)
    code = re.sub(r"^[ \t]*\.(?:loc|file)\s.*\n", "", code, flags=re.MULTILINE)
    return re.sub(r"[ \t]*//.*", "", code)


def kernels_of(room: str) -> list[Any]:
    """The kernels of a room, in the order in which its launchers are called."""
    if room in compiled_kernels._ROOMS:
        return compiled_kernels._ROOMS[room](_ARCH)
    kernels: list[Any] = []

    def keep(kernel: Any) -> dict[str, Any]:
        kernels.append(kernel)
        return {}

    with mock.patch.object(compiled_kernels, "resources", keep), mock.patch.object(sys, "argv", ["", str(_ARCH)]):
        runpy.run_module(f"tests.support.{_MODULES[room]}", run_name="__main__")
    return kernels


def main(folder: pathlib.Path, rooms: list[str]) -> None:
    """Writes a file for each kernel: its room, its place in it and its name."""
    folder.mkdir(parents=True, exist_ok=True)
    # Those that compile all combinations have what their shorter ones have.
    everything = [room for room in compiled_kernels._ROOMS if f"{room}_all" not in compiled_kernels._ROOMS]
    for room in rooms or [*everything, *_MODULES]:
        kernels = {id(kernel): kernel for kernel in kernels_of(room)}.values()
        for place, kernel in enumerate(kernels):
            path = folder / f"{room}-{place:03}-{kernel.metadata.name}.ptx"
            path.write_text(without_places(kernel.asm["ptx"]))
        print(f"{room}: {len(kernels)} kernels", file=sys.stderr)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
