"""Sequences that wait for a row, most urgent first; a tenant can be passed over.

Owns the order: urgency keys never change while a sequence waits, so that ageing costs nothing. One
step of priority weighs as much as `ageing_s` of waiting:

    key = arrival - priority * ageing        (smaller is more urgent)

Two requests keep their order for ever, and whatever has waited `ageing_s` per step of priority
longer is ahead: nobody starves. A preempted sequence comes back with its old key, ahead of whoever
came later.

Each tenant has a line of its own (a heap), and the lines are sorted by the sequence at their front:
the first line's front is the most urgent of all. A tenant that may not take more blocks is
*parked*: its line is out of that order, however long it is, until its front changes or the
scheduler says that it may be tried again.

Adding and removing cost O(log waiting) comparisons; what was aborted is swept out when it comes to
the front or makes up half of its line. One sequence near a front can be *brought forward*: it is
shown and taken in the front's place until it is put back, and no other tenant's turn changes. Also
counts the tokens that wait, by which the token budget tells a crowd from a few: those of parked
lines could not be computed, and don't count. And it says what a newcomer would not wait for, by
which a deadline is kept or refused.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from headrace_backend.engine.limits.tenant_account import Passed, TenantAccount
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence

_MIN_SWEEP = 64
# What one waiting sequence counts for at most, so that one very long prompt is not taken for a
# crowd.
MAX_COUNTED_TOKENS = 2048


class _Line:
    """The waiting sequences of one tenant.

    It is a heap with lazy removal, whose front is never an ended sequence.
    """

    __slots__ = ("account", "front", "heap", "num_counted_tokens", "num_dead", "parked")

    def __init__(self, account: TenantAccount) -> None:
        """Empty."""
        self.account = account
        self.heap: list[tuple[int, int, int, Sequence]] = []
        self.num_dead = 0
        # By which the line is sorted among others; None: it is in no order yet.
        self.front: Sequence | None = None
        self.parked = False
        # Tokens to compute of all live sequences, each counted up to a limit.
        self.num_counted_tokens = 0

    def drop_dead_front(self) -> None:
        """Brings the most urgent live sequence to the top of the heap."""
        while self.heap and self.heap[0][3].ended:
            heapq.heappop(self.heap)
            self.num_dead -= 1

    def behind_front(self, count: int) -> Iterator[Sequence]:
        """Up to `count` live sequences behind the front, most urgent first."""
        # Children of an entry of the heap are less urgent than it is.
        places = [(self.heap[0], 0)] if self.heap else []
        while places and count >= 0:
            entry, place = heapq.heappop(places)
            for child in range(2 * place + 1, min(2 * place + 3, len(self.heap))):
                heapq.heappush(places, (self.heap[child], child))
            if entry[3] is not self.front and not entry[3].ended:
                yield entry[3]
            count -= 1

    def take(self, sequence: Sequence) -> None:
        """Removes a live sequence that is near the front, but not the front."""
        before = []
        while self.heap[0][3] is not sequence:
            before.append(heapq.heappop(self.heap))
        heapq.heappop(self.heap)
        for entry in before:
            heapq.heappush(self.heap, entry)

    def sweep(self) -> None:
        """Drops the ended ones if they are most of the heap."""
        if self.num_dead > _MIN_SWEEP and 2 * self.num_dead > len(self.heap):
            self.heap = [entry for entry in self.heap if not entry[3].ended]
            heapq.heapify(self.heap)
            self.num_dead = 0


class WaitingQueue:
    """The lines of all tenants, sorted by the urgency of their fronts."""

    __slots__ = ("_forward", "_lines", "_num_live", "_order", "num_counted_tokens")

    def __init__(self) -> None:
        """Empty."""
        self._lines: dict[TenantAccount, _Line] = {}
        # Those not parked, by their fronts.
        self._order: list[_Line] = []
        # Brought forward, and in no line meanwhile.
        self._forward: Sequence | None = None
        self._num_live = 0
        # Tokens that wait, but for parked lines.
        self.num_counted_tokens = 0

    def __len__(self) -> int:
        """Live sequences, parked or not."""
        return self._num_live

    def __iter__(self) -> Iterator[Sequence]:
        """Live sequences, parked or not, in no particular order."""
        return (entry[3] for line in self._lines.values() for entry in line.heap if not entry[3].ended)

    def push(self, sequence: Sequence) -> None:
        """Enters a sequence by its urgency."""
        account = sequence.request.account
        line = self._lines.get(account)
        if line is None:
            line = self._lines[account] = _Line(account)
        sequence.num_counted_tokens = min(sequence.num_tokens, MAX_COUNTED_TOKENS)
        self._num_live += 1
        self._count_tokens(line, sequence.num_counted_tokens)
        heapq.heappush(line.heap, (*sequence.urgency, sequence))
        if line.front is None or sequence.urgency < line.front.urgency:
            self._place(line)

    def peek(self) -> Sequence | None:
        """What was brought forward, or the most urgent live sequence of a tenant not parked."""
        if self._forward is not None:
            return self._forward
        return self._order[0].front if self._order else None

    def behind_front(self, count: int) -> Iterator[Sequence]:
        """Up to `count` sequences of the front's tenant that come after it, most urgent first."""
        return self._order[0].behind_front(count) if self._order else iter(())

    def bring_forward(self, sequence: Sequence) -> None:
        """Shows a sequence of `behind_front` before the front.

        Until it is popped or put back nothing else is done to the queue.
        """
        assert self._forward is None, "one sequence is before the front"
        self._order[0].take(sequence)
        self._forward = sequence

    def put_back(self) -> bool:
        """Puts what was brought forward where it was; false if nothing was."""
        sequence, self._forward = self._forward, None
        if sequence is not None:
            heapq.heappush(self._order[0].heap, (*sequence.urgency, sequence))
        return sequence is not None

    def pop(self) -> Sequence:
        """Removes what `peek` showed."""
        line, sequence = self._order[0], self._forward
        self._num_live -= 1
        if sequence is not None:
            self._forward = None
            self._count_tokens(line, -sequence.num_counted_tokens)
            return sequence
        sequence = heapq.heappop(line.heap)[3]
        self._count_tokens(line, -sequence.num_counted_tokens)
        self._place(line)
        return sequence

    def park(self) -> bool:
        """Passes over the tenant of the sequence that `peek` showed.

        This holds until `unpark` or until a more urgent sequence of the tenant comes. False, and
        nobody is passed over, if what it showed was brought forward: the front may need less.
        """
        if self._forward is not None:
            return False
        line = self._order.pop(0)
        line.parked = True
        self.num_counted_tokens -= line.num_counted_tokens
        return True

    def unpark(self, account: TenantAccount) -> None:
        """Tries a tenant again that may be able to take more blocks than before."""
        line = self._lines.get(account)
        if line is not None and line.parked:
            self._place(line)

    def parked(self) -> list[TenantAccount]:
        """The tenants that are passed over."""
        return [account for account, line in self._lines.items() if line.parked]

    def passed_by(self, own: TenantAccount | None, urgency_ns: int | None) -> Passed:
        """What waits and is not computed before a request that arrives now.

        Args:
            own: Its tenant; None: one of which nothing waits.
            urgency_ns: Its urgency; None: less urgent ones are not looked for.
        """
        parked = [account for account in self.parked() if account is not own]
        passed = Passed.of(parked)
        if urgency_ns is None:
            return passed
        # Sequences that ran, and those that wait for their request's first, are nobody's wait.
        behind = [
            sequence.request.spec
            for account, line in self._lines.items()
            if account not in parked
            for key, _, _, sequence in line.heap
            if key > urgency_ns
            and not (sequence.ended or sequence.request.announced)
            and sequence is sequence.request.sequences[0]
        ]
        return Passed(
            passed.num_tokens + sum(len(spec.prompt_ids) for spec in behind),
            passed.num_outputs + sum(spec.asked.num_sequences for spec in behind),
        )

    def take(self, requests: AbstractSet[LiveRequest] | None = None) -> list[Sequence]:
        """Removes the live sequences of these requests; None: of all.

        Nobody is parked afterwards.
        """
        live = list(self)
        self._lines, self._order = {}, []
        self._num_live = self.num_counted_tokens = 0
        for sequence in live:
            if requests is not None and sequence.request not in requests:
                self.push(sequence)
        return [sequence for sequence in live if requests is None or sequence.request in requests]

    def note_ended(self, sequence: Sequence) -> None:
        """Notes that a sequence in the queue ended: it is dead weight from now on."""
        line = self._lines[sequence.request.account]
        self._num_live -= 1
        self._count_tokens(line, -sequence.num_counted_tokens)
        line.num_dead += 1
        line.sweep()
        if sequence is line.front:
            self._place(line)

    def _count_tokens(self, line: _Line, num_tokens: int) -> None:
        line.num_counted_tokens += num_tokens
        if not line.parked:
            self.num_counted_tokens += num_tokens

    def _place(self, line: _Line) -> None:
        """Sorts a line in by its front, which may be new; drops the line if it is empty."""
        if line.parked:
            line.parked = False
            self.num_counted_tokens += line.num_counted_tokens
        elif line.front is not None:
            del self._order[bisect.bisect_left(self._order, line.front.urgency, key=_front_urgency)]
        line.drop_dead_front()
        if line.heap:
            line.front = line.heap[0][3]
            bisect.insort(self._order, line, key=_front_urgency)
        else:
            del self._lines[line.account]


def _front_urgency(line: _Line) -> tuple[int, int, int]:
    assert line.front is not None, "a line in order has a front"
    return line.front.urgency
