"""A worker that drafts tokens.

Each step it settles as many tokens of a decoding row as it is set to draw, none to all that the
plan allows. Of rows with grammars it reports what it drafts, and settles what it draws as far as
that was drafted.

It follows the plan's upper bounds as `FakeWorker` follows exact positions: it goes on where a row
stands, writes the keys and values of its drafts into the row's blocks, and leaves those of rejected
drafts there as garbage, which later steps must overwrite before anybody reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from tests.engine.fake_worker import VOCAB_SIZE, FakeWorker, Row, chain, draw, top_tokens

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup
from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.plan import RowAdmission, StepPlan, StepResult

# What a rejected draft leaves in its slot.
GARBAGE = -3


@dataclasses.dataclass
class _Draw:
    """One row's part of a result."""

    tokens: list[int]
    ok: list[int]
    num_logprobs: int


class DraftingWorker(FakeWorker):
    """Settles `choose_count(most)` tokens of a row that decodes, where its plan allows `most`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        num_rows: int,
        choose_count: Callable[[int], int],
        groups: tuple[CacheGroup, ...] = ONE_GROUP,
    ) -> None:
        super().__init__(num_blocks, block_size, token_budget, num_rows, groups)
        self.choose_count = choose_count
        # Largest count that was settled, and how many times a row settled none.
        self.largest_count = 0
        self.num_empty = 0
        # What it drafts for a row whose output has so many tokens, where it has to report.
        self.guess: Callable[[RowAdmission, int], Sequence[int]] = lambda admission, position: ()
        # Of the step at hand, by row; and drafts of such rows that were right so far.
        self._reported: dict[int, list[int]] = {}
        self.num_right = 0
        # Whether drafts that it can't compute keep a row from settling anything.
        self.holds_up: Callable[[], bool] = lambda: False
        # Rows that were, and those of them whose next step was planned behind more than they have:
        # what they draw is of no use, and an engine must drop it.
        self._held_up: set[int] = set()
        self._lost: set[int] = set()
        self.reported_step_id = 0
        # Tokens of each row's output so far: what the plan knows an upper bound of.
        self._num_output: dict[int, int] = {}
        # Drafts of a row for the step at hand, as the plan before it asked for.
        self._num_proposed = 0

    def head_drafts(self, data: bytes) -> StepDrafts | None:
        """What is reported of a plan when it is computed next; None: nothing."""
        plan = StepPlan.decode(data)
        forward = plan.forward
        entries = zip(forward.rows.tolist(), (forward.counts - forward.known_counts - 1).tolist(), strict=True)
        self._reported = {}
        for row_index, count in entries if plan.num_masked else ():
            if count > 0 and self.rows[row_index].admission.is_masked:
                guessed = list(self.guess(self.rows[row_index].admission, self._num_output[row_index]))[:count]
                self._reported[row_index] = guessed + [(7 * row_index) % VOCAB_SIZE] * (count - len(guessed))
        tokens = np.array([token for drafts in self._reported.values() for token in drafts], np.int32)
        return StepDrafts.decode(StepDrafts(plan.step_id, tokens).encode()) if self._reported else None

    def _forward(self, plan: StepPlan) -> list[tuple[Row, int]]:
        """Computes a plan's entries; a decode computes its row's last token and drawn drafts."""
        forward = plan.forward
        assert max(forward.counts[forward.known_counts == 0], default=0) <= 1 + self._num_proposed, "nobody drafted it"
        self._num_proposed = plan.num_proposed
        for admission in plan.admissions:
            self._held_up.discard(admission.row)
            self._lost.discard(admission.row)
        assert 1 <= plan.num_tokens <= self.token_budget, "the token budget is passed"
        self.num_tokens += plan.num_tokens
        known = forward.token_ids.tolist()
        hidden: list[tuple[Row, int]] = []
        columns = (forward.rows, forward.starts, forward.counts, forward.known_counts)
        for row_index, start, count, known_count in zip(*(c.tolist() for c in columns), strict=True):
            row = self.rows[row_index]
            if known_count and row_index in self._held_up and row.num_computed not in (None, start):
                self._lost.add(row_index)
                hidden += [(row, start + count)] * count
                known = known[count:]
            elif known_count:
                assert known_count == count and row.num_computed in (None, start)
                for position, token in enumerate(known[:count], start):
                    self._check_windows(row, position)
                    self._write(row, position, chain(self._read(row, position - 1) if position else 0, token))
                    hidden.append((row, position + 1))
                known = known[count:]
                row.num_computed = start + count
            else:
                hidden += self._compute_last(row, start, count)
        assert not known
        return hidden

    def _compute_last(self, row: Row, bound: int, count: int) -> list[tuple[Row, int]]:
        position, last = row.num_computed, row.last_token
        assert position is not None and last is not None and position <= bound, "a bound is not above the truth"
        assert bound + count <= len(row.table) * self.block_size, "there is no room for all drafts"
        self._check_windows(row, position)
        self._write(row, position, chain(self._read(row, position - 1), last))
        for draft in range(position + 1, position + count):
            self._write(row, draft, GARBAGE)
        return [(row, position + 1)] * count

    def _sample(self, plan: StepPlan, hidden: list[tuple[Row, int]]) -> StepResult:
        sample, forward = plan.sample, plan.forward
        decodes = forward.known_counts == 0
        most = dict(zip(forward.rows[decodes].tolist(), forward.counts[decodes].tolist(), strict=True))
        columns = (sample.rows, sample.token_indices, sample.output_positions)
        draws = []
        for row_index, token_index, position in zip(*(column.tolist() for column in columns), strict=True):
            source, num_tokens = hidden[token_index]
            if row_index in self._lost:
                draws.append(_Draw([0], [1], self.rows[row_index].admission.num_logprobs))
            elif row_index in most:
                draws.append(self._settle_decode(row_index, most[row_index], position))
            else:
                draws.append(self._settle(row_index, source, num_tokens, position, 1))
        result = self._result(plan, draws)
        result.checked_ok = np.ones(plan.forward.checked_indices.size, np.uint8)
        return result

    def _settle_decode(self, row_index: int, most: int, bound: int) -> _Draw:
        row, position = self.rows[row_index], self._num_output[row_index]
        assert row.num_computed is not None and position <= bound, "an output's position is an upper bound"
        if most > 1 and self.holds_up():
            self.num_empty += 1
            self._held_up.add(row_index)
            return _Draw([], [], row.admission.num_logprobs)
        if row_index in self._reported:
            assert len(self._reported[row_index]) == most - 1, "the engine has heard of another plan"
            drawn = self._settle(row_index, row, row.num_computed + 1, position, most, self._reported[row_index])
            self.num_right += len(drawn.tokens) - 1
            return drawn
        count = self.choose_count(most)
        assert 0 <= count <= most
        self.largest_count, self.num_empty = max(self.largest_count, count), self.num_empty + (count == 0)
        if count == 0:
            return _Draw([], [], row.admission.num_logprobs)
        return self._settle(row_index, row, row.num_computed + 1, position, count)

    def _settle(
        self,
        row_index: int,
        source: Row,
        num_tokens: int,
        position: int,
        count: int,
        drafts: Sequence[int] | None = None,
    ) -> _Draw:
        """Draws so many tokens, each from the slots of those before it, which it writes.

        With drafts it stops at the first that is not drawn.
        """
        row, admission = self.rows[row_index], self.rows[row_index].admission
        drawn = _Draw([], [], admission.num_logprobs)
        slots = [self._read(source, p) for p in range(num_tokens)]
        assert GARBAGE not in slots, "what a rejected draft left is read"
        assert [self._read(row, p) for p in range(num_tokens)] == slots, "a fork sees what it was forked from"
        assert drafts is not None or count == 1 or (row_index, 0) not in self._allowed, "there is a mask for each draw"
        for index in range(count):
            if row_index in self.non_finite_rows:
                drawn.tokens.append(0)
                drawn.ok.append(0)
                break
            token = draw(slots, admission.sampling.seed, admission.output_index, position + index, tuple(row.history))
            token = self._masked(row_index, token, index)
            drawn.tokens.append(token)
            drawn.ok.append(1)
            row.last_token = token
            if admission.sampling.needs_history:
                row.history.append(token)
            if drafts is not None and index + 1 < count and token != drafts[index]:
                break
            if index + 1 < count:
                slots.append(chain(slots[-1], token))
                self._write(row, num_tokens + index, slots[-1])
        row.num_computed = num_tokens + max(len(drawn.tokens) - 1, 0)
        self._num_output[row_index] = position + len(drawn.tokens)
        return drawn

    def _result(self, plan: StepPlan, draws: list[_Draw]) -> StepResult:
        tokens = [token for drawn in draws for token in drawn.tokens]
        ok = [flag for drawn in draws for flag in drawn.ok]
        result = StepResult(plan.step_id, 0, 1000, np.array(tokens, np.int32), np.array(ok, np.uint8))
        counts = [len(drawn.tokens) for drawn in draws]
        # A worker that settled one token each need not say so.
        if any(count != 1 for count in counts):
            result.counts = np.array(counts, np.int32)
        asked = [drawn.num_logprobs for drawn in draws for _ in drawn.tokens]
        indices = [index for index, num_top in enumerate(asked) if num_top >= 0]
        tops = [top_tokens(tokens[index], asked[index]) for index in indices]
        result.logprob_indices = np.array(indices, np.int32)
        result.logprob_sampled = -np.array([tokens[index] for index in indices], np.float32)
        result.logprob_ranks = np.array([tokens[index] + 1 for index in indices], np.int32)
        result.logprob_counts = np.array([len(top) for top in tops], np.int32)
        result.top_token_ids = np.array([token for top in tops for token in top], np.int32)
        result.top_logprobs = -result.top_token_ids.astype(np.float32)
        return result
