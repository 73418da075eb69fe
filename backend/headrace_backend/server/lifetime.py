"""The process's life: how it ends, what it dies with, and which socket it may call its own.

Owns exit codes, the tie to the parent process, the lock beside the socket, the checks of the
listening address and of the shared secret. Imports nothing heavy, because the tie to the parent
must be made before anything else is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import fcntl
import os
import pathlib
import signal
import stat
from collections.abc import Iterator

from headrace_credentials import files as credential_files
from headrace_health.address import LISTEN_RULE, is_address

_PR_SET_PDEATHSIG = 1
_MAX_SOCKET_PATH_BYTES = 107
_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096


class ExitCode(enum.IntEnum):
    """How the process ended. A restart helps after FAILED and WORKERS_LOST, never after REFUSED."""

    OK = 0
    FAILED = 1
    REFUSED = 2
    WORKERS_LOST = 3


class StartRefused(Exception):  # the reason why the process does not start, in one line
    """Configuration, model folder or socket can't be used; exit code 2."""


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL when the thread that started this process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


@dataclasses.dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to listen at: a unix socket, or a TCP port when `socket_path` is None."""

    target: str
    socket_path: pathlib.Path | None


def parse_listen(text: str) -> ListenAddress:
    """Reads `unix:PATH` or `HOST:PORT`.

    Raises:
        StartRefused: It is neither, or the path is too long for a socket.
    """
    if text.startswith("unix:"):
        path = pathlib.Path(text.removeprefix("unix:"))
        if not path.name:
            raise StartRefused(f"listen is {text!r}; unix: needs the path of a socket")
        path = path.absolute()
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise StartRefused(f"listen is {text!r}; a socket's path has at most {_MAX_SOCKET_PATH_BYTES} bytes")
        return ListenAddress(f"unix:{path}", path)
    if not is_address(text):
        raise StartRefused(f"listen is {text!r}; it {LISTEN_RULE}")
    return ListenAddress(text, None)


def read_secret(
    token_file: pathlib.Path | None, address: ListenAddress, *, has_certificates: bool = False
) -> bytes | None:
    """Reads the secret that services must present, without surrounding white space.

    It is None where certificates or the socket's folder protect the server.

    Raises:
        StartRefused: The file can't be read or its content is of no use, or a TCP port would be
            open without a secret.
    """
    if token_file is None:
        if address.socket_path is None and not has_certificates:
            raise StartRefused(f"listen is {address.target!r}; a TCP port needs token_file, or tls_client_ca")
        return None
    try:
        secret = credential_files.read(token_file, private=True).strip()
    except credential_files.CredentialError as error:
        raise StartRefused(f"token_file {error}") from error
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise StartRefused(
            f"token_file {token_file}: the secret must have {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes"
        )
    return secret


def _protected_folder(folder: pathlib.Path) -> None:
    """Makes the socket's folder, or checks that nobody else can enter the one that is there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise StartRefused(f"socket folder {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise StartRefused(f"socket folder {folder}: not a folder")
    if status.st_uid != os.geteuid():
        raise StartRefused(f"socket folder {folder}: belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if status.st_mode & 0o077:
        raise StartRefused(f"socket folder {folder}: mode {status.st_mode & 0o777:04o} lets others in; it must be 0700")


def _try_lock(path: pathlib.Path) -> int | None:
    """Returns a descriptor that locks the file at `path`; None if another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        # The holder before us may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


@contextlib.contextmanager
def claimed_socket(address: ListenAddress) -> Iterator[None]:
    """Holds a unix socket for this process.

    The folder is protected, `<socket>.pid` is locked, and a stale socket is removed.

    Removes both in the end.

    A TCP port needs none of it: the kernel gives a port to one listener (SO_REUSEPORT is off).

    Raises:
        StartRefused: The folder is open to others, or a running backend has the socket.
    """
    socket_path = address.socket_path
    if socket_path is None:
        yield
        return
    _protected_folder(socket_path.parent)
    pid_path = socket_path.with_name(socket_path.name + ".pid")
    try:
        descriptor = _try_lock(pid_path)
        if descriptor is None:
            raise StartRefused(f"socket {socket_path} is in use by another backend (process {_read_pid(pid_path)})")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _remove_stale_socket(socket_path)
    except OSError as error:
        raise StartRefused(f"socket {socket_path}: {error.strerror}") from error
    try:
        yield
    finally:
        socket_path.unlink(missing_ok=True)
        pid_path.unlink(missing_ok=True)
        os.close(descriptor)


def _read_pid(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[:20].strip() or "unknown"
    return "unknown"


def _remove_stale_socket(path: pathlib.Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StartRefused(f"socket {path}: something that is no socket is in its place")
        path.unlink()
