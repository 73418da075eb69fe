"""Which settings may go together, and what an address that other machines reach needs."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from headrace_service.config import ServiceConfig

TLS = {"tls_cert": "server.pem", "tls_key": "server.key"}
KEYS = {"keys_file": "keys.json"}
OPEN = "0.0.0.0:50051"


def config(*listen: str, **settings: Any) -> ServiceConfig:
    return ServiceConfig(listen=listen or ("127.0.0.1:0",), engine=("unix:/x",), **settings)


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({}, "tls_cert and keys_file"),
        (TLS, "keys_file"),
        (KEYS, "tls_cert"),
        ({**TLS, "tls_client_ca": "ca.pem"}, "keys_file"),
    ],
)
@pytest.mark.parametrize("listen", [(OPEN,), ("127.0.0.1:1", OPEN), ("unix:/s", "[::]:1"), ("llm.example.org:1",)])
def test_an_exposed_address_needs_tls_and_keys(listen: tuple[str, ...], settings: dict[str, Any], lacking: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=f"needs {lacking} ") as refused:
        config(*listen, **settings)
    assert "--insecure" in str(refused.value)
    assert config(*listen, **settings, insecure=True).is_exposed


@pytest.mark.parametrize("listen", [(OPEN,), ("127.0.0.1:1", "[::]:1")])
def test_with_both_it_needs_nothing_else(listen: tuple[str, ...]) -> None:
    assert not config(*listen, **TLS, **KEYS).insecure


def test_this_machine_may_do_without() -> None:
    for listen in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/s"):
        assert not config(listen).is_exposed


@pytest.mark.parametrize(
    "listen", ["", "nowhere", "0.0.0.0", "0.0.0.0:", "0.0.0.0:http", ":50051", "0.0.0.0:65536", "unix:"]
)
def test_what_is_no_address_is_named_as_such_and_not_as_exposed(listen: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="must be HOST:PORT") as refused:
        config(listen)
    assert "--insecure" not in str(refused.value)


@pytest.mark.parametrize(
    ("listen", "settings", "named"),
    [
        ("127.0.0.1:0", {"tls_cert": "a"}, "tls_cert and tls_key"),
        ("127.0.0.1:0", {"tls_key": "a"}, "tls_cert and tls_key"),
        ("127.0.0.1:0", {"tls_client_ca": "a"}, "tls_client_ca"),
        ("unix:/s", TLS, "tls_cert: no address"),
        ("127.0.0.1:0", {"health_needs_key": True}, "health_needs_key"),
        ("127.0.0.1:0", {"probe": "127.0.0.1"}, "probe"),
        ("127.0.0.1:0", {"credentials_reload_s": 0}, "credentials_reload_s"),
        ("127.0.0.1:0", {"max_connections": 0}, "max_connections"),
        ("127.0.0.1:0", {"handshake_timeout_s": 0}, "handshake_timeout_s"),
    ],
)
def test_a_setting_that_would_do_nothing_or_harm_is_refused_by_name(
    listen: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=named):
        config(listen, **settings)
