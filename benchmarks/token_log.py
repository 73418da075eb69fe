"""Who got which token when, as columns: what `StepOutputs` messages bring, kept without a loop over tokens.

Owns the columns and their order by request. One entry per message is appended while a benchmark runs; everything is sorted once, when it is read afterwards.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
Seconds = npt.NDArray[np.float64]


class TokenLog:
    """Tokens in the order of their arrival."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._handles: list[bytes] = []
        self._tokens: list[bytes] = []
        # Handles ascending, tokens and times beside them; None after anything new.
        self._sorted: tuple[Tokens, Tokens, Seconds] | None = None

    def append(self, now_s: float, handles: bytes, tokens: bytes) -> None:
        """One message: little-endian uint32 columns of equal length."""
        self._times_s.append(now_s)
        self._handles.append(handles)
        self._tokens.append(tokens)
        self._sorted = None

    def of(self, handle: int) -> tuple[Tokens, Seconds]:
        """The tokens of one handle and when each arrived, in order."""
        handles, tokens, times = self._index()
        first, last = np.searchsorted(handles, handle, "left"), np.searchsorted(handles, handle, "right")
        return tokens[first:last], times[first:last]

    def _index(self) -> tuple[Tokens, Tokens, Seconds]:
        if self._sorted is None:
            handles = np.frombuffer(b"".join(self._handles), "<u4")
            tokens = np.frombuffer(b"".join(self._tokens), "<u4")
            times = np.repeat(np.asarray(self._times_s), [len(column) // 4 for column in self._handles])
            order = np.argsort(handles, kind="stable")
            self._sorted = handles[order], tokens[order], times[order]
        return self._sorted
