"""The step plan: what one forward pass of the whole batch computes, and its result.

Both cross between the engine and its workers as bytes.

Owns the columns of both and their byte form. Does not own the transport (`ring`) nor any decision:
the engine's scheduler fills a plan, every worker reads the same bytes, and both sides agree on
nothing else. All columns are little-endian numpy arrays, so that encoding costs a copy and decoding
costs nothing; only what is rare and irregular (a sequence's arrival in a row) is msgpack. How many
bytes a plan may take is `plan_bytes`.

A worker holds `max_num_seqs` *rows*. A sequence owns one row while it is in the batch. The worker
remembers per row: the block table, the sampling parameters and the last sampled token. Steps are
executed strictly in the order of their plans, and a plan may be sent before the result of the plan
before it was read; so a token that the engine does not know yet is the row's last sampled token.

A row that computes its last sampled token may settle several tokens in one step: that token and the
ones that the worker drafts after it are computed together, and those that the model agrees with are
settled. A plan says how many tokens such a row computes at most, a result how many it settled. What
was settled by steps in flight is known to the worker alone, so a plan's positions of such a row are
upper bounds, and the worker goes on where the row stands.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from headrace_request import limits
from headrace_request.sampling import Sampling

Int32Column = npt.NDArray[np.int32]
Float32Column = npt.NDArray[np.float32]
UInt8Column = npt.NDArray[np.uint8]


class RowAdmission(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A sequence that takes a row with this step.

    Everything that sampling needs for as long as it stays there: the request's own `Sampling`, and
    what is the output's.

    Token id lists are int32 little-endian bytes. `prompt_ids` and `output_ids` are the whole
    prompt, and the output known to the engine so far. They are filled if `sampling.needs_history`,
    and in all admissions where workers draft from tokens that rows have. The block table follows in
    the plan's table columns.
    """

    row: int
    sampling: Sampling
    output_index: int = 0
    # Number of most likely tokens to report; -1: no logprobs at all.
    num_logprobs: int = -1
    # Tokens that must not be sampled while the output is shorter than `min_tokens`.
    # Rows whose every draw has a mask have 0: theirs says when stop tokens may be drawn.
    min_tokens: int = 0
    stop_token_ids: bytes = b""
    # Whether draws of the row may have masks, which follow their plans (`masks`).
    is_masked: bool = False
    prompt_ids: bytes = b""
    output_ids: bytes = b""
    # Stands for whom the sequence belongs to, where workers draft from earlier answers: rows with
    # another value never see them.
    tenant: bytes = b""


class SiblingAdmission(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """An admission that differs from the one before it in the plan by these fields alone.

    It admits another output of one request.

    Bytes only: what all outputs of a request share (its prompt above all) crosses once per plan.
    """

    row: int
    output_index: int
    output_ids: bytes

    def after(self, before: RowAdmission) -> RowAdmission:
        """The whole admission. What is shared is the same objects."""
        return msgspec.structs.replace(before, row=self.row, output_index=self.output_index, output_ids=self.output_ids)


_PackedAdmission = RowAdmission | SiblingAdmission

_admissions_encoder = msgspec.msgpack.Encoder()
_admissions_decoder = msgspec.msgpack.Decoder(list[_PackedAdmission])


def _packed(admission: RowAdmission, before: RowAdmission | None) -> _PackedAdmission:
    """Packs an admission as it crosses, by the one before it in the plan."""
    if before is None or admission.sampling.seed != before.sampling.seed:
        return admission
    sibling = SiblingAdmission(admission.row, admission.output_index, admission.output_ids)
    return sibling if sibling.after(before) == admission else admission


def admission_bytes(admission: RowAdmission, before: RowAdmission | None) -> int:
    """Bytes that an admission adds to a plan in which it follows `before`.

    `before` is None for the plan's first admission.
    """
    return len(_admissions_encoder.encode(_packed(admission, before)))


def _encode_admissions(admissions: list[RowAdmission]) -> bytes:
    if not admissions:
        return b""
    return _admissions_encoder.encode(list(map(_packed, admissions, [None, *admissions])))


def _decode_admissions(data: bytes) -> list[RowAdmission]:
    admissions: list[RowAdmission] = []
    for packed in _admissions_decoder.decode(data) if data else ():
        admissions.append(packed.after(admissions[-1]) if isinstance(packed, SiblingAdmission) else packed)
    return admissions


_EMPTY = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)
_NO_FLAGS = np.empty(0, np.uint8)

