"""When the tokens of a recorded generation left.

Per message their number, when it was made, and when the transport had taken it.

Owns the columns, and nothing else happens while a generation runs: two appends per message, of
numbers that are there anyhow. `OutputText` notes numbers of tokens as it cuts messages; whoever
writes them notes the times. Times follow the numbers entry by entry, so that a message which was
made and never written has a number alone, and is not reported.

The writer of one generation reads the clock once per message, recorded or not. If it did not wait
before a message, the transport took the one before only then; if it did, that one had left before
there was more to be written, and counts as taken at once. Where one message carries many
generations, or is all that its caller gets, its wire notes number and message together, and the
times are the message's (`SharedWrite`).

Columns are lists until the end: appending to one costs a third of appending to an `array`, which
unpacks the number and makes a new one when it is read.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from headrace_facts.facts import Emission

# Of an output's index above the number of tokens, in one entry.
OUTPUT_SHIFT: Final = 32
# Among times: from the next message on the writer did not wait before each, or waited again; at
# first it waits. So neither a reader that keeps up nor one that is always behind costs an entry.
WAITING_CHANGED: Final = 0
_COUNT_MASK = (1 << OUTPUT_SHIFT) - 1
_LARGEST_BYTE = 0xFF
_Times = npt.NDArray[np.int64]


class SharedWrite:
    """When a message of many generations was made, and when grpc's write of it returned.

    0: it has not.
    """

    __slots__ = ("made_ns", "written_ns")

    def __init__(self, made_ns: int = 0, written_ns: int = 0) -> None:
        self.made_ns = made_ns
        self.written_ns = written_ns


class _LaterOutput:
    """The place where an output that is not the first notes its deltas.

    The first, mostly the only one, notes into the list itself.
    """

    __slots__ = ("_entries", "_first_entry")

    def __init__(self, entries: list[int], output_index: int) -> None:
        self._entries = entries
        self._first_entry = output_index << OUTPUT_SHIFT

    def append(self, num_tokens: int) -> None:
        self._entries.append(self._first_entry + num_tokens)


class Recording:
    """The columns of one generation.

    Attributes:
        entries: per message, whose tokens it has and how many: (output's index << OUTPUT_SHIFT) +
            tokens; no tokens: it is no output's delta.
        began_ns: CLOCK_MONOTONIC when the writing of each began, with WAITING_CHANGED between.
        shared: the messages, instead of their times, where the generation has no writer of its own.
    """

    __slots__ = ("began_ns", "entries", "shared")

    def __init__(self) -> None:
        self.entries: list[int] = []
        self.began_ns: list[int] = []
        self.shared: list[SharedWrite] = []

    def entries_of(self, output_index: int) -> list[int] | _LaterOutput:
        """Returns where an output appends the number of tokens of each of its deltas."""
        return _LaterOutput(self.entries, output_index) if output_index else self.entries

    def skip(self, num_messages: int) -> None:
        """Notes messages that hold no tokens, so that entries and messages keep step."""
        self.entries.extend([0] * num_messages)

    def wrote_all(self, made_ns: int, written_ns: int) -> None:
        """Notes that one write took everything that was noted and not written yet."""
        self.shared.extend([SharedWrite(made_ns, written_ns)] * (len(self.entries) - len(self.shared)))

    def emissions(self, num_outputs: int) -> list[Emission]:
        """Returns what was written, per output; nothing if nobody read anything."""
        if num_outputs == 1 and (emission := self._plain_emission()) is not None:
            return [emission]
        made, written = self._shared_times() if self.shared else self._own_times()
        if num_outputs == 1 and max(self.entries, default=0) <= _LARGEST_BYTE:
            # Mostly the messages without tokens come first and last, and what is between them is
            # reported as it is.
            sizes = bytes(self.entries[: len(made)])
            inner = sizes.strip(b"\0")
            if 0 not in inner:
                begin = len(sizes) - len(sizes.lstrip(b"\0"))
                rows = slice(begin, begin + len(inner))
                return [_emission(np.frombuffer(inner, np.uint8), made[rows], written[rows])] if inner else []
        entries = np.fromiter(self.entries, np.int64, len(made))
        counts = entries & _COUNT_MASK
        reported = counts > 0
        if not reported.any():
            return []
        chosen = [reported & (entries >> OUTPUT_SHIFT == index) for index in range(num_outputs)]
        return [_emission(counts[mask], made[mask], written[mask]) for mask in chosen]

    def _plain_emission(self) -> Emission | None:
        """Returns that of a reader that kept up: a token a message, between messages without.

        None if it is another.

        Most are of this kind, and it costs half of what another does.
        """
        began_ns = self.began_ns
        if self.shared or not began_ns or WAITING_CHANGED in began_ns or max(self.entries, default=0) > _LARGEST_BYTE:
            return None
        sizes = bytes(self.entries[: len(began_ns)])
        inner = sizes.strip(b"\0")
        if inner != b"\1" * len(inner) or not inner:
            return None
        begin = sizes.index(1)
        made = np.fromiter(began_ns, "<i8", len(began_ns))[begin : begin + len(inner)]
        return Emission(b"", made.tobytes(), b"")

    def _own_times(self) -> tuple[_Times, _Times]:
        noted = np.fromiter(self.began_ns, "<i8", len(self.began_ns))
        is_time = noted != WAITING_CHANGED
        made = noted[is_time]
        written = made.copy()
        if len(made) < len(noted):
            num_changes = np.cumsum(~is_time)[is_time]
            np.copyto(written[:-1], made[1:], where=num_changes[1:] & 1 == 1)
        return made, written

    def _shared_times(self) -> tuple[_Times, _Times]:
        """Returns those of the messages; the ones that have not left come last."""
        left = [write for write in self.shared if write.written_ns]
        made = np.fromiter([write.made_ns for write in left], "<i8", len(left))
        return made, np.fromiter([write.written_ns for write in left], "<i8", len(left))


def _emission(counts: npt.NDArray[np.integer], made: _Times, written: _Times) -> Emission:
    return Emission(counts.astype("<u4").tobytes(), made.tobytes(), written.tobytes())
