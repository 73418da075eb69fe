"""The order of waiting: urgency, which never changes while a sequence waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.harness import request

from headrace_backend.engine.ledger import Ledger
from headrace_backend.engine.sequence import LiveRequest, Sequence
from headrace_backend.engine.tenant_account import TenantAccount
from headrace_backend.engine.token_log import OutputLog
from headrace_backend.engine.waiting_queue import WaitingQueue

ACCOUNT = TenantAccount("")


def sequence(number: int, urgency_ns: int, account: TenantAccount = ACCOUNT) -> Sequence:
    spec = request(3)
    live = LiveRequest(spec, number, 0, 0, Ledger(0, 0), 3, None, account)
    return Sequence(live, OutputLog(0, False), urgency_ns, None)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=300))
def test_live_sequences_come_out_by_urgency_and_the_ended_never(entries: list[tuple[int, bool]]) -> None:
    queue = WaitingQueue()
    sequences = [sequence(number, urgency) for number, (urgency, _) in enumerate(entries)]
    for entered in sequences:
        queue.push(entered)
    for entered, (_, ends) in zip(sequences, entries, strict=True):
        if ends:
            entered.ended = True
            queue.note_ended(entered)
    live = [entered for entered in sequences if not entered.ended]
    assert len(queue) == len(live) == len(list(queue))
    popped = []
    while (front := queue.peek()) is not None:
        assert queue.pop() is front
        popped.append(front)
    assert popped == sorted(live, key=lambda entered: entered.urgency)
    assert len(queue) == 0


def test_ended_sequences_are_swept_out_before_they_surface() -> None:
    queue = WaitingQueue()
    front = sequence(0, 0)
    queue.push(front)
    behind = [sequence(number, 10) for number in range(1, 1001)]
    for entered in behind:
        queue.push(entered)
    for entered in behind:
        entered.ended = True
        queue.note_ended(entered)
    assert len(queue._lines[ACCOUNT].heap) < 200
    assert len(queue) == 1
    assert queue.peek() is front
