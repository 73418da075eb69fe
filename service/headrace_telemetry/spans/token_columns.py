"""The tokens of generations as columns, joined from their steps and their messages.

Owns the join: which step made a token, when it was planned, computed, read, sent and taken.
Generations are joined many at once, because what numpy costs per call is what short ones cost. Two
forms come out: arrays for the inference span, and spans, packed by `token_spans`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_facts import facts, token_steps
from headrace_telemetry.otlp.otlp_bytes import Key
from headrace_telemetry.spans import token_spans
from headrace_telemetry.spans.engine_book import U64, EngineBook
from headrace_telemetry.spans.span_frame import Frame
from headrace_telemetry.spans.token_spans import Tokens

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# In an array: not known.
MISSING: Final = -1
_INDEX, _OUTPUT, _STEP, _SAMPLED, _DEVICE_END, _EMITTED = range(6)
_ARRAYS: Final = {
    name: Key(f"headrace.token.{name}")
    for name in ("output_index", "index", "step_id", "scheduled_ns", "sampled_ns", "emitted_ns", "written_ns")
}
# Token spans in one block, and packed at once.
_MOST_ROWS: Final = 4096


class OwnColumns(NamedTuple):
    """What was reported about the tokens of one generation, outputs one after the other.

    Times are of the reporting process's clock.

    Attributes:
        sizes: tokens of each output.
        step_ids: the step that sampled each; 0: an earlier attempt did.
        emitted: whether it is known when it left; if not, the next two are 0.
        made_ns: when its message was made.
        written_ns: when the transport had taken that; 0: never.
    """

    sizes: list[int]
    step_ids: U64
    emitted: Mask
    made_ns: I64
    written_ns: I64


class TokenColumns(NamedTuple):
    """One entry per token of some generations, one generation after the other, [n] each.

    Times are UNIX.

    Attributes:
        output_indices: the token's output.
        indices: its place there.
        step_ids: the step that sampled it; 0: an earlier attempt did.
        known: whether that step is known; if not, the next four are of no use.
        planned_ns: when its step was planned.
        finished_ns: when the device ended it.
        settled_ns: when its tokens were read.
        link_ids: trace id and span id of the step, [n, 24].
        emitted: whether it is known when it left; if not, the next is of no use.
        made_ns: when its message was made.
        written_ns: when the transport had taken that; 0: never.
        start_ns: when its inference span began.
        end_ns: when that ended.
        parent_ids: trace id and span id of that, [n, 24].
    """

    output_indices: U64
    indices: U64
    step_ids: U64
    known: Mask
    planned_ns: I64
    finished_ns: I64
    settled_ns: I64
    link_ids: npt.NDArray[np.uint8]
    emitted: Mask
    made_ns: I64
    written_ns: I64
    start_ns: I64
    end_ns: I64
    parent_ids: npt.NDArray[np.uint8]

    def rows(self, rows: slice | npt.NDArray[np.intp]) -> TokenColumns:
        """Returns these rows of the columns."""
        return TokenColumns._make(column[rows] for column in self)


class JoinedTokens(NamedTuple):
    """The tokens of some generations.

    Attributes:
        columns: of all of them.
        ends: where each generation's end.
    """

    columns: TokenColumns
    ends: list[int]


def read(generation: facts.Generation, trace: facts.EngineTrace) -> OwnColumns:
    """Reads the columns of a generation. Raises ValueError where they do not fit together."""
    steps = [token_steps.step_ids(column) for column in trace.token_steps]
    sizes = [len(column) for column in steps]
    if len(sizes) == 1 and len(generation.emissions) == 1:
        made_ns, written_ns = _per_token(generation.emissions[0])
        if len(made_ns) == sizes[0]:
            return OwnColumns(sizes, steps[0], np.ones(sizes[0], np.bool_), made_ns, written_ns)
    step_ids = np.concatenate([np.zeros(0, np.uint64), *steps])
    return OwnColumns(sizes, step_ids, *_emissions(generation.emissions, sizes))


def join(own: Sequence[OwnColumns], frames: Sequence[Frame], book: EngineBook) -> JoinedTokens:
    """Joins the columns of generations of one engine, one at least, with its steps."""
    totals = [len(columns.step_ids) for columns in own]
    sizes = [size for columns in own for size in columns.sizes]
    outputs = [index for columns in own for index in range(len(columns.sizes))]
    firsts = np.array([0, *itertools.accumulate(sizes)][:-1], np.uint64)
    step_ids, emitted, made_ns, written_ns = (np.concatenate(column) for column in list(zip(*own, strict=True))[1:])
    known, records, link_ids = book.find(step_ids)
    start_ns, end_ns, service_ns, engine_ns = (
        np.repeat(np.array(column, np.int64), totals) for column in list(zip(*frames, strict=True))[2:]
    )
    parent_ids = b"".join([frame.trace_id + frame.span_id for frame in frames])
    columns = TokenColumns(
        output_indices=np.repeat(np.array(outputs, np.uint64), sizes),
        indices=np.arange(len(step_ids), dtype=np.uint64) - np.repeat(firsts, sizes),
        step_ids=step_ids,
        known=known,
        planned_ns=records["planned_at_ns"].astype(np.int64) + engine_ns,
        finished_ns=records["finished_at_ns"].astype(np.int64) + engine_ns,
        settled_ns=records["settled_at_ns"].astype(np.int64) + engine_ns,
        link_ids=link_ids,
        emitted=emitted,
        made_ns=made_ns + service_ns,
        written_ns=np.where(written_ns > 0, written_ns + service_ns, 0),
        start_ns=start_ns,
        end_ns=end_ns,
        parent_ids=np.repeat(np.frombuffer(parent_ids, np.uint8).reshape(-1, 24), totals, axis=0),
    )
    return JoinedTokens(columns, list(itertools.accumulate(totals)))


def _emissions(emissions: list[facts.Emission], sizes: list[int]) -> tuple[Mask, I64, I64]:
    """Per token, outputs one after the other.

    Whether it left, and when its message was made and taken (0: never).
    """
    total = sum(sizes)
    emitted, made, written = np.zeros(total, np.bool_), np.zeros(total, np.int64), np.zeros(total, np.int64)
    begin = 0
    for index, size in enumerate(sizes):
        if index < len(emissions):
            made_at, written_at = (times[:size] for times in _per_token(emissions[index]))
            emitted[begin : begin + len(made_at)] = True
            made[begin : begin + len(made_at)] = made_at
            written[begin : begin + len(written_at)] = written_at
        begin += size
    return emitted, made, written


def _per_token(emission: facts.Emission) -> tuple[I64, I64]:
    """When the message of each token was made and taken."""
    made_at = np.frombuffer(emission.made_at_ns, "<i8")
    written_at = np.frombuffer(emission.written_at_ns, "<i8") if emission.written_at_ns else made_at
    if not emission.counts and len(made_at) == len(written_at):
        return made_at, written_at
    counts = np.frombuffer(emission.counts, "<u4")
    if len(counts) != len(made_at) or len(counts) != len(written_at):
        raise ValueError("columns of an emission do not fit together")
    # A token a message, as a reader that keeps up gets them.
    if (counts == 1).all():
        return made_at, written_at
    if counts.sum(dtype=np.int64) > token_steps.MOST_TOKENS:
        raise ValueError("an emission of more tokens than a generation has")
    return np.repeat(made_at, counts), np.repeat(written_at, counts)


def arrays(joined: JoinedTokens, limit: int) -> Iterator[bytes]:
    """Array attributes of each generation's inference span, of its first `limit` tokens.

    Times are ns from the span's start, -1 where they are not known.
    """
    columns = joined.columns
    values = {
        "output_index": columns.output_indices,
        "index": columns.indices,
        "step_id": columns.step_ids,
        "scheduled_ns": _offsets(columns.planned_ns, columns, columns.known),
        "sampled_ns": _offsets(columns.settled_ns, columns, columns.known),
        "emitted_ns": _offsets(columns.made_ns, columns, columns.emitted),
        "written_ns": _offsets(columns.written_ns, columns, columns.emitted & (columns.written_ns > 0)),
    }
    elements = [(_ARRAYS[name], token_spans.int_elements(column)) for name, column in values.items()]
    for begin, end in itertools.pairwise([0, *joined.ends]):
        rows = slice(begin, min(end, begin + limit))
        yield b"".join([key.array(packed[rows].tobytes()) for key, packed in elements])


def spans(joined: JoinedTokens) -> list[list[tuple[bytes, int]]]:
    """Spans of each generation's tokens, inside their parent's times.

    Blocks of them side by side, and their numbers.
    """
    columns = joined.columns
    blocks: list[list[tuple[bytes, int]]] = [[] for _ in joined.ends]
    forms = columns.known * 4 + columns.emitted * 2 + (columns.step_ids > 0)
    for form in np.unique(forms).tolist():
        rows = np.flatnonzero(forms == form)
        for begin in range(0, len(rows), _MOST_ROWS):
            part = rows[begin : begin + _MOST_ROWS]
            packed = token_spans.encode(_tokens(columns.rows(part), form), incomplete=not form & 4)
            first = 0
            for own, end in zip(blocks, np.searchsorted(part, joined.ends).tolist(), strict=True):
                if end > first:
                    own.append((packed[first:end].tobytes(), end - first))
                    first = end
    return blocks


def _tokens(columns: TokenColumns, form: int) -> Tokens:
    """Tokens that have the same form.

    From the plan of the step to the moment that the transport had taken the message.
    """
    known, emitted, named = bool(form & 4), bool(form & 2), bool(form & 1)
    read_ns = columns.settled_ns if known else columns.made_ns if emitted else columns.start_ns
    starts = np.minimum(np.maximum(columns.planned_ns if known else read_ns, columns.start_ns), columns.end_ns)
    ends = np.where(columns.written_ns > 0, columns.written_ns, read_ns)
    there = {
        _INDEX: columns.indices,
        _OUTPUT: columns.output_indices,
        _STEP: columns.step_ids if named else None,
        _SAMPLED: _offsets(columns.settled_ns, columns) if known else None,
        _DEVICE_END: _offsets(columns.finished_ns, columns) if known else None,
        _EMITTED: _offsets(columns.made_ns, columns) if emitted else None,
    }
    return Tokens(
        start_ns=starts.astype(np.uint64),
        end_ns=np.minimum(np.maximum(ends, starts), columns.end_ns).astype(np.uint64),
        attributes=tuple(column for column in there.values() if column is not None),
        names=tuple(name for name, column in there.items() if column is not None),
        parent_ids=columns.parent_ids,
        link_ids=columns.link_ids if named else None,
    )


def _offsets(times_ns: I64, columns: TokenColumns, known: Mask | None = None) -> U64:
    """Times since the start of the inference span, not below 0; -1 (as uint64) where not known."""
    offsets = np.maximum(times_ns - columns.start_ns, 0)
    return (offsets if known is None else np.where(known, offsets, MISSING)).astype(np.uint64)
