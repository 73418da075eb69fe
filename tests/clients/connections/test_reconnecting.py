"""What happens when connections break.

Safe calls are sent again, subscriptions continue from the last token, the rest fails.
"""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.clients.canned_service import (
    PROMPT_TOKENS,
    REQUEST_ID,
    CannedServer,
    answer,
    canned_server,
    token,
    word,
)
from tests.clients.tcp_proxy import tcp_proxy
from tests.support.ports import free_address

import headrace
from headrace import (
    Accepted,
    AsyncClient,
    Client,
    Delta,
    Done,
    OutputFinished,
    PromptLogprobs,
    Reconnecting,
    RetryPolicy,
    Started,
)
from headrace.events import Event

FAST = RetryPolicy(initial_backoff=0.01, max_backoff=0.02)


def _check_no_token_lost_or_doubled(events: list[Event], outputs: list[int], first: int, end: int) -> None:
    kinds = [type(event) for event in events if not isinstance(event, Reconnecting)]
    assert kinds[:2] == [Accepted, Started] and kinds[-1] is Done
    parts = [event for event in events if isinstance(event, PromptLogprobs)]
    assert [i for p in parts for i in range(p.first_token_index, p.next_token_index)] in (
        [],
        list(range(1, PROMPT_TOKENS)),
    )
    assert kinds.count(Accepted) == kinds.count(Started) == kinds.count(Done) == 1
    for output in outputs:
        deltas = [event for event in events if isinstance(event, Delta) and event.output_index == output]
        assert [i for d in deltas for i in d.token_ids] == [token(i, output) for i in range(first, end)]
        assert "".join(d.text for d in deltas) == "".join(word(i, output) for i in range(first, end))
        assert all(d.logprobs is not None and len(d.logprobs.sampled) == len(d.token_ids) for d in deltas)
        assert all(len(d.text.split()) == len(d.token_ids) for d in deltas)
        assert sum(isinstance(e, OutputFinished) and e.output_index == output for e in events) == 1


def test_calls_that_read_are_sent_again(server: CannedServer) -> None:
    server.service.failures = 2
    with Client(server.address, retry=FAST) as client:
        assert client.tokenize("ab") == (97, 98)
        client.submit("hello")
    assert server.seen.attempts["Tokenize"] == 3
    assert server.seen.attempts["Submit"] == 3
    keys = {request.idempotency_key for request in server.seen.requests if hasattr(request, "idempotency_key")}
    assert len(keys) == 1


def test_calls_that_generate_are_sent_once(server: CannedServer) -> None:
    server.service.failures = 1
    with Client(server.address, retry=FAST) as client:
        with pytest.raises(headrace.Unavailable):
            client.generate("flaky").result()
        with pytest.raises(headrace.Unavailable):
            client.complete("flaky")
    assert server.seen.attempts["Generate"] == server.seen.attempts["Complete"] == 1


def test_retries_can_be_switched_off(server: CannedServer) -> None:
    server.service.failures = 1
    with Client(server.address, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(headrace.Unavailable):
            client.tokenize("ab")
    assert server.seen.attempts["Tokenize"] == 1


def test_no_server_is_unavailable_within_the_retries() -> None:
    begun = time.monotonic()
    with Client(free_address(), retry=FAST) as client, pytest.raises(headrace.Unavailable):
        client.load()
    assert time.monotonic() - begun < 60.0


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="max_attempts"):
        RetryPolicy(max_attempts=0)
    with pytest.raises(ValueError, match="initial_backoff"):
        RetryPolicy(initial_backoff=0)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    breaks=st.lists(st.integers(0, 25), max_size=4),
    outputs=st.integers(1, 3),
    first=st.integers(0, 12),
    single=st.booleans(),
    prompt=st.booleans(),
)
def test_a_subscription_loses_and_doubles_nothing(
    server: CannedServer, breaks: list[int], outputs: int, first: int, single: bool, prompt: bool
) -> None:
    server.service.breaks, server.service.outputs = breaks, outputs
    server.service.with_prompt_logprobs = prompt
    server.seen.attempts.clear()
    with Client(server.address, retry=RetryPolicy(max_attempts=9, initial_backoff=0.001)) as client:
        output_index = outputs - 1 if single else None
        events = list(client.subscribe(REQUEST_ID, output_index=output_index, from_token=first))
    read = [outputs - 1] if single else list(range(outputs))
    assert any(isinstance(event, PromptLogprobs) for event in events) == prompt
    _check_no_token_lost_or_doubled(events, read, first, 12)


def test_a_broken_subscription_says_so_and_asks_for_the_next_token(server: CannedServer) -> None:
    server.service.breaks = [6]
    with Client(server.address, retry=FAST) as client:
        events = list(client.subscribe(REQUEST_ID, output_index=0))
    breaks = [event for event in events if isinstance(event, Reconnecting)]
    assert len(breaks) == 1 and isinstance(breaks[0].error, headrace.Unavailable) and breaks[0].attempt == 1
    assert [request.from_token for request in server.seen.requests] == [0, 4]
    _check_no_token_lost_or_doubled(events, [0], 0, 12)