# Most prompt tokens of one step whose log probabilities are reported. Bounds what the output layer
# computes beyond the draws, the results and what a reader is sent at once, whatever the token
# budget.
MAX_PROMPT_LOGPROBS = 2048


@dataclasses.dataclass(slots=True)
class ForwardPlan:
    """Which tokens the model computes.

    `num_rows` entries per column unless said otherwise; tokens of entry i follow those of entry
    i-1.

    Before the pass a worker, in this order: applies table updates, then copies blocks and states.
    """

    # Rows in the batch, each at most once.
    rows: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Position of the entry's first token (its num_computed_tokens). An upper bound of it in a row
    # that computes its last sampled token while steps that may settle several are in flight.
    starts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Tokens to compute, at least 1.
    counts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # How many of them, from the front, have their id in `token_ids`. Of the others the first is the
    # row's last sampled token, and those after it, if any, are drafted by the worker.
    known_counts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # [sum(known_counts)] the ids.
    token_ids: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Block table updates, [num_updates]: write `table_counts[i]` block numbers at `table_starts[i]`
    # of row `table_rows[i]`. A row has a table in each cache group: that of group g counts as row
    # g * max_num_seqs + row; where there is one group it is the row itself.
    table_rows: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    table_starts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    table_counts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # [sum(table_counts)]
    table_blocks: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Copy-on-write, [num_copies]: whole blocks, in every layer.
    copy_sources: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    copy_targets: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # [num_state_copies] rows whose states in recurrent layers are copied, and the rows that get
    # them; all are read before any is written. Checkpoint c counts as row max_num_seqs + 1 + c.
    state_sources: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    state_targets: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # [num_checked] indices, in the step's flattened tokens, of hidden states that are reported to
    # be finite or not: those that show it of a chunk's keys and values, where no sample does.
    checked_indices: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # [num_forced] entries whose last `forced_counts` known tokens are output that nobody draws,
    # because no other could be drawn. Who keeps an output's tokens notes them.
    forced_entries: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    forced_counts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)

    def forced_tokens(self) -> Iterator[tuple[int, int, Int32Column]]:
        """Each row with forced tokens: its number, their first position in it, and the ids."""
        if self.forced_entries.size:
            ends = np.cumsum(self.known_counts)
            for entry, count in zip(self.forced_entries.tolist(), self.forced_counts.tolist(), strict=True):
                first = int(self.starts[entry] + self.known_counts[entry]) - count
                yield int(self.rows[entry]), first, self.token_ids[ends[entry] - count : ends[entry]]


@dataclasses.dataclass(slots=True)
class SamplePlan:
    """Which rows draw a token from which hidden state. `num_samples` entries per column.

    Several rows may draw from one hidden state: the outputs of one request share the last step of
    their prompt. A row whose entry has drafted tokens may draw from each of its hidden states, one
    token after another.
    """

    # The row that receives the token; its parameters apply.
    rows: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Index of the hidden state in the step's flattened tokens; the first of several.
    token_indices: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Position of the drawn token in its output (0 for the first): keys the noise, counts for
    # min_tokens. An upper bound where the entry's position is one.
    output_positions: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)

    def within(self, samples: slice) -> SamplePlan:
        """A run of the samples."""
        return SamplePlan(self.rows[samples], self.token_indices[samples], self.output_positions[samples])


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class PromptLogprobPlan:
    """Which prompt tokens have their log probabilities reported.

    `num_runs` entries per column; most steps have none.

    A run is consecutive hidden states of one entry. Each reports the prompt token that follows it,
    which may be computed only by a later step, so the plan names them all.
    """

    # Index of the run's first hidden state in the step's flattened tokens.
    first_indices: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Hidden states of the run, at least 1; of all runs at most MAX_PROMPT_LOGPROBS.
    counts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # Number of most likely tokens to report at each, at most the vocabulary.
    num_tops: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    # [sum(counts)] the prompt tokens that follow.
    token_ids: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)

    def joined(self) -> Int32Column:
        """All columns as one, which costs next to nothing where there are no runs."""
        if not self.counts.size:
            return _EMPTY
        return np.concatenate((self.first_indices, self.counts, self.num_tops, self.token_ids))

    @staticmethod
    def split(joined: Int32Column, num_runs: int) -> PromptLogprobPlan:
        """Reads what `joined` wrote, as views."""
        if not num_runs:
            return NO_PROMPT_LOGPROBS
        return PromptLogprobPlan(*np.split(joined, (num_runs, 2 * num_runs, 3 * num_runs)))


# What most steps have.
NO_PROMPT_LOGPROBS = PromptLogprobPlan()

