"""The socket that a backend may call its own, and the secret that protects a port."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest

from headrace_backend.server.lifetime import ListenAddress, StartRefused, claimed_socket, parse_listen, read_secret


def test_listen_is_a_socket_or_a_port(tmp_path: pathlib.Path) -> None:
    assert parse_listen(f"unix:{tmp_path}/a.sock") == ListenAddress(f"unix:{tmp_path}/a.sock", tmp_path / "a.sock")
    assert parse_listen("127.0.0.1:80") == ListenAddress("127.0.0.1:80", None)
    assert parse_listen("[::1]:80") == ListenAddress("[::1]:80", None)


@pytest.mark.parametrize(
    "text", ["", "unix:", "localhost", ":80", "host:", "host:x", "host:65536", "unix:/" + "a" * 120]
)
def test_listen_refuses_what_is_neither(text: str) -> None:
    with pytest.raises(StartRefused, match="listen is"):
        parse_listen(text)


def test_port_needs_a_secret(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StartRefused, match="token_file"):
        read_secret(None, parse_listen("127.0.0.1:80"))
    assert read_secret(None, parse_listen(f"unix:{tmp_path}/a.sock")) is None


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 4097, b" \n" * 20])
def test_secret_must_have_a_valid_length(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(StartRefused, match="16 to 4096 bytes"):
        read_secret(tmp_path / "token", parse_listen("127.0.0.1:80"))


def test_secret_is_read_without_the_line_end(tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_bytes(b"0123456789abcdef\n")
    (tmp_path / "token").chmod(0o600)
    assert read_secret(tmp_path / "token", parse_listen("127.0.0.1:80")) == b"0123456789abcdef"
    with pytest.raises(StartRefused, match="No such file"):
        read_secret(tmp_path / "other", parse_listen("127.0.0.1:80"))


def test_a_secret_that_everybody_can_read_is_none(tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_bytes(b"0123456789abcdef\n")
    for mode, said in ((0o644, "everybody may read it"), (0o622, "others may write to it")):
        (tmp_path / "token").chmod(mode)
        with pytest.raises(StartRefused, match=said):
            read_secret(tmp_path / "token", parse_listen("127.0.0.1:80"))


def test_socket_folder_is_made_private(tmp_path: pathlib.Path) -> None:
    address = parse_listen(f"unix:{tmp_path}/run/headrace/a.sock")
    with claimed_socket(address):
        assert (tmp_path / "run/headrace").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "run/headrace/a.sock.pid").read_text() == f"{os.getpid()}\n"
    assert list((tmp_path / "run/headrace").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_socket_folder_that_others_can_enter_is_refused(tmp_path: pathlib.Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(StartRefused, match="lets others in"), claimed_socket(parse_listen(f"unix:{folder}/a.sock")):
        pass


def test_second_claim_is_refused_by_name_and_the_first_goes_on(tmp_path: pathlib.Path) -> None:
    address = parse_listen(f"unix:{tmp_path}/private/a.sock")
    with claimed_socket(address):
        (tmp_path / "private/a.sock").touch()
        with pytest.raises(StartRefused, match=rf"a\.sock is in use .*process {os.getpid()}"), claimed_socket(address):
            pass
        assert (tmp_path / "private/a.sock").exists()
    with claimed_socket(address):
        pass


def test_stale_socket_is_removed_and_anything_else_is_not(tmp_path: pathlib.Path) -> None:
    address = parse_listen(f"unix:{tmp_path}/private/a.sock")
    path = tmp_path / "private/a.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with claimed_socket(address):
        assert not path.exists()
    path.write_text("precious")
    with pytest.raises(StartRefused, match="no socket"), claimed_socket(address):
        pass
    assert path.read_text() == "precious"
