"""Files of keys and certificates: who may own them, and whether they have changed.

Owns reading them whole and the rules for their modes. What can be written by others is refused,
since whoever writes a key file or a certificate lets himself in; a private key that everybody can
read is refused as well. A key file may be readable: it holds digests of random keys, which open
nothing. Changes are found by content, not by inotify or by times: mounted secrets change by a swap
of symbolic links above the file.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat

_MAX_BYTES = 4 << 20


class CredentialError(Exception):
    """A file cannot be used; the text names it and the rule."""


def read(path: pathlib.Path, *, private: bool) -> bytes:
    """Returns a file's content.

    Args:
        path: the file; symbolic links are followed.
        private: whether it must not be readable by everybody.

    Raises:
        CredentialError: it cannot be read, is too large, or its mode or owner breaks a rule.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            _check_mode(path, os.fstat(file.fileno()), private)
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CredentialError(f"{path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise CredentialError(f"{path}: has more than {_MAX_BYTES} bytes")
    return data


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file. To open a named pipe, which is then refused, never waits for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def fingerprint(*contents: bytes) -> bytes:
    """Returns what tells contents of files from others."""
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).digest()


def _check_mode(path: pathlib.Path, status: os.stat_result, private: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CredentialError(f"{path}: is no file")
    if status.st_uid not in (0, os.geteuid()):
        raise CredentialError(f"{path}: belongs to user {status.st_uid}; must belong to this process's user or to root")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CredentialError(f"{path}: others may write to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w")
    if private and status.st_mode & stat.S_IROTH:
        raise CredentialError(f"{path}: everybody may read it (mode {stat.S_IMODE(status.st_mode):04o}); chmod o-r")
