"""The time that a generation spent on engines that were lost.

Owns the account of it, from what this process saw: a lost engine took its own ledger along. The
parts mean what they mean in the engine's (see `RequestDone`), where a request that was computed and
is not any more counts as restarting until it is computed again. All parts still add up.
"""

from __future__ import annotations

from headrace_protos.engine.v1 import engine_pb2


class Interruptions:
    """One generation's account. All times are CLOCK_MONOTONIC nanoseconds.

    Attributes:
        lost_ns: when the engine was lost; 0 once the generation is computed again.
    """

    __slots__ = (
        "_arrival_ns",
        "_cached_tokens",
        "_decode_ns",
        "_first_token_ns",
        "_last_lost_ns",
        "_prefill_ns",
        "_restart_at_loss_ns",
        "_restart_ns",
        "_resumed_ns",
        "_started_ns",
        "lost_ns",
    )

    def __init__(self, arrival_ns: int) -> None:
        self._arrival_ns = arrival_ns
        self._started_ns = 0
        self._first_token_ns = 0
        self._cached_tokens = 0
        self._resumed_ns = 0
        self._last_lost_ns = 0
        self._prefill_ns = self._decode_ns = 0
        # All pauses that are over, and those that were when the last engine was lost.
        self._restart_ns = self._restart_at_loss_ns = 0
        self.lost_ns = 0

    @property
    def has_started(self) -> bool:
        """Whether an engine computed it at any time."""
        return self._started_ns > 0

    def started(self, now_ns: int, cached_tokens: int) -> int | None:
        """Notes that an engine began to compute; returns the pause if one had begun before."""
        if not self._started_ns:
            self._started_ns, self._cached_tokens, self.lost_ns = now_ns, cached_tokens, 0
            return None
        if not self.lost_ns:
            return None
        pause_ns = now_ns - self.lost_ns
        self._restart_ns += pause_ns
        self._resumed_ns, self.lost_ns = now_ns, 0
        return pause_ns

    def first_token(self, now_ns: int) -> None:
        """Notes an output's first token; the first output's counts."""
        self._first_token_ns = self._first_token_ns or now_ns

    def lost(self, now_ns: int) -> None:
        """Notes that the engine was lost."""
        if self.lost_ns or not self._started_ns:
            return
        since_ns = self._resumed_ns or self._started_ns
        border_ns = min(max(self._first_token_ns or now_ns, since_ns), now_ns)
        self._prefill_ns += border_ns - since_ns
        self._decode_ns += now_ns - border_ns
        self.lost_ns = self._last_lost_ns = now_ns
        self._restart_at_loss_ns = self._restart_ns

    def account(self, now_ns: int) -> engine_pb2.RequestDone:
        """Returns what has become of the time until now, but for the queue.

        For an engine that goes on with the generation and keeps its account from then on.
        """
        waited_ns = now_ns - self.lost_ns if self.lost_ns else 0
        return engine_pb2.RequestDone(
            prefill_ns=self._prefill_ns,
            decode_ns=self._decode_ns,
            engine_restart_ns=self._restart_ns + waited_ns,
            ttft_ns=self._first_token_ns and self._first_token_ns - self._arrival_ns,
        )

    def add_to(self, done: engine_pb2.RequestDone) -> None:
        """Makes the last engine's account the account of the whole generation.

        That engine counted everything before it, and its own queue, as queued; what it computed
        until its own first token was the prompt and what had been emitted.
        """
        if not self._last_lost_ns:
            return
        waited_ns = max(0, done.queued_ns - (self._last_lost_ns - self._arrival_ns))
        again_ns, decoded = done.prefill_ns, 0 < self._first_token_ns < self._last_lost_ns
        done.queued_ns = self._started_ns - self._arrival_ns
        done.prefill_ns = self._prefill_ns + (0 if decoded else again_ns)
        done.decode_ns += self._decode_ns + (again_ns if decoded else 0)
        done.engine_restart_ns += self._restart_at_loss_ns + waited_ns
        done.cached_tokens = self._cached_tokens
        if decoded:
            done.ttft_ns = self._first_token_ns - self._arrival_ns
