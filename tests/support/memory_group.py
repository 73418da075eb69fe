"""A control group with a limit of memory, in which the kernel ends for real what takes more."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest
from tests.support.processes import wait_until

# Where version 1 has the groups that bound memory, and where version 2 has all.
_PARENTS = (pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup"))
# Memory, then memory with swap; both are absent from a group that does not bound memory, the second
# from a kernel that does not count swap.
_VERSION_1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
_VERSION_2 = ("memory.max", "memory.swap.max")

# A program, in Python, that takes memory until it is ended.
TAKES_MEMORY = "taken = []\nwhile True: taken.append(bytearray(b'x') * (16 << 20))\n"


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[list[str]]:
    """Returns the beginning of a command line that runs in a new control group.

    At the end nothing may run there any more.

    Skips the test where this user can make no such group, and says why.
    """
    parent = next(parent for parent in _PARENTS if parent.is_dir())
    folder = parent / f"headrace-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        _limit(folder, limit_bytes)
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), what="the control group is empty")
        folder.rmdir()


def _limit(folder: pathlib.Path, limit_bytes: int) -> None:
    for (memory, swap), swap_limit in ((_VERSION_1, limit_bytes), (_VERSION_2, 0)):
        if (folder / memory).exists():
            (folder / memory).write_text(str(limit_bytes))
            if (folder / swap).exists():
                (folder / swap).write_text(str(swap_limit))
            return
    pytest.skip(f"control groups in {folder.parent} do not bound memory")
