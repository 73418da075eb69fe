"""Whether a process that ended by SIGKILL was ended by the kernel, because memory had run out.

Owns the reading of the kernel's count of such kills in this process's control group, which those
that it starts are in too: `memory.events` of version 2, `memory.oom_control` of version 1. The
kernel counts before it sends the signal, whoever's limit it was: the group's, one above it, the
machine's. It does not say whom it ended, so only what was counted in the last moments before a
death counts for it.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

# From the kernel's count to a parent that hears of the end: a process that holds much memory, or
# much of a card's, takes seconds to end.
_RECENT_S: Final = 10.0
_PROC: Final = pathlib.Path("/proc/self")


class _Reading(NamedTuple):
    at_s: float
    # None: it can't be read here.
    kills: int | None


class RecentOomKills:
    """What was counted lately.

    Made before a process starts; `look` is called while it lives, at least every few seconds.

    Args:
        proc: the folder in which the kernel describes this process.
        clock: seconds that never go back.
    """

    def __init__(self, proc: pathlib.Path = _PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counter = next(_counters(proc), None)
        self._before = self._latest = self._read()

    def look(self) -> None:
        """Forgets what was counted long ago. Reads a file if the last time is long ago too."""
        if self._clock() - self._latest.at_s >= _RECENT_S:
            self._before, self._latest = self._latest, self._read()

    def after_sigkill(self) -> str:
        """What is known of a SIGKILL that nobody of ours sent and that is just heard of: goes on
        after the signal's name.
        """
        kills = self._read().kills
        if kills is None or self._before.kills is None:
            return ", which the kernel sends too when memory runs out"
        if kills > self._before.kills:
            return ", the kernel's for want of memory (OOM kill)"
        return ", which was no OOM kill of the kernel's"

    def _read(self) -> _Reading:
        return _Reading(self._clock(), None if self._counter is None else _count(self._counter))


def _counters(proc: pathlib.Path) -> Iterator[pathlib.Path]:
    """The file that has the count for this process's control group; none where there is none, or it
    is out of sight.
    """
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    # Both versions may be there, memory counted by one of them.
    for _, controllers, group in (line.split(":", 2) for line in groups):
        if "memory" in controllers.split(","):
            yield from _files(mounts, "cgroup", group, "memory.oom_control")
        elif not controllers:
            yield from _files(mounts, "cgroup2", group, "memory.events")


def _files(mounts: list[list[str]], kind: str, group: str, name: str) -> Iterator[pathlib.Path]:
    """Files of this name in a group's folder or the nearest above it, which has it where the group
    itself does not count memory.
    """
    for mount in mounts:
        root, mount_point = mount[3:5]
        file_system, options = mount[mount.index("-") + 1], mount[-1].split(",")
        of_memory = kind == "cgroup2" or "memory" in options
        # Of a group outside of a process's namespace the path leads up.
        in_sight = pathlib.PurePath(group).is_relative_to(root) and ".." not in group.split("/")
        if file_system != kind or not of_memory or not in_sight:
            continue
        folder = pathlib.Path(mount_point, pathlib.PurePath(group).relative_to(root))
        for candidate in (folder, *folder.parents):
            if candidate.is_relative_to(mount_point) and _count(candidate / name) is not None:
                yield candidate / name


def _count(counter: pathlib.Path) -> int | None:
    try:
        lines = [line.split() for line in counter.read_text().splitlines()]
        return int(dict(lines)["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
