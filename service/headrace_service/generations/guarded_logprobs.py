"""Log probabilities of a submitted generation, as its guardian keeps them.

Owns the copies: those of each output's tokens as columns, those of the prompt as the parts that
came. A generation whose request asks for none costs nothing here.
"""

from __future__ import annotations

from array import array

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.streams.wires import TokenLogprobs

# Of one token, and of one of its top entries.
_TOKEN_BYTES = 10
_TOP_BYTES = 8


class OutputLogprobs:
    """Log probabilities of one output's tokens, in order."""

    __slots__ = ("_counts", "_ranks", "_sampled", "_top_ids", "_top_logprobs")

    def __init__(self, columns: engine_pb2.LogprobColumns | None = None) -> None:
        """Begins with those of an engine's log, or with none."""
        known = columns or engine_pb2.LogprobColumns()
        self._sampled = array("f", known.sampled)
        self._ranks = array("I", known.ranks)
        self._counts = array("H", known.top_counts)
        self._top_ids = array("I", known.top_token_ids)
        self._top_logprobs = array("f", known.top_logprobs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns."""
        return _TOKEN_BYTES * len(self._sampled) + _TOP_BYTES * len(self._top_ids)

    def append(self, entry: TokenLogprobs) -> int:
        """Takes those of one more token; returns the bytes that they take."""
        self._sampled.append(entry.sampled)
        self._ranks.append(entry.rank)
        self._counts.append(len(entry.top_ids))
        self._top_ids.extend(entry.top_ids)
        self._top_logprobs.extend(entry.top_logprobs)
        return _TOKEN_BYTES + _TOP_BYTES * len(entry.top_ids)

    def columns(self) -> engine_pb2.LogprobColumns:
        """Returns them as another engine takes them."""
        return engine_pb2.LogprobColumns(
            sampled=self._sampled.tobytes(),
            ranks=self._ranks.tobytes(),
            top_counts=self._counts.tobytes(),
            top_token_ids=self._top_ids.tobytes(),
            top_logprobs=self._top_logprobs.tobytes(),
        )


class PromptLogprobs:
    """Log probabilities of the prompt, in the parts in which they came."""

    __slots__ = ("num_bytes", "parts")

    def __init__(self, parts: list[engine_pb2.PromptLogprobColumns]) -> None:
        """Begins with those of an engine's log, or with none.

        Attributes:
            parts: In order and without gaps.
            num_bytes: About what they take.
        """
        self.parts = parts
        self.num_bytes = sum(part.ByteSize() for part in parts)

    def append(self, part: engine_pb2.PromptLogprobColumns) -> int:
        """Takes one more part; returns the bytes that it takes."""
        self.parts.append(part)
        num_bytes: int = part.ByteSize()
        self.num_bytes += num_bytes
        return num_bytes

    @property
    def end(self) -> int:
        """Position in the prompt before which tokens were reported."""
        if not self.parts:
            return 1
        return self.parts[-1].first_token_index + len(self.parts[-1].columns.top_counts) // 2
