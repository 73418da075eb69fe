"""The kernels of sampling compile for the oldest and the newest card that we know, without spilling much, and once: neither a batch's size nor a column's address compiles anew."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("service", "backend", "kernels", "protos/python", "clients/python", ".")


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_is_compiled_once_per_type_of_logits(arch: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / room) for room in ROOMS)
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "tests.support.compiled_sampling", str(arch)]
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    kernels = [json.loads(line) for line in output.splitlines()]
    assert Counter(kernel["name"] for kernel in kernels) == {
        "summarize_blocks_kernel": 3,
        "choose_tokens_kernel": 3,
        "summarize_rows_kernel": 3,
        "report_rows_kernel": 3,
        "penalize_rows_kernel": 1,
    }
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        # A row that truncates holds more than two rows' registers on a multiprocessor, a little; not in its loops' innermost part.
        assert kernel["stack_bytes"] <= (32 if kernel["name"] == "choose_tokens_kernel" else 0)
