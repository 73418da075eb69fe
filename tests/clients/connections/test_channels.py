"""Several connections per client are truly different ones, used in turn.

A subscription goes on over another one.
"""

from __future__ import annotations

import pytest
from tests.clients.canned_service import REQUEST_ID, CannedServer, answer
from tests.clients.tcp_proxy import tcp_proxy
from tests.support.processes import wait_until

from headrace import AsyncClient, Client, Reconnecting, RetryPolicy

FAST = RetryPolicy(initial_backoff=0.01, max_backoff=0.02)


def test_each_channel_is_a_connection_of_its_own(server: CannedServer) -> None:
    with tcp_proxy(server.address) as proxy, Client(proxy.address, channels=4) as client:
        for _ in range(8):
            client.load()
        assert proxy.clients == 4
    peers = set(server.seen.peers)
    assert len(peers) == 4
    # In turn: no connection got more than its share.
    assert all(server.seen.peers.count(peer) == 2 for peer in peers)


async def test_async_channels_are_connections_of_their_own(server: CannedServer) -> None:
    with tcp_proxy(server.address) as proxy:
        async with AsyncClient(proxy.address, channels=3) as client:
            for _ in range(6):
                await client.load()
            assert proxy.clients == 3


def test_two_clients_of_one_server_share_no_connection(server: CannedServer) -> None:
    with tcp_proxy(server.address) as proxy, Client(proxy.address) as first, Client(proxy.address) as second:
        first.load()
        second.load()
        assert proxy.clients == 2


def test_streams_and_sessions_take_their_turn(server: CannedServer) -> None:
    with Client(server.address, channels=2) as client:
        assert client.generate("hello", max_tokens=2).result().text == answer(2)
        with client.session() as session:
            assert session.submit("hello", max_tokens=2).result().text == answer(2)
    assert len(set(server.seen.peers)) == 2


def test_a_subscription_goes_on_over_another_connection(server: CannedServer) -> None:
    server.service.breaks = [5]
    with Client(server.address, channels=2, retry=FAST) as client:
        events = list(client.subscribe(REQUEST_ID))
    assert sum(isinstance(event, Reconnecting) for event in events) == 1
    assert len(set(server.seen.peers)) == 2


def test_closing_closes_all_of_them(server: CannedServer) -> None:
    with tcp_proxy(server.address) as proxy:
        with Client(proxy.address, channels=3) as client:
            for _ in range(3):
                client.load()
            assert proxy.ended == 0
        wait_until(lambda: proxy.ended == 3, 20, "the connections are closed")


@pytest.mark.parametrize("channels", [0, -1, 65])
def test_a_number_of_channels_that_makes_no_sense_is_refused(channels: int) -> None:
    with pytest.raises(ValueError, match="channels must be 1 to 64"):
        Client(channels=channels)