_FORWARD_COLUMNS = tuple(f.name for f in dataclasses.fields(ForwardPlan))
_SAMPLE_COLUMNS = tuple(f.name for f in dataclasses.fields(SamplePlan))
_FIRST_SAMPLE = 1 + len(_FORWARD_COLUMNS)
# Lengths of the columns, those of prompts joined; runs of prompts; bytes of admissions; drafts of
# the next step; draws with a mask.
_HEADER = struct.Struct(f"<Q{_FIRST_SAMPLE + len(_SAMPLE_COLUMNS) + 5}I")
# Bytes of a plan beside its columns and the admissions themselves: the header, and how many
# admissions there are.
FRAME_BYTES = _HEADER.size + 5


@dataclasses.dataclass(slots=True)
class StepPlan:
    """One step: rows given back, rows taken, the forward pass, the draws, the prompt logprobs.

    `step_id` counts from 1 per worker start.
    """

    step_id: int
    # Rows whose sequence left; they may be taken again by `admissions` of the same plan.
    released_rows: Int32Column
    admissions: list[RowAdmission]
    forward: ForwardPlan
    sample: SamplePlan
    prompt_logprobs: PromptLogprobPlan = NO_PROMPT_LOGPROBS
    # Most drafts of a row that the next step verifies: a drafter need propose no more, and none at
    # all where it is 0. A plan that nobody chose drafts for wants as many as there are.
    num_proposed: int = limits.MAX_DRAFTS
    # Draws of rows with a mask. If there are any, the step's masks follow the plan on the ring
    # (`masks`), and the draw waits for them.
    num_masked: int = 0

    @property
    def wanted_indices(self) -> Int32Column:
        """[num_samples + num_checked] hidden states that are needed for samples, then for checks.

        Indices in the step's flattened tokens.
        """
        checked = self.forward.checked_indices
        return np.concatenate((self.sample.token_indices, checked)) if checked.size else self.sample.token_indices

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward pass computes."""
        return int(self.forward.counts.sum())

    def encode(self) -> bytes:
        """Encodes the plan as bytes.

        A header of column lengths comes first, then the int32 columns, then the admissions as
        msgpack.
        """
        columns = [self.released_rows]
        columns += [getattr(self.forward, name) for name in _FORWARD_COLUMNS]
        columns += [getattr(self.sample, name) for name in _SAMPLE_COLUMNS]
        columns.append(self.prompt_logprobs.joined())
        admissions = _encode_admissions(self.admissions)
        num_runs = self.prompt_logprobs.counts.size
        lengths = (*(c.size for c in columns), num_runs, len(admissions), self.num_proposed, self.num_masked)
        header = _HEADER.pack(self.step_id, *lengths)
        return b"".join([header, *(c.tobytes() for c in columns), admissions])

    @staticmethod
    def step_id_of(data: bytes | memoryview) -> int:
        """The step of a plan that `encode` wrote, without reading the rest."""
        step_id: int = _HEADER.unpack_from(data)[0]
        return step_id

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Reads what `encode` wrote. The columns are views of `data`, which must outlive them."""
        step_id, *lengths, num_runs, num_admission_bytes, num_proposed, num_masked = _HEADER.unpack_from(data)
        columns: list[Int32Column] = []
        offset = _HEADER.size
        for length in lengths:
            columns.append(np.frombuffer(data, np.int32, length, offset))
            offset += 4 * length
        admissions = _decode_admissions(bytes(data[offset : offset + num_admission_bytes]))
        forward = ForwardPlan(*columns[1:_FIRST_SAMPLE])
        sample = SamplePlan(*columns[_FIRST_SAMPLE:-1])
        prompt_logprobs = PromptLogprobPlan.split(columns[-1], num_runs)
        return cls(step_id, columns[0], admissions, forward, sample, prompt_logprobs, num_proposed, num_masked)


_RESULT_HEADER = struct.Struct("<QQQQ11I")


