"""The way of recorded requests through the engine.

A trace says which steps computed the prompt and sampled the tokens, and how long the request stayed
in each phase of its ledger.

Owns what is noted, and the fact that it becomes at a request's end. `settlement` notes it (only
settled steps count, so what a lost worker took away never appears) and by the ledger.

A token costs nothing: an output that decodes samples one in each step, so only the tokens are noted
from which on that is so anew. While nobody is recorded, a step costs one branch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as AbstractSequence

from headrace_backend.engine.requests.ledger import Ledger, Phase
from headrace_facts import facts, token_steps

# Indexed by phase.
_PHASE_NAMES = ("queued", "prefill", "decode", "preempted", "restarting")
assert len(_PHASE_NAMES) == Phase.ENDED

# (index of a token, the step that sampled it); the tokens after it come from the steps after that,
# one each, until the next run.
Runs = list[tuple[int, int]]


class RequestTrace:
    """What is noted of one request until its end."""

    __slots__ = ("_chunks", "_ledger", "runs")

    def __init__(self, ledger: Ledger, num_outputs: int) -> None:
        """Nothing computed."""
        self._ledger = ledger
        ledger.stays = []
        self._chunks: array[int] = array("Q")
        # Per output.
        self.runs: list[Runs] = [[] for _ in range(num_outputs)]

    def note_chunk(self, step_id: int, first_token: int, num_tokens: int) -> None:
        """A settled step computed so many tokens from `first_token` on, all known before."""
        self._chunks.extend((step_id, first_token, num_tokens))

    def finish(
        self, engine: str, number: int, unix_offset_ns: int, num_tokens: AbstractSequence[int]
    ) -> facts.EngineTrace:
        """Ends the trace of a request that has `num_tokens` tokens per output.

        Tokens that an earlier attempt emitted are included; none of our steps sampled them, so
        their step is 0.
        """
        assert self._ledger.stays is not None, "set from the first moment on"
        return facts.EngineTrace(
            engine,
            number,
            unix_offset_ns,
            [facts.PhaseSpan(_PHASE_NAMES[phase], begin, end) for phase, begin, end in self._ledger.stays],
            self._chunks.tobytes(),
            [token_steps.of_runs(runs, count) for runs, count in zip(self.runs, num_tokens, strict=True)],
        )
