"""What an operator sees of a start.

It shows the memory plan, a bar or lines for each phase, and how long each took.

Owns the form only. On a terminal every phase has a bar of rich's; elsewhere a line when it begins,
now and then one in between, and one with its seconds at its end. One report per life of the
workers.
"""

from __future__ import annotations

import sys
import time

import rich.console
import rich.progress

from headrace_backend.server.logs import format_bytes, get_logger
from headrace_backend.step.messages import LoadProgress, MemoryPlan

_LINE_INTERVAL_S = 2.0
# Sizes of a plan, by the names that its line has for them.
_SIZES = {
    "device_memory": "device_bytes",
    "total": "total_bytes",
    "weight": "weight_bytes",
    "activation": "activation_bytes",
    "graph": "graph_bytes",
    "other": "other_bytes",
    "reserve": "reserve_bytes",
    "kv_cache": "kv_cache_bytes",
    "kv_block": "kv_block_bytes",
    "pinned_host": "pinned_host_bytes",
}


class StartReport:
    """Shows what one worker reports while it starts."""

    def __init__(self, rank: int, shows_bars: bool) -> None:
        """An empty report.

        Args:
            rank: The worker's.
            shows_bars: Whether stderr is a terminal whose lines are for people.
        """
        self._log = get_logger(rank=rank)
        self._bars = _Bars() if shows_bars else None
        # The other ranks do the same at the same time.
        self._tells_lines = rank == 0
        # Phase -> when its first message came.
        self._begun_s: dict[str, float] = {}
        self._line_s = 0.0
        # Where the start is, for the message of one that does not go on.
        self.position = "has said nothing"

    def on_memory_plan(self, plan: MemoryPlan) -> None:
        """Writes the plan as one line, without the sizes that are 0."""
        sizes = {name: format_bytes(size) for name, field in _SIZES.items() if (size := getattr(plan, field))}
        event = "memory plan, measured" if plan.is_measured else "memory plan"
        kv_tokens = plan.num_blocks * plan.block_size
        self._log.info(event, device=plan.device, **sizes, num_blocks=plan.num_blocks, kv_tokens=kv_tokens)

    def on_progress(self, progress: LoadProgress) -> None:
        """Moves the phase's bar, or writes a line."""
        now = time.monotonic()
        self.position = f"is in {progress.phase!r}, {progress.done} of {progress.total} {progress.unit}"
        begun_s = self._begun_s.setdefault(progress.phase, now)
        finished = progress.done >= progress.total
        if self._bars is not None:
            self._bars.update(progress, now - begun_s)
        elif self._tells_lines and (finished or now - self._line_s >= _LINE_INTERVAL_S):
            self._line_s = now
            seconds = {"seconds": round(now - begun_s, 2)} if finished else {}
            self._log.info(
                "loading", phase=progress.phase, done=progress.done, total=progress.total, unit=progress.unit, **seconds
            )
        if finished:
            # A phase may come again.
            del self._begun_s[progress.phase]

    def close(self) -> None:
        """Leaves the terminal as it was; what the bars showed stays."""
        if self._bars is not None:
            self._bars.close()


class _Bars:
    """One bar per phase, on stderr. Lines that are logged meanwhile go above them."""

    def __init__(self) -> None:
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[unit]}, {task.fields[seconds]:.1f} s"),
            console=rich.console.Console(file=sys.stderr),
            redirect_stdout=False,
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def update(self, progress: LoadProgress, seconds: float) -> None:
        if not self._tasks:
            self._progress.start()
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._progress.add_task(
                progress.phase, total=progress.total, unit=progress.unit, seconds=0.0
            )
        self._progress.update(
            self._tasks[progress.phase], completed=progress.done, total=progress.total, seconds=seconds
        )

    def close(self) -> None:
        if self._tasks:
            self._progress.stop()
