"""The ledger of a request's time, by state.

Exactly one state runs at a time, so that the parts never overlap and leave nothing out.

Owns the states and the arithmetic. Does not decide transitions (the engine and the scheduler call
them) and reads no clock. All times are nanoseconds on the engine's clock.

    queued -> prefill -> decode            a request's ordinary way
    prefill or decode -> preempted -> back when none of its sequences has a row any more, until one
    has anything started -> restarting -> back when the worker is lost, until one of its sequences
    has a row again
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Phase(enum.IntEnum):
    """What a request is doing. With several outputs: the furthest of them."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3
    RESTARTING = 4
    ENDED = 5


class Ledger:
    """One request's account.

    The parts' sum is the service's time plus the time from arrival to end.
    """

    __slots__ = (
        "_arrival_ns",
        "_service_ns",
        "_since_ns",
        "_waits_as",
        "accepted_tokens",
        "cached_tokens",
        "draft_tokens",
        "ended_at_ns",
        "first_token_at_ns",
        "parts_ns",
        "phase",
        "preemptions",
        "started_at_ns",
        "stays",
        "step_count",
    )

    def __init__(self, arrival_ns: int, service_ns: int) -> None:
        """The request has arrived, and is queued."""
        self._arrival_ns = arrival_ns
        self._service_ns = service_ns
        self._since_ns = arrival_ns
        self.phase = Phase.QUEUED
        # What the time until the first step here counts as.
        self._waits_as = Phase.QUEUED
        # Indexed by phase.
        self.parts_ns = [service_ns, 0, 0, 0, 0]
        self.started_at_ns = 0
        self.first_token_at_ns = 0
        self.ended_at_ns = 0
        self.step_count = 0
        self.preemptions = 0
        self.cached_tokens = 0
        # Drafted tokens that settled steps computed, and how many of these were settled.
        self.draft_tokens = 0
        self.accepted_tokens = 0
        # Of a recorded request: (phase, begin, end) of each stay so far, in order and without gaps.
        self.stays: list[tuple[Phase, int, int]] | None = None

    def resume(self, parts_ns: Sequence[int], ttft_ns: int) -> None:
        """Takes over the account of an earlier attempt, whose engine was lost.

        Args:
            parts_ns: Parts of the service's time, by phase; what they lack was queued.
            ttft_ns: From the arrival at the service to the first token; 0: there was none.
        """
        assert self.phase is Phase.QUEUED, "an attempt follows another before anything is computed"
        rest_ns = self._service_ns - sum(parts_ns[Phase.PREFILL :])
        assert rest_ns >= 0, "an earlier attempt took no longer than the request is here"
        self.parts_ns = [rest_ns, *parts_ns[Phase.PREFILL :]]
        if sum(parts_ns[Phase.PREFILL :]):
            self._waits_as = Phase.RESTARTING
        if ttft_ns:
            self.first_token_at_ns = self._arrival_ns - self._service_ns + ttft_ns

    @property
    def asked_at_ns(self) -> int:
        """When the call arrived at the service."""
        return self._arrival_ns - self._service_ns

    @property
    def started(self) -> bool:
        """Whether a first step was planned."""
        return self.phase is not Phase.QUEUED

    @property
    def ttft_ns(self) -> int:
        """From the arrival at the service to the first token; 0: there was none."""
        return self.first_token_at_ns and self.first_token_at_ns - self._arrival_ns + self._service_ns

    def computing(self, now_ns: int) -> None:
        """Notes that a sequence of the request took a row."""
        if self.phase is Phase.QUEUED:
            self.started_at_ns = now_ns
        if self.phase is not Phase.DECODE:
            self._enter(Phase.DECODE if self.first_token_at_ns else Phase.PREFILL, now_ns)

    def first_token(self, now_ns: int) -> None:
        """Notes that the request's first token was read."""
        self.first_token_at_ns = now_ns
        if self.phase is Phase.PREFILL:
            self._enter(Phase.DECODE, now_ns)

    def preempted(self, now_ns: int) -> None:
        """Notes that the last sequence of the request that had a row lost it."""
        self._enter(Phase.PREEMPTED, now_ns)

    def restarting(self, now_ns: int) -> None:
        """The worker was lost. A request that was still queued goes on waiting as such."""
        if self.started:
            self._enter(Phase.RESTARTING, now_ns)

    def end(self, now_ns: int) -> None:
        """Notes that the request's last output ended."""
        self._enter(Phase.ENDED, now_ns)
        self.ended_at_ns = now_ns

    def _enter(self, phase: Phase, now_ns: int) -> None:
        assert self.phase is not Phase.ENDED, "an ended request has no more time to account for"
        waited = self.phase is Phase.QUEUED
        self.parts_ns[self._waits_as if waited else self.phase] += now_ns - self._since_ns
        if self.stays is not None:
            self._note_stay(self.stays, now_ns)
        self._since_ns = now_ns
        self.phase = phase

    def _note_stay(self, stays: list[tuple[Phase, int, int]], now_ns: int) -> None:
        """The phase is left now.

        Two stays in the same phase with nothing between them are one; one without length is none.
        """
        if now_ns == self._since_ns:
            return
        if stays and stays[-1][0] is self.phase:
            stays[-1] = (self.phase, stays[-1][1], now_ns)
        else:
            stays.append((self.phase, self._since_ns, now_ns))
