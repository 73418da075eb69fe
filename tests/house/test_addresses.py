"""One rule says what an address is, whoever is given it."""

from __future__ import annotations

import ipaddress

import hypothesis
import pytest
from hypothesis import strategies as st

from headrace_health.address import (
    LISTEN_RULE,
    MAX_PORT,
    TCP_RULE,
    host_and_port,
    is_address,
    is_reachable,
    joined,
    listen_address,
    overlap,
    peer_address,
    port_of,
    tcp_address,
)

BAD_PORTS = [
    "h:65536",
    "h:99999",
    "h:-1",
    "h:",
    "h:a",
    "h:1.5",
    "h:\u0661",
    "h:+1",
    "h: 1",
    "h:000001",
    "h",
    ":80",
    "[]:80",
    "",
]


@pytest.mark.parametrize("text", [*BAD_PORTS, "unix:"])
def test_what_is_no_address_is_refused_with_the_range(text: str) -> None:
    assert not is_address(text) and not is_reachable(text)
    with pytest.raises(ValueError, match=f"^{LISTEN_RULE}$"):
        listen_address(text)


@pytest.mark.parametrize("text", [*BAD_PORTS, "unix:", "unix:/socket", "unix:/socket:80"])
def test_what_listens_by_tcp_alone_takes_no_socket_of_a_path(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{TCP_RULE}$"):
        tcp_address(text)


@pytest.mark.parametrize(
    "text", [*BAD_PORTS, "h:0", "unix:/socket", "::1:80", "[::1:80", "::1]:80", "[h]:80", "a b:80", " h:80", "h:80 "]
)
def test_nobody_is_reached_where_no_other_machine_can_listen(text: str) -> None:
    with pytest.raises(ValueError, match=f"HOST:PORT with a port of 1 to {MAX_PORT}"):
        peer_address(text)


@hypothesis.given(
    st.sampled_from(["localhost", "engine-0.engines.svc", "127.0.0.1"]) | st.ip_addresses(v=6),
    st.integers(1, MAX_PORT),
)
def test_hosts_and_ports_are_taken_as_they_are(host: str | ipaddress.IPv6Address, port: int) -> None:
    text = f"[{host}]:{port}" if isinstance(host, ipaddress.IPv6Address) else f"{host}:{port}"
    assert peer_address(text) == listen_address(text) == tcp_address(text) == text
    assert host_and_port(text) == (str(host), port) and joined(str(host), port) == text
    assert is_address(text) and is_reachable(text) and port_of(text) == port


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("127.0.0.1:80", "127.0.0.1:80", True),
        ("127.0.0.1:80", "127.0.0.1:81", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("0.0.0.0:80", "127.0.0.1:80", True),
        ("0.0.0.0:80", "name:80", True),
        ("0.0.0.0:80", "[::1]:80", False),
        ("[::]:80", "127.0.0.1:80", True),
        ("[::]:80", "0.0.0.0:80", True),
        ("localhost:80", "127.0.0.1:80", True),
        ("localhost:80", "[::1]:80", True),
        ("LocalHost:80", "localhost:80", True),
        ("127.0.0.1:80", "[::1]:80", False),
        ("127.0.0.1:80", "127.0.0.2:80", False),
        ("localhost:80", "10.0.0.1:80", False),
        ("unix:/run/a", "unix:/run/a", True),
        ("unix:/run/x/../a", "unix:/run/a", True),
        ("unix:/run/a", "unix:/run/b", False),
        ("unix:/run/a", "127.0.0.1:80", False),
        ("nowhere", "nowhere", False),
    ],
)
def test_who_listens_everywhere_listens_at_each_of_the_hosts_too(one: str, other: str, are_same: bool) -> None:
    assert overlap(one, other) == overlap(other, one) == are_same
