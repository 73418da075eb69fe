"""The columns of a step plan in the making.

Owns the encoding of decisions that `scheduler` took into columns, and the order of entries: first
the sequences that decode, whose columns are written all at once when the plan is complete, then the
others, entry by entry. Does not decide.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence

import numpy as np

from headrace_backend.engine.cache.kv_cache_manager import BlockCopy
from headrace_backend.engine.requests.prompt_log import PromptRun
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep, MaskedDraw
from headrace_backend.engine.scheduling.state_copies import StateCopy
from headrace_backend.engine.scheduling.step_time import StepLoad
from headrace_backend.step.plan import (
    MAX_PROMPT_LOGPROBS,
    NO_PROMPT_LOGPROBS,
    ForwardPlan,
    Int32Column,
    PromptLogprobPlan,
    RowAdmission,
    SamplePlan,
    SiblingAdmission,
    StepPlan,
    admission_bytes,
)
from headrace_backend.step.plan_bytes import SIBLING_BYTES, table_bytes


def _column(values: Iterable[int]) -> Int32Column:
    """Makes a numpy column of an `array`, which is filled twice as fast as a numpy one."""
    return np.frombuffer(array("i", values), np.int32)


class PlanBuilder:
    """Builds the columns of one step's plan."""

    __slots__ = (
        "_admission_bytes_left",
        "_admissions",
        "_attention_window",
        "_checked",
        "_checked_indices",
        "_chunks",
        "_copies",
        "_counts",
        "_decode_starts",
        "_decodes",
        "_draft_counts",
        "_entries",
        "_forced",
        "_forced_entries",
        "_last_admitted",
        "_num_groups",
        "_prompt_indices",
        "_prompt_runs",
        "_rows",
        "_samples",
        "_starts",
        "_state_copies",
        "_table_blocks",
        "_table_counts",
        "_table_rows",
        "_table_starts",
        "_token_bytes",
        "_token_indices",
        "_unsure_states",
        "_with_history",
        "load",
        "num_prompt_logprobs",
        "num_proposed",
        "num_tokens",
        "step_id",
    )

    def __init__(
        self,
        step_id: int,
        max_admission_bytes: int,
        attention_window: int | None = None,
        with_history: bool = False,
        num_groups: int = 1,
    ) -> None:
        """Starts an empty step.

        Args:
            step_id: Number of the step.
            max_admission_bytes: Bytes that its admissions and their block tables may take.
            attention_window: Tokens that a token sees in every layer; None: all.
            with_history: Whether every admission brings all tokens of its sequence, or only those
                of sequences whose sampling depends on them.
            num_groups: Cache groups, in each of which a row has a block table.
        """
        self.step_id = step_id
        self._num_groups = num_groups
        self._with_history = with_history
        self._admission_bytes_left = max_admission_bytes
        self._last_admitted: Sequence | None = None
        self._attention_window = attention_window
        self.num_tokens = 0
        self.load = StepLoad()
        # Most drafts of a row in the next step.
        self.num_proposed = 0
        # Prompt tokens reported by the step.
        self.num_prompt_logprobs = 0
        self._decodes: list[Sequence] = []
        self._decode_starts: list[int] = []
        self._draft_counts: list[int] = []
        self._samples: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int, int]] = []
        self._checked: list[Sequence] = []
        self._checked_indices: list[int] = []
        self._admissions: list[RowAdmission] = []
        self._copies: list[BlockCopy] = []
        self._state_copies: list[StateCopy] = []
        self._unsure_states: list[tuple[Sequence, int]] = []
        # Entries that are not decodes.
        self._entries: list[tuple[Sequence, int, int]] = []
        self._forced: dict[Sequence, array[int]] = {}
        self._forced_entries: list[int] = []
        self._rows: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._token_bytes: list[bytes] = []
        self._token_indices: list[int] = []
        self._table_rows: list[int] = []
        self._table_starts: list[int] = []
        self._table_counts: list[int] = []
        self._table_blocks: list[int] = []
        self._prompt_indices: list[int] = []
        self._prompt_runs: list[tuple[LiveRequest, PromptRun]] = []

    def most_computed(self, sequence: Sequence, num_known: int) -> int:
        """Tokens that the step may compute of a sequence of which `num_known` are computed.

        These are all others, unless they report more of a prompt than a step can.
        """
        num_missing = sequence.num_tokens - num_known
        log = sequence.prompt_log
        if log is None:
            return num_missing
        return log.most_computed(num_known, num_missing, MAX_PROMPT_LOGPROBS - self.num_prompt_logprobs)

    def admit(self, sequence: Sequence, row: int, num_blocks: int) -> bool:
        """Has the sequence take a row with this step, and write block tables of so many blocks.

        False: the plan has no room left, and nothing has changed.
        """
        before = self._admissions[-1] if self._admissions else None
        if before is not None and self._last_admitted is not None and self._last_admitted.request is sequence.request:
            admission = SiblingAdmission(row, sequence.log.output_index, self._history(sequence)).after(before)
        else:
            admission = self._admission(sequence, row)
        num_bytes = admission_bytes(admission, before) + self._num_groups * table_bytes(num_blocks)
        if num_bytes > self._admission_bytes_left:
            return False
        self._take(admission, sequence, num_bytes)
        return True

    def admit_beams(self, beams: AbstractSequence[Sequence], rows: AbstractSequence[int], num_blocks: int) -> bool:
        """Has all sequences of a search take rows with this step; the first has blocks already.

        False: the plan has no room for all of them, and nothing has changed.
        """
        before = self._admissions[-1] if self._admissions else None
        leader = self._admission(beams[0], rows[0])
        tables = self._num_groups * table_bytes(num_blocks)
        num_bytes = admission_bytes(leader, before) + tables + (len(beams) - 1) * SIBLING_BYTES
        if num_bytes > self._admission_bytes_left:
            return False
        self._take(leader, beams[0], num_bytes)
        for beam, row in zip(beams[1:], rows[1:], strict=True):
            self._take(SiblingAdmission(row, beam.log.output_index, b"").after(leader), beam, 0)
        return True

    def take_table(self, num_blocks: int) -> bool:
        """Counts tables of so many blocks that a row gets without being admitted.

        False: the plan has no room left, and nothing has changed.
        """
        num_bytes = self._num_groups * table_bytes(num_blocks)
        if num_bytes > self._admission_bytes_left:
            return False
        self._admission_bytes_left -= num_bytes
        return True

    def _take(self, admission: RowAdmission, sequence: Sequence, num_bytes: int) -> None:
        self._admission_bytes_left -= num_bytes
        self._admissions.append(admission)
        self._last_admitted = sequence

    def add_decode(self, sequence: Sequence) -> None:
        """Computes the row's last sampled token, which the worker knows, and samples the next.

        Decodes precede all other entries.
        """
        self._decodes.append(sequence)
        self.num_tokens += 1
        sequence.num_computed += 1
        sequence.num_tokens += 1
        sequence.planned_in = self.step_id

    def close_decodes(self) -> None:
        """Ends the decodes: entries that follow are of other kinds."""
        self._decode_starts = [sequence.num_computed - 1 for sequence in self._decodes]
        self.load.num_decodes = len(self._decodes)
        self.load.context_tokens = sum(self._decode_starts) + len(self._decodes)

    @property
    def decodes(self) -> AbstractSequence[Sequence]:
        """The sequences whose rows compute their last sampled token, in the order of the plan."""
        return self._decodes

    @property
    def computed(self) -> list[Sequence]:
        """The sequences that the step computes, without outputs that only begin with it."""
        return [*self._decodes, *self._forced, *(sequence for sequence, _, _ in self._entries)]

    def add_drafts(self, counts: list[int]) -> None:
        """Has each of the decodes compute so many drafted tokens too; other entries come later.

        Positions behind a decode are upper bounds until its result says how many were settled.
        """
        num_drafts = sum(counts)
        if num_drafts == 0:
            return
        self._draft_counts = counts
        for sequence, count in zip(self._decodes, counts, strict=True):
            sequence.num_computed += count
            sequence.num_tokens += count
            sequence.num_unread_drafts += count
        self.num_tokens += num_drafts
        self.load.num_draft_tokens = num_drafts
        self.load.context_tokens += num_drafts
        if self.load.num_masked_draws:
            decodes = zip(self._decodes, counts, strict=True)
            self.load.num_masked_draws += sum([count for sequence, count in decodes if sequence.grammar is not None])

    def add_known(self, sequence: Sequence, count: int) -> bool:
        """Computes the next `count` tokens, all of them known.

        Returns whether they were the last, so that one is sampled.
        """
        self._entries.append((sequence, sequence.num_computed, count))
        return self._compute_known(sequence, count)

    def _compute_known(self, sequence: Sequence, count: int) -> bool:
        start = sequence.num_computed
        end = start + count
        self._rows.append(sequence.row)
        self._starts.append(start)
        self._counts.append(count)
        self._token_bytes.append(sequence.token_bytes(start, end))
        if sequence.prompt_log is not None:
            self._report_prompt(sequence, start, end)
        self._check(sequence, count, is_sampled=end == sequence.num_tokens)
        self.num_tokens += count
        self.load.add_chunk(start, count)
        sequence.num_computed = end
        sequence.planned_in = self.step_id
        if end == sequence.num_tokens:
            self._sample(sequence, self.num_tokens - 1)
            return True
        self._chunks.append((sequence, sequence.epoch, end))
        return False

    def add_forced(self, sequence: Sequence, count: int) -> None:
        """Computes the row's last token and the `count` that must follow, and samples the next.

        Decodes precede it.
        """
        self._forced_entries.append(len(self._decodes) + len(self._rows))
        end = sequence.num_tokens + count
        forced = array("i")
        forced.frombytes(sequence.token_bytes(sequence.num_tokens, end))
        self._forced[sequence] = forced
        sequence.num_tokens = end
        self.load.num_forced_tokens += count + 1
        self.load.num_forced_rows += 1
        self._compute_known(sequence, count + 1)

    def add_fork(self, sibling: Sequence) -> None:
        """Samples the sibling's first token from the hidden state of the last entry's sample."""
        sibling.planned_in = self.step_id
        self._sample(sibling, self.num_tokens - 1)

    def update_table(self, row: int, start: int, blocks: AbstractSequence[int]) -> None:
        """Writes block numbers into a row's block table from index `start` on."""
        if blocks:
            self._table_rows.append(row)
            self._table_starts.append(start)
            self._table_counts.append(len(blocks))
            self._table_blocks.extend(blocks)

    def add_copy(self, copy: BlockCopy) -> None:
        """Copies a block before the pass."""
        self._copies.append(copy)

    def add_state_copies(self, copies: list[StateCopy]) -> None:
        """Copies states of rows before the pass."""
        self._state_copies += copies

    def note_unsure_state(self, sequence: Sequence, num_tokens: int) -> None:
        """A state is kept that is right if the step settles the last of so many tokens."""
        self._unsure_states.append((sequence, num_tokens))

    def build(
        self, released_rows: AbstractSequence[int], planned_at_ns: int, has_grammars: bool = False
    ) -> tuple[StepPlan, InFlightStep]:
        """The plan, and the record by which its result is read.

        `has_grammars` says that some of the rows may have grammars.
        """
        decodes, samples = self._decodes, self._decodes + self._samples
        num_decodes = len(decodes)
        counts = _column([1] * num_decodes + self._counts)
        known_counts = counts.copy()
        known_counts[:num_decodes] = 0
        forward = ForwardPlan(
            rows=_column([sequence.row for sequence in decodes] + self._rows),
            starts=_column(self._decode_starts + self._starts),
            counts=counts,
            known_counts=known_counts,
            token_ids=np.frombuffer(b"".join(self._token_bytes), np.int32),
            table_rows=_column(self._table_rows),
            table_starts=_column(self._table_starts),
            table_counts=_column(self._table_counts),
            table_blocks=_column(self._table_blocks),
            copy_sources=_column([copy.source for copy in self._copies]),
            copy_targets=_column([copy.target for copy in self._copies]),
            state_sources=_column([copy.source for copy in self._state_copies]),
            state_targets=_column([copy.target for copy in self._state_copies]),
            checked_indices=_column(self._checked_indices),
            forced_entries=_column(self._forced_entries),
            forced_counts=_column(map(len, self._forced.values())),
        )
        sample = SamplePlan(
            rows=_column([sequence.row for sequence in samples]),
            token_indices=_column([*range(num_decodes), *self._token_indices]),
            # The sampled token is counted already.
            output_positions=_column([sequence.num_tokens - sequence.num_prompt_tokens - 1 for sequence in samples]),
        )
        if self._draft_counts:
            self._widen_decodes(forward, sample)
        step = self._record(samples, planned_at_ns)
        if has_grammars:
            self._note_masked(step, sample.output_positions.tolist())
        plan = StepPlan(
            self.step_id,
            _column(released_rows),
            self._admissions,
            forward,
            sample,
            self._prompt_logprobs(),
            num_proposed=self.num_proposed,
            num_masked=len(step.masked),
        )
        return plan, step

    def _note_masked(self, step: InFlightStep, positions: list[int]) -> None:
        """Notes which draws wait for masks: those that may have one, or one behind their drafts."""
        num_drafts = self._draft_counts + [0] * (len(positions) - len(self._draft_counts))
        num_reported = 0
        for index, (sequence, position) in enumerate(zip(step.samples, positions, strict=True)):
            if sequence.grammar is not None:
                count = num_drafts[index]
                if position + count >= sequence.next_masked:
                    draw = MaskedDraw(index, sequence, position, sequence.num_forgotten, num_reported, count)
                    step.masked.append(draw)
                num_reported += count
                if count:
                    step.unsure.append(sequence)
                    sequence.num_unsure_steps += 1
        step.num_reported_drafts = num_reported if step.masked else 0

    def _widen_decodes(self, forward: ForwardPlan, sample: SamplePlan) -> None:
        """Writes into columns that count one token for each decode how many drafts it has."""
        drafts = _column(self._draft_counts)
        num_decodes = drafts.size
        forward.counts[:num_decodes] += drafts
        sample.token_indices[1:num_decodes] += np.cumsum(drafts[:-1], dtype=np.int32)
        # The drafted tokens are counted already.
        sample.output_positions[:num_decodes] -= drafts

    def _record(self, samples: list[Sequence], planned_at_ns: int) -> InFlightStep:
        return InFlightStep(
            self.step_id,
            planned_at_ns,
            self.num_tokens,
            self.load,
            samples,
            self._chunks,
            self._checked,
            len(self._chunks) + len(samples),
            sum([sequence.wants_logprobs for sequence in samples]),
            self._prompt_runs,
            self._entries,
            draft_counts=self._draft_counts,
            forced=self._forced,
            unsure_states=self._unsure_states,
        )

    def _check(self, sequence: Sequence, count: int, is_sampled: bool) -> None:
        """Has it checked whether all that the next `count` tokens write to the cache is finite.

        The last token's hidden state shows it: in each layer it is a sum over all keys and values
        that the token sees, and a NaN among them, or an infinite value, makes it NaN or infinite,
        which no later layer undoes. (An infinite key whose product with every query is -inf is the
        one that stays unseen, there and in a sample.) In a layer with a sliding window a token sees
        the last `attention_window` ones, so one token of each such stretch is checked, counted from
        the last. A sample shows the last one's state itself.
        """
        stride = self._attention_window or count
        for back in range(stride if is_sampled else 0, count, stride):
            self._checked.append(sequence)
            self._checked_indices.append(self.num_tokens + count - 1 - back)

    def _report_prompt(self, sequence: Sequence, start: int, end: int) -> None:
        """Plans the prompt logprobs that tokens [start, end), the next of the step, report."""
        log = sequence.prompt_log
        run = log.plan(start, end) if log is not None else None
        if run is not None:
            self._prompt_indices.append(self.num_tokens + run.first_token - 1 - start)
            self._prompt_runs.append((sequence.request, run))
            self.num_prompt_logprobs += run.num_tokens

    def _prompt_logprobs(self) -> PromptLogprobPlan:
        if not self._prompt_runs:
            return NO_PROMPT_LOGPROBS
        runs = [(request.spec.prompt_ids, request.prompt_log, run) for request, run in self._prompt_runs]
        return PromptLogprobPlan(
            first_indices=_column(self._prompt_indices),
            counts=_column([run.num_tokens for _, _, run in runs]),
            num_tops=_column([log.num_tops for _, log, _ in runs if log is not None]),
            token_ids=np.concatenate([ids[run.first_token : run.first_token + run.num_tokens] for ids, _, run in runs]),
        )

    def _sample(self, sequence: Sequence, token_index: int) -> None:
        self._samples.append(sequence)
        self._token_indices.append(token_index)
        sequence.num_tokens += 1
        # A search chooses what follows when it has read what was computed.
        sequence.paused = sequence.search is not None
        sequence.decodes = not sequence.paused

    def _history(self, sequence: Sequence) -> bytes:
        """The output known so far, where the worker needs it."""
        return sequence.tokens.tobytes() if self._needs_history(sequence) else b""

    def _needs_history(self, sequence: Sequence) -> bool:
        # Nothing is drafted for beams, whose tokens are not those that their rows draw.
        if sequence.search is not None:
            return False
        return self._with_history or sequence.request.spec.asked.sampling.needs_history

    def _admission(self, sequence: Sequence, row: int) -> RowAdmission:
        """Everything that the worker needs for as long as the sequence stays in its row."""
        asked, grammar = sequence.request.spec.asked, sequence.request.spec.grammar
        ends_otherwise = sequence.search is not None or grammar is not None and grammar.decides_ends
        return RowAdmission(
            row=row,
            sampling=asked.sampling,
            output_index=sequence.log.output_index,
            num_logprobs=asked.num_row_logprobs,
            min_tokens=0 if ends_otherwise else asked.stop.min_tokens,
            is_masked=grammar is not None,
            stop_token_ids=asked.stop.token_ids,
            prompt_ids=asked.prompt_token_ids if self._needs_history(sequence) else b"",
            output_ids=self._history(sequence),
            tenant=_tenant(sequence) if self._with_history and sequence.search is None else b"",
        )


def _tenant(sequence: Sequence) -> bytes:
    """What stands for a sequence's tenant in a worker, which need not know names."""
    return hashlib.blake2b(sequence.request.spec.tenant.encode(), digest_size=8).digest()
