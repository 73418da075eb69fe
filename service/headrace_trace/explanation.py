"""What is known of a trace once it is explained: every wait with its causes, as data.

Owns the values, which tests, JSON (`headrace trace --json`), the page and the words (words.py) read; causes.py makes them. Times are milliseconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace_trace.trace_model import Prefill
from headrace_trace.windows import Where

SLOWEST = 10


class Kind(enum.StrEnum):
    """What made a reader wait."""

    PREFILL = "prefill"
    OWN_PREFILL = "own_prefill"
    PREEMPTION = "preemption"
    ENGINE_RESTART = "engine_restart"
    ARRIVAL = "arrival"
    READER = "reader"
    SERVICE = "service"
    QUEUE = "queue"
    DEVICE = "device"
    HOST_IDLE = "host_idle"
    HOST_READ = "host_read"
    OTHER_STEPS = "other_steps"
    UNKNOWN = "unknown"
    USUAL = "usual"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a wait.

    Attributes:
        excess_ms: What it cost beyond the usual.
        step_ids: The steps it was seen in.
        step_ms: The longest of them, on the device.
        prefills: Whose prompts these steps computed, and how many tokens, most first (PREFILL: others', OWN_PREFILL: its own).
        bound: "memory" or "compute", of the longest step, with its shares of the measured ceilings.
        late_work: Whether something was compiled or captured during one of them.
    """

    kind: Kind
    excess_ms: float
    step_ids: tuple[int, ...] = ()
    step_ms: float | None = None
    prefills: tuple[Prefill, ...] = ()
    bound: str | None = None
    bandwidth_share: float | None = None
    flops_share: float | None = None
    late_work: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """The wait before a token, as its reader had it: since the token before, or since the call's arrival for the first of an output.

    Attributes:
        at_ms: When the token came, since the call's arrival.
        usual_ms: The median wait between two tokens of this trace; 0 for a first token.
        causes: The largest first; at least one.
        parts_ms: Where the time went, in order, neighbours of one kind as one.
    """

    output: int
    index: int
    step_id: int | None
    first: bool
    at_ms: float
    ms: float
    usual_ms: float
    causes: tuple[Cause, ...]
    parts_ms: tuple[tuple[Where, float], ...]

    @property
    def excess_ms(self) -> float:
        """What it took beyond the usual."""
        return max(0.0, self.ms - self.usual_ms)

    @property
    def cause(self) -> Cause:
        """The main cause."""
        return self.causes[0]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A trace explained.

    Attributes:
        ttft_ms: To the first token, as the server measured it, else as the trace shows it; None without tokens.
        left_out_tokens: What the request generated beyond `tokens`, too many for the trace.
        itl_p50_ms: Of the waits between two tokens that did not come in one message.
        ledger_ms: Where the request's time went.
        gaps: One per token, in order of outputs and tokens; those whose times are not known are left out.
    """

    request_id: str
    trace_id: str
    model: str
    duration_ms: float
    ttft_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    usual_step_ms: float
    usual_steps: int
    tokens: int
    left_out_tokens: int
    ledger_ms: dict[str, float]
    gaps: tuple[Gap, ...]

    def slowest(self, count: int = SLOWEST) -> tuple[Gap, ...]:
        """The longest waits, the longest first. Outputs that waited for the same step are told once, by the one that waited longest."""
        longest: dict[tuple[int | None, int], Gap] = {}
        for gap in sorted(self.gaps, key=lambda gap: -gap.ms):
            longest.setdefault((gap.step_id, gap.index if gap.step_id is None else -1), gap)
        return tuple(longest.values())[:count]

    def alike(self, gap: Gap) -> int:
        """How many other outputs waited for the same step."""
        return sum(
            other.step_id == gap.step_id and other.output != gap.output
            for other in self.gaps
            if gap.step_id is not None
        )
