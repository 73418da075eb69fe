"""A search for the most likely outputs of one request.

Owns the hypotheses: which tokens continue which of them, which are finished, and when the search is
over. It ends as `generate(num_beams=...)` of transformers does. Knows no sequences, rows or blocks:
each running hypothesis has a *slot*, by which its sequence is found, and a `Fork` says what moves
from slot to slot; who moves it is `scheduling.beams`.

    reports: the most likely tokens behind each running hypothesis
        -> candidates, by the sum of their log probabilities
        -> those among the first `width` that end are finished; scored by length
        -> the first `width` that do not end run on
        -> over, if the running ones can do no better than the finished ones

A hypothesis that a stop token, a stop string or the length ends counts with that token.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from headrace_backend.engine.events import EndReason, LogprobColumns, OutputEnd
from headrace_backend.engine.requests.selection import Chosen
from headrace_backend.engine.requests.stops import StopWatch
from headrace_backend.engine.requests.token_log import TokenLogprobs
from headrace_request.beam_search import BeamSearch as BeamOptions


@dataclasses.dataclass(slots=True, eq=False)
class Hypothesis:
    """Tokens that may become an output."""

    tokens: array[int]
    # Sum of the log probabilities of its tokens.
    logprob: float
    # Index of the sequence that computes it.
    slot: int
    # Its progress through the stop strings; None: there are none.
    watch: StopWatch | None
    # Of its tokens; None: nobody asked for them.
    logprobs: LogprobColumns | None


class Fork(NamedTuple):
    """A hypothesis goes on in two slots; what the second one computed before is given up."""

    parent: int
    child: int


class Finish(NamedTuple):
    """What ends a hypothesis: the rules of an output, but for beams."""

    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    # [vocab_size] the bytes of each token, where there are stop strings.
    token_bytes: AbstractSequence[bytes]


class _Candidate(NamedTuple):
    """A hypothesis with one more token."""

    logprob: float
    parent: Hypothesis
    token: int
    # The token's own log probability, and its place among the most likely ones.
    token_logprob: float
    place: int


class BeamSearch:
    """The hypotheses of one request; a `Selection`."""

    def __init__(
        self,
        options: BeamOptions,
        n: int,
        finish: Finish,
        watch: StopWatch | None = None,
        num_logprobs: int = -1,
    ) -> None:
        """Begins with the empty hypothesis, in slot 0.

        Args:
            options: Width, length penalty, and when the search ends.
            n: Outputs that are returned.
            finish: What ends a hypothesis.
            watch: Progress of an empty output through the stop strings; None: there are none.
            num_logprobs: Most likely tokens that are reported beside each; -1: no log
                probabilities.
        """
        self._options = options
        self._n = n
        self._finish = finish
        self._num_logprobs = num_logprobs
        # The most likely first.
        self.running = [Hypothesis(array("i"), 0.0, 0, watch, self._no_logprobs())]
        # The best first, each with its score in its end.
        self._finished: list[Chosen] = []
        self.num_tokens = 0
        self.is_over = False
        # Each running hypothesis has its own slot; else slot 0 computes what all of them share.
        self._forked = False
        # What is known behind the running hypotheses so far, by slot.
        self._reports: dict[int, TokenLogprobs] = {}

    @property
    def num_shared(self) -> int:
        """Tokens with which all running hypotheses begin."""
        columns = itertools.takewhile(
            lambda column: len(set(column)) == 1, zip(*(h.tokens for h in self.running), strict=True)
        )
        return sum(1 for _ in columns)

    def number_slots(self) -> None:
        """Gives the running hypotheses the slots from 0 on: all slots lost what they had."""
        for slot, hypothesis in enumerate(self.running):
            hypothesis.slot = slot
        self._forked = False
        self._reports.clear()

    def uses(self, slot: int) -> bool:
        """Whether a running hypothesis has the slot."""
        return any(hypothesis.slot == slot for hypothesis in self.running)

    def note(self, slot: int, report: TokenLogprobs) -> list[Fork] | None:
        """Takes the most likely tokens behind what a slot has computed.

        Returns which slots go on with another slot's hypothesis; None: the others are waited for.
        """
        if not self._forked:
            self._forked = True
            if len(self.running) > 1:
                # What was computed is the beginning of all.
                return [Fork(slot, hypothesis.slot) for hypothesis in self.running[1:]]
        self._reports[slot] = report
        if len(self._reports) < len(self.running):
            return None
        reports, self._reports = self._reports, {}
        return self.advance(reports)

    def advance(self, reports: Mapping[int, TokenLogprobs]) -> list[Fork]:
        """Continues each running hypothesis by one token.

        Args:
            reports: By slot, the most likely tokens behind the hypothesis: `num_row_logprobs` of
                the request, or the whole vocabulary.

        Returns:
            Which slots go on with another slot's hypothesis.
        """
        self.num_tokens += len(self.running)
        going: list[_Candidate] = []
        watches: list[StopWatch | None] = []
        for place, candidate in enumerate(self._candidates(reports)):
            if place >= self._options.width and len(going) == self._options.width:
                break
            watch = candidate.parent.watch.copy() if candidate.parent.watch is not None else None
            end = self._find_end(candidate, watch)
            if end is None and len(going) < self._options.width:
                going.append(candidate)
                watches.append(watch)
            elif end is not None and place < self._options.width:
                self._note_finished(candidate, end, reports)
        forks = self._continue(going, watches, reports)
        self.is_over = not self._may_improve()
        return forks

    def choose(self, end: OutputEnd) -> list[Chosen]:
        """The n best outputs.

        A search that was ended before it was over counts its running hypotheses as outputs that
        ended so, behind those that are finished. Before its first choices it has fewer of both than
        outputs: the others ended so without a token.
        """
        chosen = list(self._finished)
        if not self.is_over:
            chosen += [_cut(hypothesis, end, self._options.length_penalty) for hypothesis in self.running]
            chosen += [Chosen(array("i"), self._no_logprobs(), end) for _ in range(len(chosen), self._n)]
        return chosen[: self._n]

    def forget(self) -> None:
        """Drops the hypotheses."""
        self.running, self._finished = [], []

    def _no_logprobs(self) -> LogprobColumns | None:
        """Log probabilities of no tokens; None: nobody asked for them."""
        return LogprobColumns() if self._num_logprobs >= 0 else None

    def _candidates(self, reports: Mapping[int, TokenLogprobs]) -> Iterator[_Candidate]:
        """All continuations that were reported, the most likely first.

        Of equally likely ones that of the better hypothesis comes first.
        """
        return heapq.merge(
            *(self._continuations(hypothesis, reports[hypothesis.slot]) for hypothesis in self.running),
            key=lambda candidate: -candidate.logprob,
        )

    def _continuations(self, hypothesis: Hypothesis, report: TokenLogprobs) -> Iterator[_Candidate]:
        may_stop = len(hypothesis.tokens) >= self._finish.min_tokens
        for place, (token, logprob) in enumerate(zip(report.top_token_ids, report.top_logprobs, strict=True)):
            if may_stop or token not in self._finish.stop_token_ids:
                yield _Candidate(hypothesis.logprob + logprob, hypothesis, token, logprob, place)

    def _find_end(self, candidate: _Candidate, watch: StopWatch | None) -> OutputEnd | None:
        """How the candidate ends, if it does; feeds its token to its watch."""
        finish, num_tokens = self._finish, len(candidate.parent.tokens) + 1
        if candidate.token in finish.stop_token_ids:
            return OutputEnd(0, EndReason.STOP, stop_token_id=candidate.token)
        if watch is not None:
            match = watch.feed(finish.token_bytes[candidate.token], num_tokens >= finish.min_tokens)
            if match is not None:
                return OutputEnd(0, EndReason.STOP, stop_string_index=match.string_index, trim_bytes=match.trim_bytes)
        return OutputEnd(0, EndReason.LENGTH) if num_tokens >= finish.max_tokens else None

    def _note_finished(self, candidate: _Candidate, end: OutputEnd, reports: Mapping[int, TokenLogprobs]) -> None:
        tokens, logprobs = self._extended(candidate, reports)
        score = _score(candidate.logprob, len(tokens), self._options.length_penalty)
        self._finished.append(Chosen(tokens, logprobs, dataclasses.replace(end, score=score)))
        self._finished.sort(key=_score_of, reverse=True)
        del self._finished[self._options.width :]

    def _continue(
        self,
        going: list[_Candidate],
        watches: list[StopWatch | None],
        reports: Mapping[int, TokenLogprobs],
    ) -> list[Fork]:
        """Makes the candidates the running hypotheses; the first of each parent keeps its slot."""
        kept: set[int] = set()
        free = set(range(self._options.width)) - {candidate.parent.slot for candidate in going}
        unused = iter(sorted(free))
        forks: list[Fork] = []
        running: list[Hypothesis] = []
        for candidate, watch in zip(going, watches, strict=True):
            slot = candidate.parent.slot
            if slot in kept:
                slot = next(unused)
                forks.append(Fork(candidate.parent.slot, slot))
            kept.add(slot)
            tokens, logprobs = self._extended(candidate, reports)
            running.append(Hypothesis(tokens, candidate.logprob, slot, watch, logprobs))
        self.running = running
        return forks

    def _extended(
        self, candidate: _Candidate, reports: Mapping[int, TokenLogprobs]
    ) -> tuple[array[int], LogprobColumns | None]:
        """Tokens and log probabilities of a candidate."""
        parent = candidate.parent
        tokens = parent.tokens[:]
        tokens.append(candidate.token)
        if parent.logprobs is None:
            return tokens, None
        logprobs, report = parent.logprobs.copy(), reports[parent.slot]
        num_tops = self._num_logprobs
        entry = TokenLogprobs(
            candidate.token_logprob,
            candidate.place + 1,
            report.top_token_ids[:num_tops],
            report.top_logprobs[:num_tops],
        )
        entry.append_to(logprobs)
        return tokens, logprobs

    def _may_improve(self) -> bool:
        """Whether a running hypothesis could still become one of the finished ones."""
        if not self.running:
            return False
        options = self._options
        if len(self._finished) < options.width:
            return True
        if options.early_stopping == "full":
            return False
        best = self.running[0]
        length = len(best.tokens)
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self._finish.max_tokens
        return _score(best.logprob, length, options.length_penalty) > _score_of(self._finished[-1])


def _score(logprob: float, num_tokens: int, length_penalty: float) -> float:
    score: float = logprob / num_tokens**length_penalty
    return score


def _score_of(output: Chosen) -> float:
    assert output.end.score is not None, "what is finished has a score"
    return output.end.score


def _cut(hypothesis: Hypothesis, end: OutputEnd, length_penalty: float) -> Chosen:
    """An output that was ended from outside."""
    num_tokens = len(hypothesis.tokens)
    score = _score(hypothesis.logprob, num_tokens, length_penalty) if num_tokens else None
    return Chosen(hypothesis.tokens, hypothesis.logprobs, dataclasses.replace(end, score=score))
