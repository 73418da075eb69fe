"""When the tokens of a recorded generation left: per message their number, when it was made, and when the transport had taken it.

Owns the columns, and nothing else happens while a generation runs: three appends per message, 0.1 us. `OutputText` notes numbers of tokens as it cuts messages; whoever writes them notes the times. Times follow
the numbers entry by entry, so that a message which was made and never written has a number alone, and is not told.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from headrace_facts.facts import Emission


class Recording:
    """The columns of one generation.

    Attributes:
        counts: tokens per message; 0: it is no output's delta.
        made_at_ns: CLOCK_MONOTONIC when the message was made.
        written_at_ns: CLOCK_MONOTONIC when grpc's write returned.
    """

    __slots__ = ("_outputs", "counts", "made_at_ns", "written_at_ns")

    def __init__(self, num_outputs: int) -> None:
        self.counts = array("I")
        self.made_at_ns = array("Q")
        self.written_at_ns = array("Q")
        # Which output each entry is of; None: there is but one.
        self._outputs = array("H") if num_outputs > 1 else None

    def counter_of(self, output_index: int) -> Callable[[int], None]:
        """Returns what takes the number of tokens in each new message of an output."""
        outputs, counts = self._outputs, self.counts
        if outputs is None:
            return counts.append

        def count(num_tokens: int) -> None:
            outputs.append(output_index)
            counts.append(num_tokens)

        return count

    def skip(self, num_messages: int) -> None:
        """Notes messages that hold no tokens, so that entries and messages keep step."""
        self.counts.extend([0] * num_messages)
        if self._outputs is not None:
            self._outputs.extend([0] * num_messages)

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
        num_written = len(self.written_at_ns)
        counts = np.array(self.counts[:num_written], "<u4")
        made, written = np.array(self.made_at_ns[:num_written], "<u8"), np.array(self.written_at_ns, "<u8")
        outputs = (
            np.zeros(num_written, "<u2") if self._outputs is None else np.array(self._outputs[:num_written], "<u2")
        )
        if not counts.any():
            return []
        chosen = [(counts > 0) & (outputs == index) for index in range(num_outputs)]
        return [Emission(counts[mask].tobytes(), made[mask].tobytes(), written[mask].tobytes()) for mask in chosen]
