"""A cluster at whose head nobody listens is refused at once, and not by Ray after minutes."""

from __future__ import annotations

import socket

import pytest

from headrace_ray.errors import DeploymentError
from headrace_ray.head import check_head


@pytest.mark.parametrize("address", ["", "head", "head:0", "head:99999", "auto", "local", "ray://head:10001", ":6379"])
def test_what_is_no_address_of_a_head_is_refused(address: str) -> None:
    with pytest.raises(DeploymentError, match="address: .* must be HOST:PORT with a port of 1 to 65535"):
        check_head(address)


def test_a_head_at_which_nobody_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        check_head(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        check_head(None)
    with pytest.raises(DeploymentError, match=f"^address: no Ray cluster at {address}: Connection refused"):
        check_head(address)
    with pytest.raises(DeploymentError, match=f"^RAY_ADDRESS: no Ray cluster at {address}: Connection refused"):
        check_head(None)
    with pytest.raises(DeploymentError, match=f"^address: no Ray cluster at {'a' * 64}.x:6379: "):
        check_head(f"{'a' * 64}.x:6379")


@pytest.mark.parametrize("named", ["", "auto", "ray://head:10001"])
def test_other_forms_of_the_variable_are_left_to_ray(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    check_head(None)
