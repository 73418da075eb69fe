"""What scheduling leaves for load reports and for the log of steps.

Owns the counts, and who was preempted or stalled for the step planned last. Decides nothing.
"""

from __future__ import annotations

from headrace_backend.engine.requests.sequence import LiveRequest, Sequence


class SchedulerStats:
    """Counts over all lives of workers, and notes of the newest step."""

    __slots__ = (
        "_preempted",
        "num_preemptions",
        "num_prefix_hit_tokens",
        "num_prefix_query_tokens",
        "stalled",
    )

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        # Numbers of the requests of sequences preempted, and sequences that did not decode though
        # they had a token to, since these were last taken.
        self._preempted: list[int] = []
        self.stalled: list[Sequence] = []

    def note_preemption(self, request: LiveRequest) -> None:
        """Notes that a sequence of the request, or its whole search, was preempted."""
        request.ledger.preemptions += 1
        self._preempted.append(request.sequence_number)
        self.num_preemptions += 1

    def note_prefix(self, sequence: Sequence) -> None:
        """Notes that the prefix cache was asked for a prompt.

        A recompute after a preemption does not count.
        """
        if sequence.epoch == 0:
            num_hits = min(sequence.num_computed, sequence.num_prompt_tokens)
            self.num_prefix_query_tokens += sequence.num_prompt_tokens
            self.num_prefix_hit_tokens += num_hits
            sequence.request.note_prefix(num_hits)

    def take_stalled(self) -> list[Sequence]:
        """Sequences with a token to decode that no step computed, since the last call.

        They found no room for it, or were left to a later step.
        """
        stalled, self.stalled = self.stalled, []
        return stalled

    def take_preempted(self) -> list[int]:
        """Takes the numbers of the requests that were preempted since the last call.

        A request is named once for each time, however many sequences of its search lost their row.
        """
        preempted, self._preempted = self._preempted, []
        return preempted
