"""How busy one engine is, as a service knows it: the newest report, and what was sent since.

Owns the arithmetic between two reports. Prompts that the service sends add to what is ahead of the
next one, and the engine works it off at the rate that it measured on itself. What other services
send shows with the next report.
"""

from __future__ import annotations

from typing import NamedTuple


class LoadReport(NamedTuple):
    """What an engine says of its load, every second."""

    # Prompt tokens that it computes before a prompt that comes now.
    prefill_tokens: int = 0
    # 0: it has measured none.
    prefill_tokens_per_s: float = 0.0
    # Requests that have not ended, of all services.
    open_requests: int = 0
    # Most sequences that run at once, and how long one of them runs.
    rows: int = 0
    row_s: float = 0.0


class EngineLoad:
    """The load of one engine.

    Attributes:
        report: the engine's newest; an empty one before the first, and after the connection broke.
    """

    __slots__ = ("_ahead_tokens", "_at_s", "_others_open", "report")

    def __init__(self) -> None:
        """Nothing is known."""
        self.forget()

    def forget(self) -> None:
        """The connection broke: nothing that was known holds."""
        self.report = LoadReport()
        self._ahead_tokens = 0.0
        self._at_s = 0.0
        self._others_open = 0

    def reported(self, report: LoadReport, own_open: int, now_s: float) -> None:
        """Takes a report; `own_open` are the requests that this service has there."""
        self.report = report
        self._ahead_tokens = float(report.prefill_tokens)
        self._at_s = now_s
        self._others_open = max(0, report.open_requests - own_open)

    def sent(self, tokens: int, rate: float, now_s: float) -> None:
        """Counts the tokens of a prompt that the engine will have to compute."""
        self._ahead_tokens = self._left(rate, now_s) + tokens
        self._at_s = now_s

    def num_open(self, own_open: int) -> int:
        """Returns the requests that have not ended, of all services."""
        return self._others_open + own_open

    def wait_s(self, own_open: int, rate: float, now_s: float) -> float:
        """Returns the seconds until a prompt that is sent now would be begun.

        Prompts are ahead of it and, where rows are short, sequences that must leave theirs.

        Args:
            own_open: requests that this service has there.
            rate: prompt tokens that the engine computes per second, above 0.
            now_s: the time, on the clock of the reports.
        """
        # `_left`, without another call: this is asked for each engine that is compared.
        wait_s = self._ahead_tokens / rate - (now_s - self._at_s)
        if wait_s < 0:
            wait_s = 0.0
        rows = self.report.rows
        rows_short = self._others_open + own_open + 1 - rows
        if rows and rows_short > 0:
            return max(wait_s, rows_short / rows * self.report.row_s)
        return wait_s

    def _left(self, rate: float, now_s: float) -> float:
        return max(0.0, self._ahead_tokens - rate * (now_s - self._at_s))
