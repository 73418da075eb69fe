"""The private folder of one running server.

The sockets of backends, control and telemetry, and the configurations of its processes.

Owns its mode (0700), its removal at the end, and the removal of folders whose server was killed. A
locked file in each folder tells the living from the dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

_PREFIX = "headrace-"
_LOCK = "lock"
CONTROL_SOCKET = "control.sock"
# One for each start of a model's backend.
ENGINE_SOCKET = "engine-{index}.sock"
_MOST_STARTS = 999_999
TELEMETRY_SOCKET = "telemetry.sock"
# One for each service, for health checks.
PROBE_SOCKET = "probe-{index}.sock"
# A socket's path holds 107 bytes.
MAX_BASE_BYTES = 107 - len(f"/{_PREFIX}xxxxxxxx/{ENGINE_SOCKET.format(index=_MOST_STARTS)}")


class RuntimeFolderError(Exception):
    """No private folder can be made there. The message names the folder."""


@contextlib.contextmanager
def runtime_folder(base: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new private folder below `base`, removed in the end.

    Raises:
        RuntimeFolderError: it can't be made, or sockets in it would have too long a path.
    """
    base = base.absolute()
    if len(os.fsencode(base)) > MAX_BASE_BYTES:
        raise RuntimeFolderError(
            f"runtime folder {base}: its path has more than {MAX_BASE_BYTES} bytes, too many for sockets in it"
        )
    _sweep(base)
    try:
        folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = _new_lock(folder)
    except OSError as error:
        raise RuntimeFolderError(f"runtime folder in {base}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _new_lock(folder: pathlib.Path) -> int:
    """A locked file in the folder; its descriptor holds the lock.

    It gets its name only once it is locked, or a sweep could lock it first.
    """
    nameless = folder / f"{_LOCK}.new"
    lock = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    nameless.rename(folder / _LOCK)
    return lock


def _sweep(base: pathlib.Path) -> None:
    """Removes our folders whose server is dead.

    One without a lock file is left alone: it may be in the making.
    """
    for lock in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
