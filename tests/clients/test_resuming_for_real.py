"""Subscriptions to a real server go on when connections and services are lost.

Not a token is lost, doubled or computed twice: the stream equals that of an undisturbed reader, and
the ledger counts the steps of a request that nobody disturbed. The tokens are bytes of several
scripts in random order, so that cuts fall into the middle of characters.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.clients.tcp_proxy import tcp_proxy
from tests.support.processes import alive, wait_until
from tests.support.running_server import RunningServer, running_server

import headrace
from headrace import AsyncClient, Client, Completion, Delta, Reconnecting, RetryPolicy
from headrace.events import Event

MAX_TOKENS = 120
_TRIES = 5
FAST = RetryPolicy(max_attempts=200, initial_backoff=0.02, max_backoff=0.1)


@pytest.fixture(scope="module")
def mortal_server() -> Iterator[RunningServer]:
    """A server whose services may be killed."""
    with running_server("--services", "2", "--num-blocks", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def options(shared_server: RunningServer) -> dict[str, Any]:
    """A generation whose tokens are single bytes of characters of two to four bytes.

    It has log probabilities of prompt and output.
    """
    with Client(shared_server.address) as client:
        ids = sorted(set(client.tokenize("é漢😀ß語🚀", add_special_tokens=False)))
    return {
        "prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 7,
        "logit_bias": dict.fromkeys(ids, 60.0), "logprobs": 2, "prompt_logprobs": 1,
    }  # fmt: skip


def _undisturbed(server: RunningServer, options: dict[str, Any], n: int, output_index: int | None) -> Completion:
    """Reads an equal generation in one piece, as a request of its own."""
    with Client(server.address) as client:
        submitted = client.submit(**options, n=n)
        return client.subscribe(submitted, output_index=output_index).result()


def _check_the_same(events: list[Event], disturbed: Completion, whole: Completion) -> None:
    for output, expected in zip(disturbed.outputs, whole.outputs, strict=True):
        assert output.token_ids == expected.token_ids and len(output.token_ids) == MAX_TOKENS
        assert output.text == expected.text
        assert output.logprobs == expected.logprobs
    assert disturbed.prompt_logprobs == whole.prompt_logprobs and whole.prompt_logprobs is not None
    assert disturbed.usage.output_tokens == whole.usage.output_tokens
    assert disturbed.ledger.step_count == whole.ledger.step_count
    assert disturbed.ledger.preemptions == whole.ledger.preemptions == 0
    # Some characters were spread over several tokens, or this test would not be about them.
    assert any(isinstance(event, Delta) and len(event.token_ids) > 1 and event.text for event in events)


def _read(stream: headrace.Stream, at_tokens: list[int], disturb: Callable[[], object]) -> list[Event]:
    """Reads to the end, and disturbs when so many tokens have come.

    It does so at most once after each message: on a busy machine the last of these numbers may come
    in too few of them.
    """
    events, tokens, left = [], 0, list(at_tokens)
    for event in stream:
        events.append(event)
        if isinstance(event, Delta):
            tokens += len(event.token_ids)
            if left and tokens >= left[0]:
                left.pop(0)
                disturb()
    return events


def _serving_us(server: RunningServer) -> list[psutil.Process]:
    """The services, those first that have a connection of this process."""
    port = int(server.address.rpartition(":")[2])
    ours = {end.laddr.port for end in psutil.Process().net_connections("tcp") if end.raddr and end.raddr.port == port}

    def is_elsewhere(service: psutil.Process) -> bool:
        return not any(end.raddr and end.raddr.port in ours for end in service.net_connections("tcp"))

    return sorted(server.services(), key=is_elsewhere)


def _both_serve(server: RunningServer) -> bool:
    """Whether whoever takes a connection can answer.

    The kernel chooses among the two: 16 connections go to one of them in one of 33,000 cases.
    """
    return len(server.services()) == 2 and all(_serves(server.address) for _ in range(16))


def _serves(address: str) -> bool:
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "output_index"), [(1, None), (2, None), (2, 1)])
def test_connections_cut_by_a_proxy(
    shared_server: RunningServer, options: dict[str, Any], n: int, output_index: int | None
) -> None:
    whole = _undisturbed(shared_server, options, n, output_index)
    # On a busy machine all of it may have come before the first cut: then again.
    for _ in range(_TRIES):
        with tcp_proxy(shared_server.address) as proxy, Client(proxy.address, channels=2, retry=FAST) as client:
            submitted = client.submit(**options, n=n)
            stream = client.subscribe(submitted, output_index=output_index)
            events = _read(stream, [3, 4, 11, 30, 31, 32, 75], proxy.cut)
            _check_the_same(events, stream.result(), whole)
        if sum(isinstance(event, Reconnecting) for event in events) >= 2:
            return
    raise AssertionError("the connection was never cut in time")


# The sync client's connections are cut above; both resume by the same rules, with canned answers in
# tests/clients/connections.
@pytest.mark.slow
async def test_connections_of_an_asyncio_client_cut_by_a_proxy(
    shared_server: RunningServer, options: dict[str, Any]
) -> None:
    whole = await asyncio.to_thread(_undisturbed, shared_server, options, 2, None)
    for _ in range(_TRIES):
        events = await _read_while_cut(shared_server, options, whole)
        if sum(isinstance(event, Reconnecting) for event in events) >= 2:
            return
    raise AssertionError("the connection was never cut in time")


async def _read_while_cut(shared_server: RunningServer, options: dict[str, Any], whole: Completion) -> list[Event]:
    events: list[Event] = []
    with tcp_proxy(shared_server.address) as proxy:
        async with AsyncClient(proxy.address, channels=2, retry=FAST) as client:
            submitted = await client.submit(**options, n=2)
            stream = client.subscribe(submitted)
            async for event in stream:
                events.append(event)
                if isinstance(event, Delta) and event.first_token_index in (2, 20, 60, 61):
                    proxy.cut()
            _check_the_same(events, await stream.result(), whole)
    return events


# A service is killed under a detached generation in tests/faults/test_processes_die.
@pytest.mark.slow
def test_service_processes_are_killed(mortal_server: RunningServer, options: dict[str, Any]) -> None:
    """Services are lost one after the other, first the one that serves this subscription.

    What they knew of the generation is in the engine.
    """
    whole = _undisturbed(mortal_server, options, 2, None)
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: len(mortal_server.services()) == 2, 60, "both services run")
        for process in _serving_us(mortal_server):
            if process.pid not in killed:
                killed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)
                wait_until(lambda pid=process.pid: not alive([pid]), 30, "the service is dead")
                return

    for _ in range(_TRIES):
        killed.clear()
        with Client(mortal_server.address, retry=FAST) as client:
            submitted = client.submit(**options, n=2)
            stream = client.subscribe(submitted)
            events = _read(stream, [5, 40, 90], kill)
            _check_the_same(events, stream.result(), whole)
        # A service that was just started takes calls before it has reached the engine.
        wait_until(lambda: _both_serve(mortal_server), 60, "both services serve")
        if len(killed) >= 2 and any(isinstance(event, Reconnecting) for event in events):
            return
    raise AssertionError("no service was killed in time")


def test_a_session_that_broke_is_attached_again(shared_server: RunningServer, options: dict[str, Any]) -> None:
    # In its own words: attaching by hand behind a broken character, the server may give that
    # character again.
    options = options | {"logit_bias": {}}
    whole = _undisturbed(shared_server, options, 1, None)
    pieces: list[Delta] = []
    with tcp_proxy(shared_server.address) as proxy, Client(proxy.address, retry=FAST) as client:
        with client.session() as session:
            generation = session.submit(**options, detached=True)
            with pytest.raises(headrace.Unavailable) as caught:
                for event in generation:
                    if isinstance(event, Delta):
                        pieces.append(event)
                        if len(pieces) == 10:
                            proxy.cut()
            assert caught.value.request_id == generation.request_id is not None, caught.value
        next_token = pieces[-1].first_token_index + len(pieces[-1].token_ids)
        # Calls are tried again, a session's are not.
        client.get_model()
        with client.session() as session:
            rest = session.attach(generation.request_id, from_token=next_token).result()
    assert tuple(i for piece in pieces for i in piece.token_ids) + rest.token_ids == whole.token_ids
    assert "".join(piece.text for piece in pieces) + rest.text == whole.text
    assert rest.ledger.step_count == whole.ledger.step_count
