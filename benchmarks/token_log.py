"""Who got which token when, as columns, kept without a loop over tokens.

The columns are what `StepOutputs` messages bring.

Owns the columns and their order by request, log probabilities among them. One entry per message is
appended while a benchmark runs; everything is sorted once, when it is read afterwards.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
Seconds = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of some tokens, in the order of their arrival."""

    # float32, uint32 (1 is the most likely), uint16: how many top entries the token has.
    sampled: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_counts: npt.NDArray[np.uint16]


class TokenLog:
    """Tokens in the order of their arrival."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._handles: list[bytes] = []
        self._tokens: list[bytes] = []
        self._outputs: list[bytes] = []
        # Per message with log probabilities: its tokens' handles, their rows among these, and three
        # columns of values.
        self._logprobs: list[tuple[bytes, bytes, bytes, bytes, bytes]] = []
        self._sorted_logprobs: tuple[Tokens, Logprobs] | None = None
        # Handles ascending, tokens and times beside them; None after anything new.
        self._sorted: tuple[Tokens, Tokens, Seconds, npt.NDArray[np.uint16]] | None = None

    def append(self, now_s: float, handles: bytes, tokens: bytes, output_indices: bytes) -> None:
        """One message: little-endian columns of equal length, uint32, uint32 and uint16."""
        self._times_s.append(now_s)
        self._outputs.append(output_indices)
        self._handles.append(handles)
        self._tokens.append(tokens)
        self._sorted = None

    def append_logprobs(self, handles: bytes, rows: bytes, sampled: bytes, ranks: bytes, top_counts: bytes) -> None:
        """Appends the log probabilities of the message's tokens in `rows` (uint32).

        Columns are float32, uint32 and uint16.
        """
        self._logprobs.append((handles, rows, sampled, ranks, top_counts))
        self._sorted_logprobs = None

    def of(self, handle: int) -> tuple[Tokens, Seconds]:
        """The tokens of one handle and when each arrived, in order."""
        handles, tokens, times, _ = self._index()
        part = _part(handles, handle)
        return tokens[part], times[part]

    def outputs_of(self, handle: int, num_outputs: int) -> list[Tokens]:
        """The tokens of each of a request's outputs, in order.

        Raises:
            ValueError: A token belongs to an output that there is not.
        """
        handles, tokens, _, outputs = self._index()
        part = _part(handles, handle)
        tokens, outputs = tokens[part], outputs[part]
        if outputs.size and int(outputs.max()) >= num_outputs:
            raise ValueError(f"a token of output {outputs.max()}, of {num_outputs} outputs")
        return [tokens[outputs == index] for index in range(num_outputs)]

    def logprobs_of(self, handle: int) -> Logprobs:
        """The log probabilities of one handle's tokens, in order."""
        if self._sorted_logprobs is None:
            self._sorted_logprobs = self._index_logprobs()
        handles, columns = self._sorted_logprobs
        part = _part(handles, handle)
        return Logprobs(columns.sampled[part], columns.ranks[part], columns.top_counts[part])

    def _index_logprobs(self) -> tuple[Tokens, Logprobs]:
        parts = [np.frombuffer(handles, "<u4")[np.frombuffer(rows, "<u4")] for handles, rows, *_ in self._logprobs]
        handles = np.concatenate(parts) if parts else np.empty(0, np.uint32)
        order = np.argsort(handles, kind="stable")
        sampled, ranks, counts = (b"".join(message[place] for message in self._logprobs) for place in (2, 3, 4))
        columns = Logprobs(
            np.frombuffer(sampled, "<f4")[order],
            np.frombuffer(ranks, "<u4")[order],
            np.frombuffer(counts, "<u2")[order],
        )
        return handles[order], columns

    def _index(self) -> tuple[Tokens, Tokens, Seconds, npt.NDArray[np.uint16]]:
        if self._sorted is None:
            handles = np.frombuffer(b"".join(self._handles), "<u4")
            tokens = np.frombuffer(b"".join(self._tokens), "<u4")
            times = np.repeat(np.asarray(self._times_s), [len(column) // 4 for column in self._handles])
            outputs = np.frombuffer(b"".join(self._outputs), "<u2")
            order = np.argsort(handles, kind="stable")
            self._sorted = handles[order], tokens[order], times[order], outputs[order]
        return self._sorted


def _part(handles: Tokens, handle: int) -> slice:
    """The slice of a handle's entries in an ascending column."""
    return slice(int(np.searchsorted(handles, handle, "left")), int(np.searchsorted(handles, handle, "right")))
