"""When the tokens of a recorded generation left: per message their number, when it was made, and when the transport had taken it.

Owns the columns, and nothing else happens while a generation runs: two or three appends per message. `OutputText` notes numbers of tokens as it cuts messages; whoever writes them notes the times. Times follow
the numbers entry by entry, so that a message which was made and never written has a number alone, and is not told. Where one message carries many generations, its wire notes number and message together, and the times
are the message's (`SharedWrite`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from headrace_facts.facts import Emission


class SharedWrite:
    """When a message of many generations was made, and when grpc's write of it returned; 0: it has not."""

    __slots__ = ("made_ns", "written_ns")

    def __init__(self) -> None:
        self.made_ns = self.written_ns = 0


class Recording:
    """The columns of one generation.

    Attributes:
        counts: tokens per message; 0: it is no output's delta.
        made_at_ns: CLOCK_MONOTONIC when the message was made.
        written_at_ns: CLOCK_MONOTONIC when grpc's write returned.
        outputs: which output each entry is of; None: there is but one.
        shared: the messages, instead of their times, where other generations are in them too.
    """

    __slots__ = ("counts", "made_at_ns", "outputs", "shared", "written_at_ns")

    def __init__(self, num_outputs: int) -> None:
        self.counts = array("I")
        self.made_at_ns = array("Q")
        self.written_at_ns = array("Q")
        self.shared: list[SharedWrite] = []
        self.outputs = array("H") if num_outputs > 1 else None

    def counter_of(self, output_index: int) -> Callable[[int], None]:
        """Returns what takes the number of tokens in each new message of an output."""
        outputs, counts = self.outputs, self.counts
        if outputs is None:
            return counts.append

        def count(num_tokens: int) -> None:
            outputs.append(output_index)
            counts.append(num_tokens)

        return count

    def skip(self, num_messages: int) -> None:
        """Notes messages that hold no tokens, so that entries and messages keep step."""
        self.counts.extend([0] * num_messages)
        if self.outputs is not None:
            self.outputs.extend([0] * num_messages)

    def wrote_all(self, made_ns: int, written_ns: int) -> None:
        """Notes that one write took everything that was noted and not written yet."""
        num_messages = len(self.counts) - len(self.made_at_ns)
        if num_messages == 1:
            self.made_at_ns.append(made_ns)
            self.written_at_ns.append(written_ns)
        elif num_messages:
            self.made_at_ns.extend([made_ns] * num_messages)
            self.written_at_ns.extend([written_ns] * num_messages)

    def emissions(self, num_outputs: int) -> list[Emission]:
        """Returns what was written, per output; nothing if nobody read anything."""
        self._settle_shared()
        num_written = len(self.written_at_ns)
        counts = np.array(self.counts[:num_written], "<u4")
        made, written = np.array(self.made_at_ns[:num_written], "<u8"), np.array(self.written_at_ns, "<u8")
        outputs = np.zeros(num_written, "<u2") if self.outputs is None else np.array(self.outputs[:num_written], "<u2")
        if not counts.any():
            return []
        chosen = [(counts > 0) & (outputs == index) for index in range(num_outputs)]
        return [Emission(counts[mask].tobytes(), made[mask].tobytes(), written[mask].tobytes()) for mask in chosen]

    def _settle_shared(self) -> None:
        """Takes the times of shared messages over; those that have not left come last."""
        written = [write for write in self.shared if write.written_ns]
        self.shared = []
        self.made_at_ns.extend(write.made_ns for write in written)
        self.written_at_ns.extend(write.written_ns for write in written)
