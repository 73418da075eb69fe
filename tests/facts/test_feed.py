"""The feed with real sockets: order, greetings, bounds and counted drops."""

from __future__ import annotations

import asyncio
import pathlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from tests.support.telemetry_peer import Peer

from headrace_facts import facts
from headrace_facts.feed import Feed

HELLO = facts.Hello("service", "service-0", "0123456789abcdef", "1", 1, 0)


@pytest.fixture
async def peer(tmp_path: pathlib.Path) -> AsyncIterator[Peer]:
    peer = Peer(tmp_path / "t.sock")
    yield peer
    if peer.server is not None:
        await peer.die()


async def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


def load(number: int) -> facts.ServiceLoad:
    return facts.ServiceLoad(number, 0, 0)


def generation(request_id: str, tokens: int) -> facts.Generation:
    return facts.Generation(
        request_id, "demo", "r", "chat", "generate", 0, 1, 2, 1, 3, tokens, 0, ["stop"], error_type="x" * 200
    )


def numbers(taken: list[facts.Fact]) -> list[int]:
    return [fact.open_calls for fact in taken if isinstance(fact, facts.ServiceLoad)]


async def test_hello_comes_first_then_greetings_then_what_was_reported_in_order(peer: Peer) -> None:
    await peer.listen()
    feed = Feed(f"unix:{peer.path}", HELLO)
    engine = facts.EngineFacts("0123456789abcdef", "demo", "cpu", 1, 2.0, 3.0, 4.0, 5)
    for number in range(100):
        feed.tell(load(number))
    feed.greet(engine)
    feed.start()
    await until(lambda: len(peer.taken) == 102)
    assert peer.taken[:2] == [HELLO, engine]
    assert numbers(peer.taken) == list(range(100))
    await feed.stop()


async def test_a_fact_reported_alone_arrives_without_another(peer: Peer) -> None:
    await peer.listen()
    feed = Feed(str(peer.path), HELLO)
    feed.start()
    await until(lambda: feed.connected)
    await asyncio.sleep(0.1)
    feed.tell(load(7))
    await until(lambda: numbers(peer.taken) == [7])
    await feed.stop()


async def test_stop_sends_what_waits(peer: Peer) -> None:
    await peer.listen()
    feed = Feed(str(peer.path), HELLO)
    feed.start()
    await until(lambda: feed.connected)
    for number in range(5000):
        feed.tell(load(number))
    # A second is not enough everywhere.
    await feed.stop(timeout_s=60.0)
    await until(lambda: numbers(peer.taken) == list(range(5000)))


async def test_facts_reported_while_nobody_listens_wait_up_to_the_bound_then_the_newest_are_dropped_and_reported(
    peer: Peer,
) -> None:
    feed = Feed(str(peer.path), HELLO, max_buffered_bytes=20_000)
    feed.start()
    for number in range(200):
        feed.tell(generation(f"r{number}", tokens=number))
    assert feed.num_dropped_facts > 0
    await peer.listen()
    await until(lambda: bool(peer.taken) and isinstance(peer.taken[-1], facts.Dropped))
    taken = [fact.output_tokens for fact in peer.taken if isinstance(fact, facts.Generation)]
    dropped = peer.taken[-1]
    assert isinstance(dropped, facts.Dropped)
    assert taken == list(range(len(taken)))
    assert dropped == facts.Dropped(200 - len(taken), sum(range(200)) - sum(taken))
    assert (feed.num_dropped_facts, feed.num_dropped_tokens) == (dropped.facts, dropped.tokens)
    await feed.stop()


async def test_a_peer_that_takes_nothing_costs_no_more_than_the_buffer(peer: Peer) -> None:
    await peer.listen()
    peer.reads.clear()
    feed = Feed(str(peer.path), HELLO, max_buffered_bytes=1 << 20)
    feed.start()
    await until(lambda: feed.connected)
    num_reported = 0
    while feed.num_dropped_facts < 1000:
        for _ in range(100):
            feed.tell(generation("r", tokens=1))
            num_reported += 1
        await asyncio.sleep(0)
    assert feed._num_bytes <= 1 << 20
    peer.reads.set()
    await until(lambda: any(isinstance(fact, facts.Dropped) for fact in peer.taken))
    feed.tell(load(1))
    await until(lambda: numbers(peer.taken) == [1])
    reported_drops = sum(fact.facts for fact in peer.taken if isinstance(fact, facts.Dropped))
    assert sum(isinstance(fact, facts.Generation) for fact in peer.taken) + reported_drops == num_reported
    await feed.stop()