@dataclasses.dataclass(slots=True)
class StepResult:
    """What a worker answers to one plan: the tokens that it settled.

    Tokens of one sample stand side by side, in the order of the plan's `sample` columns.

    A sample settles one token; one whose row computes its last sampled token may settle none, which
    leaves the row as it was, or as many as its entry computes. A token whose logits held a NaN or
    no finite value is 0 and has `ok` 0; it is the last of its sample.
    """

    step_id: int
    # CLOCK_MONOTONIC in nanoseconds, on the worker, around the step.
    started_at_ns: int
    finished_at_ns: int
    # [num_tokens] settled token ids.
    tokens: Int32Column
    # [num_tokens] 1 where the logits were finite.
    ok: UInt8Column
    # Kernels that the worker compiled and graphs that it captured since it was ready: a warm worker
    # has none.
    late_work: int = 0
    # Drafts that the worker has lost so far, because their drafter failed or proposed what is no
    # token; 0 in steps that draw nothing.
    lost_drafts: int = 0
    # Tokens that the device computed, padding included; and whether it replayed a captured graph.
    padded_tokens: int = 0
    captured: bool = False
    # When the forward pass had been launched, on the same clock as its start; 0: unknown.
    launched_at_ns: int = 0
    # Log probabilities, for those tokens whose row asked for them, in order: which of `tokens` it
    # is, its log probability, its rank (1 is the most likely) and how many of the flat top entries
    # are its own.
    logprob_indices: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    logprob_sampled: Float32Column = dataclasses.field(default_factory=lambda: _NO_FLOATS)
    logprob_ranks: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    logprob_counts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    top_token_ids: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    top_logprobs: Float32Column = dataclasses.field(default_factory=lambda: _NO_FLOATS)
    # Log probabilities of prompt tokens, in the order of the plan's `prompt_logprobs`: the token's,
    # its rank, and flat as many top entries as its run asks for. NaN where the logits held one.
    prompt_sampled: Float32Column = dataclasses.field(default_factory=lambda: _NO_FLOATS)
    prompt_ranks: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    prompt_top_token_ids: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)
    prompt_top_logprobs: Float32Column = dataclasses.field(default_factory=lambda: _NO_FLOATS)
    # [num_checked] 1 where the hidden state that the plan wants checked is finite.
    checked_ok: UInt8Column = dataclasses.field(default_factory=lambda: _NO_FLAGS)
    # [num_samples] how many of `tokens` each sample settled; empty: one each.
    counts: Int32Column = dataclasses.field(default_factory=lambda: _EMPTY)

    def encode(self) -> bytes:
        """The result as bytes: a header of lengths, then the columns, four bytes an entry first."""
        header = _RESULT_HEADER.pack(
            self.step_id,
            self.started_at_ns,
            self.finished_at_ns,
            self.launched_at_ns,
            self.tokens.size,
            self.logprob_indices.size,
            self.top_token_ids.size,
            self.late_work,
            self.lost_drafts,
            self.padded_tokens,
            self.captured,
            self.prompt_sampled.size,
            self.prompt_top_token_ids.size,
            self.checked_ok.size,
            self.counts.size,
        )
        columns = (
            self.tokens,
            self.logprob_indices,
            self.logprob_sampled,
            self.logprob_ranks,
            self.logprob_counts,
            self.top_token_ids,
            self.top_logprobs,
            *self._prompt_columns(),
            self.counts,
            self.ok,
            self.checked_ok,
        )
        return b"".join([header, *(c.tobytes() for c in columns)])

    def _prompt_columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        """None, at no cost, where no prompt logprobs are reported."""
        if not self.prompt_sampled.size:
            return ()
        return self.prompt_sampled, self.prompt_ranks, self.prompt_top_token_ids, self.prompt_top_logprobs

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Reads what `encode` wrote. The columns are views of `data`, which must outlive them."""
        (
            step_id,
            started,
            finished,
            launched,
            settled,
            logprobs,
            tops,
            late_work,
            lost_drafts,
            padded_tokens,
            captured,
            prompts,
            prompt_tops,
            checked,
            counted,
        ) = _RESULT_HEADER.unpack_from(data)
        offset = _RESULT_HEADER.size

        def column(dtype: type[np.generic], length: int) -> npt.NDArray[np.generic]:
            nonlocal offset
            taken = np.frombuffer(data, dtype, length, offset)
            offset += taken.nbytes
            return taken

        i32, f32 = np.int32, np.float32
        tokens = column(i32, settled)
        flat: tuple[npt.NDArray[np.generic], ...] = (
            column(i32, logprobs),
            column(f32, logprobs),
            column(i32, logprobs),
            column(i32, logprobs),
            column(i32, tops),
            column(f32, tops),
        )
        if prompts:
            flat += (column(f32, prompts), column(i32, prompts), column(i32, prompt_tops), column(f32, prompt_tops))
        counts, ok, checked_ok = column(i32, counted), column(np.uint8, settled), column(np.uint8, checked)
        about = (late_work, lost_drafts, padded_tokens, bool(captured), launched)
        return cls(step_id, started, finished, tokens, ok, *about, *flat, checked_ok=checked_ok, counts=counts)  # type: ignore[arg-type,misc]  # dtypes are as written above
