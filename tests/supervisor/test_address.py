"""Addresses: one server each, whoever else wants one."""

from __future__ import annotations

import pathlib
import re
import socket
import stat

import pytest

from headrace_supervisor.processes.address import AddressError, check_free, claimed


def listening(port: int) -> socket.socket:
    """A service as grpc opens it: SO_REUSEPORT and SO_REUSEADDR."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_port_0_becomes_a_real_port_that_services_can_share() -> None:
    with claimed(("127.0.0.1:0",)) as (address,):
        port = int(address.rpartition(":")[2])
        assert port > 0
        with listening(port), listening(port):
            for _ in range(50):
                # Always answered: the socket that holds the port does not listen, so no connection
                # goes to it.
                socket.create_connection(("127.0.0.1", port), timeout=120).close()


def test_a_second_claim_is_refused_and_names_the_address() -> None:
    with (
        claimed(("127.0.0.1:0",)) as (address,),
        pytest.raises(AddressError, match=f"{address} is in use"),
        claimed((address,)),
    ):
        pass


def test_a_claim_ends_with_its_block() -> None:
    with claimed(("127.0.0.1:0",)) as (address,):
        pass
    with claimed((address,)) as (again,):
        assert again == address


def test_another_programs_listener_is_found_even_if_it_shares() -> None:
    with listening(0) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match="in use"), claimed((f"127.0.0.1:{port}",)):
            pass
        with pytest.raises(AddressError, match="in use"), claimed((f"0.0.0.0:{port}",)):
            pass


def test_an_address_for_later_is_looked_at_and_not_held() -> None:
    with listening(0) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(AddressError, match=f"{taken}: .*in use"):
            check_free(taken)
    check_free(taken)
    check_free(taken)
    check_free("127.0.0.1:0")
    check_free("localhost:0")


@pytest.mark.parametrize("address", ["no such host:9464", "192.0.2.1:9464", "127.0.0.1:70000", f"{'a' * 64}.x:9464"])
def test_an_address_for_later_that_is_nobodys_is_refused_by_name(address: str) -> None:
    with pytest.raises(AddressError, match=re.escape(address)):
        check_free(address)


def test_if_one_address_is_taken_none_is_held() -> None:
    with listening(0) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with claimed(("127.0.0.1:0",)) as (free,):
            pass
        with pytest.raises(AddressError), claimed((free, taken)):
            pass
        with claimed((free,)):
            pass


def test_a_stale_unix_socket_is_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert stat.S_ISSOCK(path.lstat().st_mode)
    with claimed((f"unix:{path}",)) as (address,):
        assert address == f"unix:{path}"
        assert not path.exists()


def test_a_unix_socket_that_answers_is_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(AddressError, match="in use"), claimed((f"unix:{path}",)):
            pass
    assert path.exists()


def test_a_file_in_place_of_a_socket_is_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(AddressError, match="no socket"), claimed((f"unix:{path}",)):
        pass
    assert path.read_text() == "data"


@pytest.mark.parametrize("below", ["missing/s", "file/s", "missing/../s"])
def test_a_unix_path_without_a_folder_is_refused_with_the_rule(tmp_path: pathlib.Path, below: str) -> None:
    (tmp_path / "file").touch()
    address = f"unix:{tmp_path}/{below}"
    with (
        pytest.raises(AddressError, match=re.escape(address) + ": .* directory; the folder .* must exist"),
        claimed((address,)),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_unix_path_in_a_folder_that_takes_no_file_is_refused_with_the_rule() -> None:
    # Not even the superuser makes files there.
    with pytest.raises(AddressError, match="must be able to make files"), claimed(("unix:/proc/s",)):
        pass


def test_two_claims_of_one_unix_path_collide_before_anything_listens(tmp_path: pathlib.Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    with claimed((address,)), pytest.raises(AddressError, match="in use"), claimed((address,)):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address",
    [
        "",
        "50051",
        "localhost",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:65536",
        "127.0.0.1:" + "9" * 5000,
        "[]:50051",
        ":50051",
        "unix:",
    ],
)
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="must be HOST:PORT"), claimed((address,)):
        pass


def test_a_unix_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(AddressError, match="at most 107 bytes"), claimed(("unix:" + "x" * 200,)):
        pass
