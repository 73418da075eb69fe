"""The private folder of one running server: the backend's socket and the configurations of its processes.

Owns its mode (0700), its removal at the end, and the removal of folders whose server was killed. A locked file in each folder tells the living
from the dead.
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
# The longest name of a socket in the folder, within the 107 bytes that the kernel allows.
_MAX_FOLDER_BYTES = 90


class RuntimeFolderError(Exception):
    """No private folder can be made there. The message names the folder."""


@contextlib.contextmanager
def runtime_folder(base: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new private folder below `base`, removed in the end.

    Raises:
        RuntimeFolderError: it can't be made, or sockets in it would have too long a path.
    """
    base = base.absolute()
    if len(os.fsencode(base)) > _MAX_FOLDER_BYTES - 20:
        raise RuntimeFolderError(
            f"runtime folder {base}: sockets in it would have a path of more than 107 bytes; choose a shorter --runtime-folder"
        )
    _sweep(base)
    try:
        folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RuntimeFolderError(f"runtime folder in {base}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(base: pathlib.Path) -> None:
    """Removes our folders whose server is dead. One without a lock file is left alone: it may be in the making."""
    for lock in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
