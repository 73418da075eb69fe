"""The public addresses of a server: held from before anything starts until everything has ended.

Owns the rule "one server per address", which the kernel does not keep: services share a port by
SO_REUSEPORT, so a second server would get a part of the calls, and on a Unix socket it would take
the path away. Three guards: a lock that dies with its holder, a probe that finds listeners of any
program, and on TCP a bound socket that never listens and so keeps the port while services restart.
Addresses that one process alone will listen on are looked at and not held (`check_free`). The lock
is an abstract socket name, so that it leaves no file behind, however its holder ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import socket
import stat
from collections.abc import Iterator

from headrace_health.address import LISTEN_RULE, host_and_port, joined

_MAX_PATH_BYTES = 107


class AddressError(Exception):
    """An address that is malformed, taken or not to be had. The message names it."""


@contextlib.contextmanager
def claimed(addresses: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Holds all addresses; gives them with port 0 replaced by the port that the kernel chose.

    Raises:
        AddressError: one of them can't be had.
    """
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(_claimed_one(address)) for address in addresses)


def check_free(address: str) -> None:
    """Looks whether HOST:PORT could be listened on now, for a process that comes later.

    Holds nothing.

    Port 0 is always free.

    Raises:
        AddressError: the host is not known or not this machine's, or the port is taken.
    """
    host, port = _split(address)
    for family, sockaddr in _all_resolved(address, host, port):
        try:
            _bound(family, sockaddr, socket.SO_REUSEADDR).close()
        except OSError as error:
            raise AddressError(f"{address}: {error.strerror}") from None


def _claimed_one(address: str) -> contextlib.AbstractContextManager[str]:
    path = address.removeprefix("unix:")
    if path and path != address:
        return _unix(address, pathlib.Path(path))
    return _tcp(address, *_split(address))


@contextlib.contextmanager
def _tcp(address: str, host: str, port: int) -> Iterator[str]:
    family, sockaddr = _resolved(address, host, port)
    with contextlib.ExitStack() as stack:
        try:
            if port:
                stack.enter_context(_name_lock(f"headrace {host} {port}"))
                _bound(family, sockaddr, socket.SO_REUSEADDR).close()
            holder = stack.enter_context(_bound(family, sockaddr, socket.SO_REUSEPORT))
        except OSError as error:
            raise AddressError(_reason(address, error)) from None
        yield joined(host, holder.getsockname()[1])


def _bound(family: socket.AddressFamily, sockaddr: tuple[str, int], option: int) -> socket.socket:
    """A bound socket.

    With SO_REUSEADDR it finds any other holder of the address; with SO_REUSEPORT it lets our
    services in.
    """
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(sockaddr)
    except OSError:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _name_lock(name: str) -> Iterator[None]:
    """Holds a name that one process of the network namespace can have.

    Raises OSError (EADDRINUSE) if another has it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        lock.bind("\0" + name)
        yield


@contextlib.contextmanager
def _unix(address: str, path: pathlib.Path) -> Iterator[str]:
    path = path.absolute()
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise AddressError(f"{address}: a socket's path has at most {_MAX_PATH_BYTES} bytes")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_name_lock(f"headrace {hashlib.sha256(os.fsencode(path)).hexdigest()}"))
            _remove_stale(path)
        except OSError as error:
            raise AddressError(_reason(address, error)) from None
        _try_path(address, path)
        yield f"unix:{path}"
        path.unlink(missing_ok=True)


def _try_path(address: str, path: pathlib.Path) -> None:
    """Makes a socket there and removes it: the services, which come later, will be able to.

    Raises AddressError.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        raise AddressError(
            f"{address}: {error.strerror}; the folder of a --listen unix:PATH must exist, and this user must be able "
            "to make files in it"
        ) from None


def _remove_stale(path: pathlib.Path) -> None:
    """Removes a socket that nobody answers at.

    Raises OSError: somebody does (EADDRINUSE), or it is no socket (EEXIST).
    """
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_socket:
        raise OSError(errno.EEXIST, "is a file or folder, and no socket; choose another address")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    path.unlink()


def _split(address: str) -> tuple[str, int]:
    try:
        return host_and_port(address)
    except ValueError:
        raise AddressError(f"{address}: {LISTEN_RULE}") from None


def _resolved(address: str, host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    return _all_resolved(address, host, port)[0]


def _all_resolved(address: str, host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"{address}: {getattr(error, 'strerror', None) or error}") from None
    return [(family, (str(sockaddr[0]), int(sockaddr[1]))) for family, _, _, _, sockaddr in found]


def _reason(address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another server; choose another address, or port 0 for any free one"
    return f"{address}: {error.strerror or error}"
