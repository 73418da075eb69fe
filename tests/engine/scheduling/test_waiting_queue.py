"""The order of waiting: urgency, which never changes while a sequence waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.harness import request

from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.requests.ledger import Ledger
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.requests.token_log import OutputLog
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue

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


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(0, 20), st.integers(0, 39))
def test_those_behind_the_front_come_by_urgency_and_one_may_go_first(
    entries: list[tuple[int, bool]], count: int, chosen: int
) -> None:
    queue = WaitingQueue()
    sequences = [sequence(number, urgency) for number, (urgency, _) in enumerate(entries)]
    for entered in sequences:
        queue.push(entered)
    for entered, (_, ends) in zip(sequences, entries, strict=True):
        if ends:
            entered.ended = True
            queue.note_ended(entered)
    live = sorted((entered for entered in sequences if not entered.ended), key=lambda entered: entered.urgency)
    behind = list(queue.behind_front(count))
    # Ended ones are looked at too, as each look costs something.
    assert behind == live[1 : 1 + len(behind)] and len(behind) <= count
    if len(live) == len(sequences):
        assert len(behind) == min(count, max(0, len(live) - 1))
    assert not queue.put_back(), "nothing was brought forward"
    if chosen < len(behind):
        for ends_in_line in (True, False):
            queue.bring_forward(behind[chosen])
            assert queue.peek() is behind[chosen]
            assert not queue.park(), "the front may need less"
            if ends_in_line:
                assert queue.put_back() and queue.peek() is live[0]
            else:
                assert queue.pop() is behind[chosen]
        live.remove(behind[chosen])
    assert len(queue) == len(live) and queue.num_counted_tokens == 3 * len(live)
    assert [queue.pop() for _ in live] == live and queue.peek() is None


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


actions = st.lists(
    st.tuples(st.sampled_from(["push", "pop", "park", "unpark", "end", "take"]), st.integers(0, 2), st.integers(0, 9)),
    max_size=80,
)


@given(actions)
def test_parked_tenants_are_passed_over_until_they_may_be_tried_again(steps: list[tuple[str, int, int]]) -> None:
    queue = WaitingQueue()
    accounts = [TenantAccount(str(number)) for number in range(3)]
    waiting: list[Sequence] = []
    # What each parked tenant's front was when it was parked.
    parked: dict[TenantAccount, Sequence] = {}
    for number, (action, tenant, urgency) in enumerate(steps):
        account = accounts[tenant]
        front = queue.peek()
        if action == "push":
            entered = sequence(number, urgency, account)
            queue.push(entered)
            waiting.append(entered)
        elif action == "pop" and front is not None:
            assert queue.pop() is front
            waiting.remove(front)
        elif action == "park" and front is not None:
            queue.park()
            parked[front.request.account] = front
        elif action == "unpark":
            queue.unpark(account)
            parked.pop(account, None)
        elif action == "end" and waiting:
            ended = waiting.pop(urgency % len(waiting))
            ended.ended = True
            queue.note_ended(ended)
        elif action == "take":
            requests = frozenset(entered.request for entered in waiting if entered.request.account is account)
            taken = queue.take(requests)
            assert {entered.request for entered in taken} == requests
            waiting = [entered for entered in waiting if entered.request not in requests]
            parked.clear()
        # A tenant with another front may be tried.
        for passed_over, front in list(parked.items()):
            of_tenant = [entered for entered in waiting if entered.request.account is passed_over]
            if min(of_tenant, key=lambda entered: entered.urgency, default=None) is not front:
                del parked[passed_over]
        free = [entered for entered in waiting if entered.request.account not in parked]
        assert queue.peek() is min(free, key=lambda entered: entered.urgency, default=None)
        assert len(queue) == len(waiting) and set(queue) == set(waiting)
        assert queue.num_counted_tokens == 3 * len(free)
