"""The tokens of a generation as columns, joined from its steps and its messages.

Owns the join: which step made a token, when it was planned, computed, read, sent and taken. Two forms come out: arrays for the inference span, and spans, packed by `token_spans`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_facts import facts
from headrace_telemetry import token_spans
from headrace_telemetry.engine_book import U64, EngineBook
from headrace_telemetry.otlp_bytes import Key
from headrace_telemetry.token_spans import Tokens

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# In an array: not known.
MISSING: Final = -1
_INDEX, _OUTPUT, _STEP, _SAMPLED, _DEVICE_END, _EMITTED = range(6)
_ARRAYS: Final = {
    name: Key(f"headrace.token.{name}")
    for name in ("output_index", "index", "step_id", "scheduled_ns", "sampled_ns", "emitted_ns", "written_ns")
}


class TokenColumns(NamedTuple):
    """One entry per token, outputs one after the other, [n] each. Times are UNIX.

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

    def first(self, count: int) -> TokenColumns:
        """The first tokens."""
        return self if len(self.indices) <= count else TokenColumns._make(column[:count] for column in self)


def read(
    generation: facts.Generation, trace: facts.EngineTrace, book: EngineBook | None, engine_offset_ns: int
) -> TokenColumns:
    """Joins the columns of a generation. Raises ValueError where they do not fit together."""
    book = book if book is not None else EngineBook(trace.engine, num_steps=1)
    steps = [np.frombuffer(column, "<u8") for column in trace.token_steps]
    step_ids = np.concatenate([np.zeros(0, np.uint64), *steps])
    known, records, link_ids = book.find(step_ids)
    emitted, made_ns, written_ns = _emissions(generation.emissions, [len(column) for column in steps])
    offset_ns = generation.unix_offset_ns
    return TokenColumns(
        output_indices=np.repeat(np.arange(len(steps), dtype=np.uint64), [len(column) for column in steps]),
        indices=np.concatenate(
            [np.zeros(0, np.uint64), *(np.arange(len(column), dtype=np.uint64) for column in steps)]
        ),
        step_ids=step_ids,
        known=known,
        planned_ns=records["planned_at_ns"].astype(np.int64) + engine_offset_ns,
        finished_ns=records["finished_at_ns"].astype(np.int64) + engine_offset_ns,
        settled_ns=records["settled_at_ns"].astype(np.int64) + engine_offset_ns,
        link_ids=link_ids,
        emitted=emitted,
        made_ns=made_ns + offset_ns,
        written_ns=np.where(written_ns > 0, written_ns + offset_ns, 0),
    )


def _emissions(emissions: list[facts.Emission], sizes: list[int]) -> tuple[Mask, I64, I64]:
    """Per token, outputs one after the other: whether it left, and when its message was made and taken (0: never)."""
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
    counts = np.frombuffer(emission.counts, "<u4")
    made_at, written_at = np.frombuffer(emission.made_at_ns, "<i8"), np.frombuffer(emission.written_at_ns, "<i8")
    if len(counts) != len(made_at) or len(counts) != len(written_at):
        raise ValueError("columns of an emission do not fit together")
    # A token a message, as a reader that keeps up gets them.
    if (counts == 1).all():
        return made_at, written_at
    return np.repeat(made_at, counts), np.repeat(written_at, counts)


def arrays(columns: TokenColumns, start_ns: int) -> bytes:
    """Array attributes of the inference span that begins at `start_ns`; times are ns from there, -1 where they are not known."""
    values = {
        "output_index": columns.output_indices,
        "index": columns.indices,
        "step_id": columns.step_ids,
        "scheduled_ns": _offsets(columns.planned_ns, start_ns, columns.known),
        "sampled_ns": _offsets(columns.settled_ns, start_ns, columns.known),
        "emitted_ns": _offsets(columns.made_ns, start_ns, columns.emitted),
        "written_ns": _offsets(columns.written_ns, start_ns, columns.emitted & (columns.written_ns > 0)),
    }
    return b"".join([_ARRAYS[name].array(token_spans.int_elements(column)) for name, column in values.items()])


def spans(
    columns: TokenColumns, trace_id: bytes, parent_span_id: bytes, start_ns: int, end_ns: int
) -> Iterator[tuple[bytes, int]]:
    """Spans of all tokens, inside their parent's times: blocks of them side by side, and their numbers."""
    forms = columns.known * 4 + columns.emitted * 2 + (columns.step_ids > 0)
    for form in sorted(set(forms.tolist())):
        rows = np.flatnonzero(forms == form)
        known, emitted, named = bool(form & 4), bool(form & 2), bool(form & 1)
        chosen = columns if len(rows) == len(forms) else TokenColumns._make(column[rows] for column in columns)
        tokens = _tokens(chosen, start_ns, end_ns, known=known, emitted=emitted, named=named)
        yield from token_spans.encode(trace_id, parent_span_id, tokens, incomplete=not known)


def _tokens(columns: TokenColumns, start_ns: int, end_ns: int, *, known: bool, emitted: bool, named: bool) -> Tokens:
    """Tokens that have the same form: from the plan of the step to the moment that the transport had taken the message."""
    read_ns = columns.settled_ns if known else columns.made_ns if emitted else np.full(len(columns.indices), start_ns)
    starts = np.minimum(np.maximum(columns.planned_ns if known else read_ns, start_ns), end_ns)
    ends = np.where(columns.written_ns > 0, columns.written_ns, read_ns)
    there = {
        _INDEX: columns.indices,
        _OUTPUT: columns.output_indices,
        _STEP: columns.step_ids if named else None,
        _SAMPLED: _offsets(columns.settled_ns, start_ns) if known else None,
        _DEVICE_END: _offsets(columns.finished_ns, start_ns) if known else None,
        _EMITTED: _offsets(columns.made_ns, start_ns) if emitted else None,
    }
    names = tuple(name for name, column in there.items() if column is not None)
    return Tokens(
        start_ns=starts.astype(np.uint64),
        end_ns=np.minimum(np.maximum(ends, starts), end_ns).astype(np.uint64),
        attributes=tuple(column for column in there.values() if column is not None),
        names=names,
        link_ids=columns.link_ids if named else None,
    )


def _offsets(times_ns: I64, start_ns: int, known: Mask | None = None) -> U64:
    """Times since the start of the inference span, not below 0; -1 (as uint64) where not known."""
    offsets = np.maximum(times_ns - start_ns, 0)
    return (offsets if known is None else np.where(known, offsets, MISSING)).astype(np.uint64)
