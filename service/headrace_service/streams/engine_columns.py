"""The engine's packed columns, read as Python numbers.

Owns the little-endian layouts of engine.proto. `tolist` once per column is what makes a step of 256
rows cost microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.streams.wires import TokenLogprobs


def token_ids_of(column: bytes) -> list[int]:
    """Returns a column of uint32 as a list."""
    ids: list[int] = np.frombuffer(column, dtype="<u4").tolist()
    return ids


def floats_of(column: bytes) -> list[float]:
    """Returns a column of float32 as a list."""
    values: list[float] = np.frombuffer(column, dtype="<f4").tolist()
    return values


def output_indices_of(column: bytes) -> list[int]:
    """Returns a column of uint16 as a list."""
    indices: list[int] = np.frombuffer(column, dtype="<u2").tolist()
    return indices


class LogprobReader:
    """Walks through columns of log probabilities, token by token."""

    __slots__ = ("_counts", "_ranks", "_row", "_sampled", "_top_ids", "_top_logprobs", "_top_row")

    def __init__(self, columns: engine_pb2.LogprobColumns) -> None:
        self._sampled = floats_of(columns.sampled)
        self._ranks = token_ids_of(columns.ranks)
        self._counts = output_indices_of(columns.top_counts)
        self._top_ids = token_ids_of(columns.top_token_ids)
        self._top_logprobs = floats_of(columns.top_logprobs)
        self._row = 0
        self._top_row = 0

    def next(self) -> TokenLogprobs:
        """Returns the log probabilities of the next token."""
        row, begin = self._row, self._top_row
        self._row, self._top_row = row + 1, begin + self._counts[row]
        return TokenLogprobs(
            self._sampled[row],
            self._ranks[row],
            self._top_ids[begin : self._top_row],
            self._top_logprobs[begin : self._top_row],
        )


def cut(columns: engine_pb2.LogprobColumns, max_tokens: int) -> Iterator[tuple[int, engine_pb2.LogprobColumns]]:
    """Yields runs of at most `max_tokens` tokens, each with the number of tokens before it."""
    num_tokens = num_tokens_of(columns)
    if num_tokens <= max_tokens:
        yield 0, columns
        return
    for first in range(0, num_tokens, max_tokens):
        yield first, part(columns, first, min(first + max_tokens, num_tokens))


def num_tokens_of(columns: engine_pb2.LogprobColumns) -> int:
    """Returns how many tokens have log probabilities in columns."""
    return len(columns.top_counts) // 2


def part(columns: engine_pb2.LogprobColumns, first: int, end: int) -> engine_pb2.LogprobColumns:
    """Returns the columns of the tokens in [first, end)."""
    counts = np.frombuffer(columns.top_counts, dtype="<u2")
    top_first, num_tops = int(counts[:first].sum()), int(counts[first:end].sum())
    tokens, top = slice(4 * first, 4 * end), slice(4 * top_first, 4 * (top_first + num_tops))
    return engine_pb2.LogprobColumns(
        sampled=columns.sampled[tokens],
        ranks=columns.ranks[tokens],
        top_counts=columns.top_counts[2 * first : 2 * end],
        top_token_ids=columns.top_token_ids[top],
        top_logprobs=columns.top_logprobs[top],
    )
