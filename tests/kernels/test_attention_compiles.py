"""Attention's kernels compile for cards that this machine may not have, within their limits."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def compiled(arch: int) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.support.compiled_kernels", "attention", str(arch)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("arch", [80, 86, 90])
def test_all_kernels_fit_the_card(arch: int) -> None:
    kernels = compiled(arch)
    names = {kernel["name"] for kernel in kernels}
    expected = {"_split_kernel", "_merge_kernel", "_paged_kernel"}
    assert names == (expected | {"_gather_kernel", "_gathered_kernel"} if arch >= 90 else expected)
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Registers spilled inside a loop cost bandwidth. The paged kernel spills some on sm_90, where it was the fastest with this tile all the same; sm_86 has not been looked at.
    may_spill = {80: set(), 86: names, 90: {"_paged_kernel"}}[arch]
    assert {kernel["name"] for kernel in kernels if kernel["stack_bytes"] > 0} <= may_spill
    if arch >= 90:
        products = {kernel["name"]: kernel["warpgroup_products"] for kernel in kernels}
        assert products["_gathered_kernel"] >= 4 and products["_paged_kernel"] >= 4
