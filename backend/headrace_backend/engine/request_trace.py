"""The way of one recorded request through the engine: which steps computed its prompt and sampled its tokens, and its stays in the phases of its ledger.

Owns the columns, and the fact that they become at the request's end. Written by `settlement` (only settled steps count, so what a lost worker took away never appears) and by the ledger; a
request that nobody records has none of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as AbstractSequence

from headrace_backend.engine.ledger import Ledger, Phase
from headrace_facts import facts

_PHASE_NAMES = {
    Phase.QUEUED: "queued",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.PREEMPTED: "preempted",
    Phase.RESTARTING: "restarting",
}


def _u64() -> array[int]:
    return array("Q")


class RequestTrace:
    """What is noted of one request until its end."""

    __slots__ = ("_chunks", "_ledger", "token_steps")

    def __init__(self, ledger: Ledger, num_emitted: AbstractSequence[int]) -> None:
        """Nothing computed; `num_emitted`: per output, tokens that an earlier attempt emitted. No step of ours sampled them: theirs is 0."""
        self._ledger = ledger
        ledger.stays = []
        self._chunks = _u64()
        # Per output and token, the id of the step that sampled it.
        self.token_steps = [array("Q", [0]) * count for count in num_emitted]

    def note_chunk(self, step_id: int, first_token: int, num_tokens: int) -> None:
        """A settled step computed so many tokens from `first_token` on, all known before."""
        self._chunks.extend((step_id, first_token, num_tokens))

    def finish(self, engine: str, number: int, unix_offset_ns: int) -> facts.EngineTrace:
        """The request has ended."""
        assert self._ledger.stays is not None, "set from the first moment on"
        return facts.EngineTrace(
            engine,
            number,
            unix_offset_ns,
            [facts.PhaseSpan(_PHASE_NAMES[phase], begin, end) for phase, begin, end in self._ledger.stays],
            self._chunks.tobytes(),
            [steps.tobytes() for steps in self.token_steps],
        )
