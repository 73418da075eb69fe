"""How fast the engine is, measured on its own steps.

Owns three averages: prompt tokens a second, output tokens a second, and how long a sequence keeps its row. Decides nothing (`admission`).
"""

from __future__ import annotations

# Weight of the newest step or sequence in a running average: the last hundred or so count.
_WEIGHT = 0.02
_NS_PER_S = 1_000_000_000
# Output tokens a second are counted over windows of this length; the last complete one is reported.
_WINDOW_NS = 2 * _NS_PER_S


class Rates:
    """Running averages; 0 while nothing was measured."""

    __slots__ = ("_last_rate", "_window_began_ns", "_window_tokens", "prefill_tokens_per_s", "row_time_ns")

    def __init__(self, now_ns: int) -> None:
        """Nothing measured."""
        self.prefill_tokens_per_s = 0.0
        self.row_time_ns = 0.0
        self._window_began_ns = now_ns
        self._window_tokens = 0
        self._last_rate = 0.0

    def note_step(self, now_ns: int, duration_ns: int, num_prefill_tokens: int, num_output_tokens: int) -> None:
        """A step was settled."""
        if num_prefill_tokens and duration_ns > 0:
            measured = num_prefill_tokens * _NS_PER_S / duration_ns
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, measured)
        self._roll(now_ns)
        self._window_tokens += num_output_tokens

    def note_request(self, active_ns: int) -> None:
        """A request ended so long after its first step."""
        self.row_time_ns = _average(self.row_time_ns, active_ns)

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


def _average(average: float, measured: float) -> float:
    return average + _WEIGHT * (measured - average) if average else float(measured)