async def test_stop_does_not_wait_for_a_peer_that_takes_nothing(peer: Peer) -> None:
    await peer.listen()
    peer.reads.clear()
    feed = Feed(str(peer.path), HELLO)
    feed.start()
    await until(lambda: feed.connected)
    for _ in range(10_000):
        feed.tell(generation("r", tokens=1))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await feed.stop(timeout_s=0.2)
    assert loop.time() - began_s < 30.0


async def test_a_peer_that_dies_in_mid_message_is_followed_by_the_next_and_every_fact_arrived_or_counts_as_dropped(
    peer: Peer,
) -> None:
    await peer.listen()
    feed = Feed(str(peer.path), HELLO)
    greeting = facts.EngineFacts("0123456789abcdef", "demo", "cpu", 1, 2.0, 3.0, 4.0, 5)
    feed.greet(greeting)
    feed.start()
    await until(lambda: feed.connected)
    peer.reads.clear()
    for number in range(100_000):
        feed.tell(load(number))
    await asyncio.sleep(0.1)
    await peer.die()
    await until(lambda: not feed.connected)
    peer.reads.set()
    await peer.listen()
    await until(lambda: peer.num_connections == 2 and any(isinstance(fact, facts.Dropped) for fact in peer.taken))
    assert peer.taken[:2] == [HELLO, greeting]
    taken = numbers(peer.taken)
    assert taken == list(range(taken[0], 100_000)), "without a gap, and none twice"
    reported = sum(fact.facts for fact in peer.taken if isinstance(fact, facts.Dropped))
    assert 0 < reported <= taken[0], "what the kernel had taken is not known to be lost"
    await feed.stop()


async def test_a_new_connection_hears_of_before_what_waits(peer: Peer) -> None:
    calls: list[int] = []
    feed = Feed(str(peer.path), HELLO, on_connect=lambda: calls.append(len(peer.taken)))
    feed.start()
    await asyncio.sleep(0.05)
    assert not calls
    await peer.listen()
    await until(lambda: len(calls) == 1)
    await peer.die()
    await until(lambda: not feed.connected)
    await peer.listen()
    await until(lambda: len(calls) == 2)
    await feed.stop()


async def test_answers_come_in_order_and_a_listener_that_fails_ends_nothing(peer: Peer) -> None:
    await peer.listen()
    answers: list[facts.Answer] = []

    def on_answer(answer: facts.Answer) -> None:
        answers.append(answer)
        raise RuntimeError("the listener's own fault")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    feed = Feed(str(peer.path), HELLO, on_answer)
    feed.start()
    await until(lambda: bool(peer.writers))
    sent: list[facts.Answer] = [
        facts.TraceSettings(0.5, facts.Detail.SPAN, True),
        facts.TraceFound(1, b"x" * 100_000, True),
    ]
    for answer in sent:
        data = facts.encode(answer)
        peer.writers[0].write(len(data).to_bytes(4, "little") + data)
    await until(lambda: len(answers) == 2)
    assert answers == sent
    assert feed.connected
    await feed.stop()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", b"\0\0\0\0"])
async def test_an_answer_that_is_none_ends_the_connection_and_a_new_one_is_made(peer: Peer, garbage: bytes) -> None:
    await peer.listen()
    feed = Feed(str(peer.path), HELLO)
    feed.start()
    await until(lambda: bool(peer.writers))
    peer.writers[0].write(garbage)
    await until(lambda: peer.num_connections == 2)
    feed.tell(load(1))
    await until(lambda: numbers(peer.taken) == [1])
    await feed.stop()


async def test_what_can_not_be_encoded_counts_as_dropped(peer: Peer) -> None:
    await peer.listen()
    feed = Feed(str(peer.path), HELLO)
    feed.tell(load(2**80))
    feed.start()
    await until(lambda: facts.Dropped(1, 0) in peer.taken)
    await feed.stop()


async def test_a_peer_that_comes_late_is_found_within_a_second_and_a_half(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float) -> None:
        waits_s.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    feed = Feed(str(peer.path), HELLO)
    feed.start()
    while len(waits_s) < 20:
        await sleep(0)
    monkeypatch.undo()
    await feed.stop()
    assert waits_s[0] < 0.2 and sum(waits_s[:4]) < 2 and 0.5 < max(waits_s) < 1.5


async def test_a_socket_that_is_no_socket_is_tried_again(tmp_path: pathlib.Path) -> None:
    (tmp_path / "t.sock").write_text("")
    feed = Feed(str(tmp_path / "t.sock"), HELLO)
    feed.start()
    await asyncio.sleep(0.3)
    assert not feed.connected
    feed.tell(load(1))
    await feed.stop()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError):
        probe.connect(str(tmp_path / "t.sock"))
