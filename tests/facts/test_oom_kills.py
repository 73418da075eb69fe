"""What is said of a SIGKILL.

Whether the kernel sent it for want of memory, in both versions of control groups, and where nobody
can know.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from tests.support.memory_group import TAKES_MEMORY, memory_group

from headrace_facts.oom_kills import RecentOomKills

KNOWN = ", the kernel's for want of memory (OOM kill)"
NONE = ", which was no OOM kill of the kernel's"
UNKNOWN = ", which the kernel sends too when memory runs out"
MIB = 1 << 20


class Machine:
    """What a kernel shows of a process's control groups, in a folder, and a clock."""

    def __init__(self, folder: pathlib.Path, groups: str, *mounts: str) -> None:
        self.proc = folder / "proc"
        self.proc.mkdir()
        (self.proc / "cgroup").write_text(groups)
        lines = [f"3{index} 23 0:3{index} {mount}" for index, mount in enumerate(mounts)]
        (self.proc / "mountinfo").write_text(
            "\n".join(["23 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw", *lines])
        )
        self.now_s = 1000.0

    def kills(self) -> RecentOomKills:
        return RecentOomKills(self.proc, lambda: self.now_s)


def counted(file: pathlib.Path, count: int) -> None:
    """Writes a counter as both versions do, among others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"low 0\nmax 7\noom {count + 5}\noom_kill {count}\noom_group_kill 9\n")


def version_2(folder: pathlib.Path, group: str = "/", root: str = "/") -> Machine:
    return Machine(folder, f"0::{group}\n", f"{root} {folder}/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate")


@pytest.mark.parametrize(
    ("group", "root", "file"),
    [
        # As a container sees itself, a service of systemd, and a container without a namespace of
        # control groups.
        ("/", "/", "memory.events"),
        ("/system.slice/headrace.service", "/", "system.slice/headrace.service/memory.events"),
        ("/docker/1f", "/docker/1f", "memory.events"),
        # A group that does not count memory is part of the one above it.
        ("/pod/leaf", "/", "pod/memory.events"),
    ],
)
def test_a_kill_that_the_group_counts_is_reported(tmp_path: pathlib.Path, group: str, root: str, file: str) -> None:
    counter = tmp_path / "cg" / file
    counted(counter, 3)
    kills = version_2(tmp_path, group, root).kills()
    assert kills.after_sigkill() == NONE
    counted(counter, 4)
    assert kills.after_sigkill() == KNOWN


def test_version_1_counts_elsewhere_also_beside_version_2(tmp_path: pathlib.Path) -> None:
    machine = Machine(
        tmp_path,
        "5:cpuset,cpu:/other\n4:memory:/docker/1f\n0::/\n",
        f"/ {tmp_path}/cpu rw - cgroup cgroup rw,cpuset,cpu",
        f"/ {tmp_path}/memory rw - cgroup cgroup rw,memory",
        f"/ {tmp_path}/unified rw - cgroup2 cgroup2 rw",
    )
    (tmp_path / "unified").mkdir()
    counter = tmp_path / "memory" / "docker" / "1f" / "memory.oom_control"
    counter.parent.mkdir(parents=True)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    kills = machine.kills()
    assert kills.after_sigkill() == NONE
    counter.write_text("oom_kill_disable 0\nunder_oom 1\noom_kill 1\n")
    assert kills.after_sigkill() == KNOWN


def test_a_kill_of_long_ago_is_not_taken_for_this_one(tmp_path: pathlib.Path) -> None:
    counter = tmp_path / "cg" / "memory.events"
    counted(counter, 0)
    machine = version_2(tmp_path)
    kills = machine.kills()
    counted(counter, 1)
    for _ in range(10):
        machine.now_s += 1
        kills.look()
    # Ten seconds: what holds much memory takes seconds to end.
    assert kills.after_sigkill() == KNOWN
    for _ in range(10):
        machine.now_s += 1
        kills.look()
    assert kills.after_sigkill() == NONE
    counted(counter, 2)
    assert kills.after_sigkill() == KNOWN


@pytest.mark.parametrize("text", [None, "", "oom 3\n", "oom_kill\n", "oom_kill many\n", "oom_kill 1 2\n"])
def test_a_count_that_cannot_be_read_leaves_it_open(tmp_path: pathlib.Path, text: str | None) -> None:
    (tmp_path / "cg").mkdir()
    if text is not None:
        (tmp_path / "cg" / "memory.events").write_text(text)
    assert version_2(tmp_path).kills().after_sigkill() == UNKNOWN


def test_a_count_that_is_gone_later_leaves_it_open(tmp_path: pathlib.Path) -> None:
    counter = tmp_path / "cg" / "memory.events"
    counted(counter, 0)
    kills = version_2(tmp_path).kills()
    counter.unlink()
    assert kills.after_sigkill() == UNKNOWN


@pytest.mark.parametrize(("group", "root"), [("/../elsewhere", "/"), ("/docker/2e", "/docker/1f")])
def test_a_group_out_of_sight_leaves_it_open(tmp_path: pathlib.Path, group: str, root: str) -> None:
    # The counter in sight is another group's.
    counted(tmp_path / "cg" / "memory.events", 0)
    assert version_2(tmp_path, group, root).kills().after_sigkill() == UNKNOWN


def test_without_control_groups_it_is_left_open(tmp_path: pathlib.Path) -> None:
    assert RecentOomKills(tmp_path / "nothing").after_sigkill() == UNKNOWN


def test_a_real_limit_is_found() -> None:
    program = (
        "import subprocess, sys\n"
        "from headrace_facts.oom_kills import RecentOomKills\n"
        "for script in sys.argv[1:]:\n"
        "    kills = RecentOomKills()\n"
        "    code = subprocess.run([sys.executable, '-c', script]).returncode\n"
        "    print(f'{code}{kills.after_sigkill()}')\n"
    )
    killed_otherwise = "import os; os.kill(os.getpid(), 9)"
    with memory_group(128 * MIB) as inside:
        reported = subprocess.run(
            [*inside, sys.executable, "-c", program, killed_otherwise, TAKES_MEMORY, killed_otherwise],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    assert reported.stdout.splitlines() == [f"-9{NONE}", f"-9{KNOWN}", f"-9{NONE}"]
