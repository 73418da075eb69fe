"""What an operator sees of a start.

It shows the memory plan, and a bar or lines for each phase.

Owns the form only. On a terminal every phase has a bar; elsewhere there is a line every few
seconds, also while a phase reports nothing, and one at the end of a phase that had any. What takes
less has none: the seconds of all phases are in the line of workers that are ready. One report per
life of the workers.
"""

from __future__ import annotations

import sys
import time

import rich.console

from headrace_backend.server.logs import format_bytes, get_logger
from headrace_backend.step.messages import LoadProgress, MemoryPlan
from headrace_progress.bars import Bars
from headrace_progress.phase import Phase

LINE_INTERVAL_S = 3.0
# Sizes of a plan, by the names that its line has for them.
_SIZES = {
    "device_memory": "device_bytes",
    "total": "total_bytes",
    "weight": "weight_bytes",
    "rotary": "rotary_bytes",
    "activation": "activation_bytes",
    "graph": "graph_bytes",
    "stream": "stream_bytes",
    "state": "state_bytes",
    "state_checkpoint": "checkpoint_bytes",
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
        self._bars = Bars(rich.console.Console(file=sys.stderr, soft_wrap=True)) if shows_bars else None
        # The other ranks do the same at the same time.
        self._tells_lines = rank == 0 and not shows_bars
        # The phase that goes on; None: the last one has ended.
        self._phase: Phase | None = None
        # When the last line was written, and of which phase.
        self._line_s, self._line_phase = 0.0, ""
        # Where the start is, for the message of one that does not go on.
        self.position = "has said nothing"

    def on_memory_plan(self, plan: MemoryPlan) -> None:
        """Writes the plan as one line, without the sizes that are 0."""
        sizes = {name: format_bytes(size) for name, field in _SIZES.items() if (size := getattr(plan, field))}
        event = "memory plan, measured" if plan.is_measured else "memory plan"
        # Windows hold more of them, as they give blocks back.
        kv_tokens = plan.num_blocks // plan.num_cache_groups * plan.block_size
        self._log.info(event, device=plan.device, **sizes, num_blocks=plan.num_blocks, kv_tokens=kv_tokens)

    def on_progress(self, progress: LoadProgress) -> None:
        """Moves the phase's bar, or writes a line."""
        self.position = f"is in {progress.phase!r}, {progress.done} of {progress.total} {progress.unit}"
        phase = self._moved(progress)
        if self._bars is not None:
            self._bars.update(phase)
        elif not phase.is_finished:
            self.on_tick()
        elif self._line_phase == phase.name:
            self._line(phase, seconds=round(time.monotonic() - phase.begun_s, 2))
        if phase.is_finished:
            # A phase may come again.
            self._phase, self._line_phase = None, ""

    def on_tick(self) -> None:
        """Writes a line if it is time for one; call it every few seconds."""
        if self._phase is not None and time.monotonic() - self._line_s >= LINE_INTERVAL_S:
            self._line(self._phase)

    def close(self) -> None:
        """Leaves the terminal as it was; what the bars showed stays."""
        self._phase = None
        if self._bars is not None:
            self._bars.close()

    def _moved(self, progress: LoadProgress) -> Phase:
        """The phase as it is now, a new one where it begins."""
        phase = self._phase
        if phase is None or phase.name != progress.phase:
            phase = Phase(progress.phase, progress.total, progress.unit, time.monotonic(), 0, progress.done)
        phase.done, phase.detail = progress.done, progress.detail
        self._phase = phase
        return phase

    def _line(self, phase: Phase, **seconds: float) -> None:
        if not self._tells_lines:
            return
        now = time.monotonic()
        self._line_s, self._line_phase = now, phase.name
        counts = {"done": int(phase.done), "total": int(phase.total), "unit": phase.unit} if phase.has_figure else {}
        self._log.info("loading", phase=phase.name, progress=phase.words(now), **counts, **seconds)
