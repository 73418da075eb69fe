"""Compiles the lookup in rows and memories for a card that is not here, as its launchers would.

    python -m tests.support.compiled_suffix 90

prints one line of JSON per kernel that is different, after steps of several sizes.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from tests.support.compiled_kernels import compiling_for, resources

from headrace_kernels.speculation import suffix


def launch_all(num_drafts: int) -> None:
    """Launches a lookup and the remembering of answers for steps whose columns lie anywhere."""
    history = torch.zeros(257, 8192, dtype=torch.int32)
    memory = torch.zeros(65, 1 << 16, dtype=torch.int32)
    ends, columns = torch.zeros(65, dtype=torch.int64), torch.zeros(900, dtype=torch.int32)
    wide = torch.zeros(900, dtype=torch.int64)
    for num_rows, first in ((1, 0), (2, 1), (16, 4), (17, 3)):
        rows, slots = columns[first : first + num_rows], columns[first + 300 : first + 300 + num_rows]
        lengths = wide[first : first + num_rows]
        suffix.propose_suffix(history, rows, lengths, memory, slots, num_drafts)
        suffix.remember(memory, ends, slots, history, rows, lengths, wide)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    suffix.uses_triton = lambda tensor: True  # type: ignore[assignment]  # the tensors are a CPU's
    with compiling_for(int(sys.argv[1])) as compiled:
        launch_all(4)
    for kernel in {id(kernel): kernel for kernel in compiled}.values():
        print(json.dumps(resources(kernel)))
