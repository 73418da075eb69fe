"""The tokens of one output: all that settled, how many readers may see, and its end.

Owns the columns, the released prefix and the readers that follow it. Does not decide what is held
back (`stops`) nor who may read (`request_table`). Kept until the request's log expires, so that a
reader can come back at any offset.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from headrace_backend.engine.events import LogprobColumns, OutputEnd, OutputSnapshot
from headrace_backend.engine.requests.outbox import Outbox, Stream


class TokenLogprobs(NamedTuple):
    """Log probabilities at one sampled token."""

    sampled: float
    rank: int
    top_token_ids: AbstractSequence[int]
    top_logprobs: AbstractSequence[float]

    def append_to(self, columns: LogprobColumns) -> None:
        """Appends the entry to columns."""
        columns.sampled.append(self.sampled)
        columns.ranks.append(self.rank)
        columns.top_counts.append(len(self.top_token_ids))
        columns.top_token_ids.extend(self.top_token_ids)
        columns.top_logprobs.extend(self.top_logprobs)


_NOT_KNOWN = TokenLogprobs(math.nan, 0, (), ())


class OutputLog:
    """One output's tokens.

    `tokens` may run ahead of what is released by what stop strings hold back.
    """

    __slots__ = ("_released_tops", "end", "logprobs", "num_released", "output_index", "readers", "tokens")

    def __init__(self, output_index: int, with_logprobs: bool) -> None:
        """Empty."""
        self.output_index = output_index
        self.tokens: array[int] = array("i")
        self.logprobs = LogprobColumns() if with_logprobs else None
        self.num_released = 0
        # Flat entries of `logprobs` that belong to released tokens.
        self._released_tops = 0
        self.end: OutputEnd | None = None
        # Where released tokens go: streams, and the handle on each.
        self.readers: list[tuple[Stream, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns."""
        return 4 * len(self.tokens) + (self.logprobs.num_bytes if self.logprobs is not None else 0)

    def resume(self, tokens: bytes, logprobs: LogprobColumns | None) -> None:
        """Takes the tokens (int32) that an earlier attempt emitted: nobody is sent them again.

        Where their log probabilities are not known, readers get NaN with rank 0.
        """
        self.tokens.frombytes(tokens)
        self.num_released = len(self.tokens)
        if self.logprobs is None:
            return
        if logprobs is not None:
            self.logprobs, self._released_tops = logprobs, len(logprobs.top_token_ids)
        else:
            for _ in self.tokens:
                self.append_logprobs(_NOT_KNOWN)

    def append_logprobs(self, entry: TokenLogprobs) -> None:
        """Log probabilities of the token appended to `tokens` at the same time."""
        assert self.logprobs is not None, "the request asked for log probabilities"
        entry.append_to(self.logprobs)

    def append_released(self, token: int) -> None:
        """One more token, for readers to see at once: the way of almost every one.

        Without log probabilities, and nothing is held back.
        """
        self.tokens.append(token)
        self.num_released += 1
        for stream, handle in self.readers:
            outbox = stream.outbox
            outbox.handles.append(handle)
            outbox.output_indices.append(self.output_index)
            outbox.tokens.append(token)

    def release(self, end: int) -> None:
        """Lets readers see the tokens before `end`."""
        first, self.num_released = self.num_released, end
        if end > first:
            self._release(first, end)

    def finish(self, end: OutputEnd) -> None:
        """Releases what was held back and notes how the output ended.

        Tokens that come later do not belong to the output.
        """
        self.release(len(self.tokens))
        self.end = end
        for stream, handle in self.readers:
            stream.outbox.events.append((handle, end))

    def fill(self, tokens: AbstractSequence[int], logprobs: LogprobColumns | None, end: OutputEnd) -> None:
        """Takes a whole output at once, which begins with the tokens that are here already.

        Args:
            tokens: All tokens of the output.
            logprobs: Log probabilities of all of them; None: none were asked for.
            end: How it ended.
        """
        first = len(self.tokens)
        self.tokens.extend(tokens[first:])
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.extend_from(logprobs, first)
        self.finish(end)

    def snapshot(self) -> OutputSnapshot:
        """What is released so far."""
        end = self.num_released
        return OutputSnapshot(self.output_index, self._unsigned(0, end), self._released_logprobs(), self.end)

    def _release(self, first: int, end: int) -> None:
        tops_first = self._released_tops
        if self.logprobs is not None:
            self._released_tops = tops_first + sum(self.logprobs.top_counts[first:end])
        for stream, handle in self.readers:
            outbox = stream.outbox
            self._copy_logprobs(outbox, first, end, tops_first)
            outbox.handles.extend([handle] * (end - first))
            outbox.output_indices.extend([self.output_index] * (end - first))
            outbox.tokens.extend(self._unsigned(first, end))

    def _unsigned(self, first: int, end: int) -> array[int]:
        """Ids are not negative, so the same bytes read as uint32."""
        return array("I", self.tokens[first:end].tobytes())

    def _released_logprobs(self) -> LogprobColumns | None:
        columns, end, tops = self.logprobs, self.num_released, self._released_tops
        if columns is None:
            return None
        per_token = (columns.sampled[:end], columns.ranks[:end], columns.top_counts[:end])
        return LogprobColumns(*per_token, columns.top_token_ids[:tops], columns.top_logprobs[:tops])

    def _copy_logprobs(self, outbox: Outbox, first: int, end: int, tops_first: int) -> None:
        source, target = self.logprobs, outbox.logprobs
        if source is None:
            return
        target.sampled.extend(source.sampled[first:end])
        target.ranks.extend(source.ranks[first:end])
        target.top_counts.extend(source.top_counts[first:end])
        target.top_token_ids.extend(source.top_token_ids[tops_first : self._released_tops])
        target.top_logprobs.extend(source.top_logprobs[tops_first : self._released_tops])
        next_row = len(outbox.tokens)
        outbox.logprob_rows.extend(range(next_row, next_row + end - first))