def test_a_single_output_is_asked_for_from_the_next_token_too(server: CannedServer) -> None:
    """No other output's place is asked for.

    What submit returned tells that there is none.
    """
    server.service.breaks = [6]
    with Client(server.address, retry=FAST) as client:
        events = list(client.subscribe(client.submit("hello")))
        assert [(r.from_token, r.HasField("output_index")) for r in server.seen.requests[1:]] == [(0, False), (4, True)]
        _check_no_token_lost_or_doubled(events, [0], 0, 12)
        server.service.outputs = 2
        server.seen.attempts.clear()
        events = list(client.subscribe(client.submit("hello", n=2)))
        assert [r.from_token for r in server.seen.requests[-2:]] == [0, 0]
    _check_no_token_lost_or_doubled(events, [0, 1], 0, 12)


def test_a_subscription_survives_connections_that_are_cut(server: CannedServer) -> None:
    server.service.stalls, server.service.outputs = [6, 8], 2
    cut: list[int] = []
    with tcp_proxy(server.address) as proxy, Client(proxy.address, retry=FAST) as client:
        server.service.on_stall = lambda: cut.append(proxy.cut())
        events = list(client.subscribe(REQUEST_ID))
    assert cut == [1, 1]
    assert sum(isinstance(event, Reconnecting) for event in events) >= 2
    assert server.seen.attempts["Subscribe"] == 3
    _check_no_token_lost_or_doubled(events, [0, 1], 0, 12)


async def test_async_subscription_survives_connections_that_are_cut(server: CannedServer) -> None:
    server.service.stalls = [5, 6]
    cut: list[int] = []
    with tcp_proxy(server.address) as proxy:
        async with AsyncClient(proxy.address, retry=FAST) as client:
            server.service.on_stall = lambda: cut.append(proxy.cut())
            events = [event async for event in client.subscribe(REQUEST_ID)]
    assert cut == [1, 1]
    assert server.seen.attempts["Subscribe"] == 3
    _check_no_token_lost_or_doubled(events, [0], 0, 12)


def test_a_cut_generation_fails_and_is_not_started_again(server: CannedServer) -> None:
    with tcp_proxy(server.address) as proxy, Client(proxy.address, retry=FAST) as client:
        stream = client.generate("endless")
        next(stream)
        proxy.cut()
        with pytest.raises(headrace.Unavailable) as caught:
            stream.result()
    assert caught.value.request_id == REQUEST_ID
    assert server.seen.attempts["Generate"] == 1
    assert server.seen.cancelled.wait(120)


def test_a_subscription_waits_for_a_server_that_comes_back() -> None:
    """Connections are refused for a while in the middle.

    The first server is gone before the second one listens on its port.
    """
    address = free_address()
    events: list[Event] = []
    with Client(address, retry=RetryPolicy(max_attempts=1000, initial_backoff=0.05, max_backoff=0.2)) as client:
        with canned_server(address) as first:
            first.service.breaks = [5]
            stream = client.subscribe(REQUEST_ID)
            while not any(isinstance(event, Reconnecting) for event in events):
                events.append(next(stream))
        events.append(next(stream))
        assert isinstance(events[-1], Reconnecting)
        with canned_server(address):
            events.extend(stream)
    _check_no_token_lost_or_doubled(events, [0], 0, 12)


def test_a_subscription_gives_up_after_its_attempts_and_at_its_timeout(server: CannedServer) -> None:
    server.service.breaks = [0] * 5000
    with Client(server.address, retry=RetryPolicy(max_attempts=3, initial_backoff=0.01)) as client:
        stream = client.subscribe(REQUEST_ID)
        with pytest.raises(headrace.Unavailable):
            stream.result()
        assert server.seen.attempts["Subscribe"] == 3
    with Client(server.address, retry=RetryPolicy(max_attempts=4000, initial_backoff=0.1, multiplier=1.0)) as client:
        begun = time.monotonic()
        with pytest.raises(headrace.HeadraceError):
            client.subscribe(REQUEST_ID, timeout=0.5).result()
        # Its attempts alone would take minutes.
        assert time.monotonic() - begun < 60.0


def test_closing_while_it_waits_to_reconnect_ends_the_stream(server: CannedServer) -> None:
    server.service.breaks = [0] * 50
    with Client(server.address, retry=RetryPolicy(initial_backoff=200, max_backoff=200)) as client:
        stream = client.subscribe(REQUEST_ID)
        assert isinstance(next(stream), Reconnecting)
        threading.Timer(0.1, stream.close).start()
        begun = time.monotonic()
        assert list(stream) == []
        assert time.monotonic() - begun < 60


async def test_async_subscription_loses_and_doubles_nothing(server: CannedServer) -> None:
    server.service.breaks, server.service.outputs = [5, 0, 9], 2
    async with AsyncClient(server.address, retry=FAST) as client:
        events = [event async for event in client.subscribe(REQUEST_ID)]
    assert sum(isinstance(event, Reconnecting) for event in events) == 3
    _check_no_token_lost_or_doubled(events, [0, 1], 0, 12)


async def test_async_result_of_a_broken_subscription_is_whole(server: CannedServer) -> None:
    server.service.breaks = [4, 7]
    async with AsyncClient(server.address, retry=FAST) as client:
        assert (await client.subscribe(REQUEST_ID).result()).text == answer(12)
        server.service.failures = 1
        assert await client.tokenize("a") == (97,)
