"""Outputs that are chosen at the end from more sequences than are reported.

Owns what a request with such outputs keeps (`Selection`), the choice of the n best of several drawn
outputs (`BestOf`), and how what was chosen becomes the outputs that readers see (`publish`). The
choice among the hypotheses of a search is `beam_search`.

The sequences of such a request have logs of their own, which nobody reads; the request's logs, one
for each output, stay empty until all sequences have ended. So nothing is sent before the end, and
an engine that takes the request over begins anew and sends nothing twice.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple, Protocol

from headrace_backend.engine.events import EndReason, LogprobColumns, OutputEnd
from headrace_backend.engine.requests.token_log import OutputLog
from headrace_request.rule_kinds import Violation

_OTHER_OUTPUT = "the engine that took the request over came to another output than the one that was lost"


class Chosen(NamedTuple):
    """One output, as it was chosen."""

    tokens: array[int]
    # Of all of its tokens; None: they were not asked for.
    logprobs: LogprobColumns | None
    # Its index is not that of the output yet.
    end: OutputEnd


class Selection(Protocol):
    """What chooses the outputs of a request."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences that were computed for the outputs."""

    def choose(self, end: OutputEnd) -> list[Chosen]:
        """The outputs, best first, after all sequences have ended; at most n.

        `end` is how the last of them ended.
        """

    def forget(self) -> None:
        """Drops everything but the number of tokens."""


class BestOf:
    """The n outputs with the largest mean log probability of their tokens."""

    def __init__(self, n: int, logs: AbstractSequence[OutputLog]) -> None:
        """Chooses from logs that have log probabilities."""
        self._n = n
        self._logs = logs
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self._num_tokens + sum(len(log.tokens) for log in self._logs)

    def choose(self, end: OutputEnd) -> list[Chosen]:
        """The n best; those that came to their own end precede those that were ended before it."""
        best = sorted(self._logs, key=_goodness, reverse=True)[: self._n]
        return [_scored(log) for log in best]

    def forget(self) -> None:
        """Drops the logs."""
        self._num_tokens, self._logs = self.num_tokens, ()


def publish(logs: AbstractSequence[OutputLog], chosen: AbstractSequence[Chosen]) -> None:
    """Fills the logs that readers see with the outputs that were chosen, and ends them.

    An earlier attempt whose engine was lost while it sent them may have emitted some: these are not
    sent again, and an output that goes on otherwise ends with an error. Outputs that a search did
    not find, as there are no other tokens that can be chosen, end by the rule that n breaks.
    """
    for index, log in enumerate(logs):
        if log.end is not None:
            continue
        if index >= len(chosen):
            rule = f"must be at most {len(chosen)}: the search came to no other outputs that can be generated"
            log.finish(OutputEnd(index, EndReason.ERROR, broken=Violation("spec.n", rule)))
            continue
        output, emitted = chosen[index], log.tokens
        if output.tokens[: len(emitted)] != emitted:
            log.finish(OutputEnd(index, EndReason.ERROR, error=_OTHER_OUTPUT))
            continue
        log.fill(output.tokens, output.logprobs, dataclasses.replace(output.end, output_index=index))


def _mean_logprob(log: OutputLog) -> float:
    assert log.logprobs is not None, "outputs are chosen by their log probabilities"
    return math.fsum(log.logprobs.sampled) / len(log.tokens) if log.tokens else -math.inf


def _goodness(log: OutputLog) -> tuple[bool, float]:
    assert log.end is not None, "outputs are chosen when all have ended"
    return log.end.reason in (EndReason.STOP, EndReason.LENGTH), _mean_logprob(log)


def _scored(log: OutputLog) -> Chosen:
    assert log.end is not None, "outputs are chosen when all have ended"
    score = _mean_logprob(log) if log.tokens else None
    return Chosen(log.tokens, log.logprobs, dataclasses.replace(log.end, score=score))
