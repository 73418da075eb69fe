"""How fast the engine is, measured on its own steps.

Owns three figures: prompt tokens a second, output tokens a second, and how long a sequence keeps
its row. Decides nothing (`admission`).
"""

from __future__ import annotations

# Weight of the newest request in the average of row times: the last hundred or so count.
_WEIGHT = 0.02
# A step of few prompt tokens, or the first of all, says little of what full steps reach; so the
# best rate counts, and fades by so much with every step that does not reach it.
_FADING = 0.98
_NS_PER_S = 1_000_000_000
# Output tokens a second are counted over windows of this length; the last complete one is reported.
_WINDOW_NS = 2 * _NS_PER_S


class Rates:
    """What was measured lately; 0 while nothing was."""

    __slots__ = ("_last_rate", "_window_began_ns", "_window_tokens", "prefill_tokens_per_s", "row_time_ns")

    def __init__(self, now_ns: int) -> None:
        """Nothing measured."""
        self.prefill_tokens_per_s = 0.0
        self.row_time_ns = 0.0
        self._window_began_ns = now_ns
        self._window_tokens = 0
        self._last_rate = 0.0

    def note_step(self, now_ns: int, duration_ns: int, num_prefill_tokens: int, num_output_tokens: int) -> None:
        """Notes a settled step."""
        if num_prefill_tokens and duration_ns > 0:
            measured = num_prefill_tokens * _NS_PER_S / duration_ns
            self.prefill_tokens_per_s = max(measured, self.prefill_tokens_per_s * _FADING)
        self._roll(now_ns)
        self._window_tokens += num_output_tokens

    def note_request(self, active_ns: int) -> None:
        """A request ended so long after its first step."""
        average = self.row_time_ns
        self.row_time_ns = average + _WEIGHT * (active_ns - average) if average else float(active_ns)

    def output_tokens_per_s(self, now_ns: int) -> float:
        """Over the last complete window; while the first one runs, over what there is of it."""
        self._roll(now_ns)
        elapsed = now_ns - self._window_began_ns
        if self._last_rate or elapsed <= 0:
            return self._last_rate
        return self._window_tokens * _NS_PER_S / max(elapsed, _NS_PER_S)

    def _roll(self, now_ns: int) -> None:
        elapsed = now_ns - self._window_began_ns
        if elapsed >= _WINDOW_NS:
            self._last_rate = self._window_tokens * _NS_PER_S / elapsed
            self._window_tokens = 0
            self._window_began_ns = now_ns
