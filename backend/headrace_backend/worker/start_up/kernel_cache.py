"""The folder in which compiled GPU kernels outlive the process: only the first start compiles.

Owns where it is and whether it can be trusted: what lies there is loaded and run, so that it must
be ours alone. Triton keys its files by source, types, card and its own compiler's bytes, which
`hash_compiler` has read in time; nothing here knows what is in them.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping

from triton.runtime.cache import triton_key

# Where Triton looks.
VARIABLE = "TRITON_CACHE_DIR"


class UnusableFolder(Exception):  # an outcome
    """The folder can't be the cache. One line that names it."""


def default_folder(environment: Mapping[str, str]) -> pathlib.Path:
    """The user's own cache folder, as the XDG rules have it."""
    base = pathlib.Path(environment.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else pathlib.Path.home() / ".cache") / "headrace" / "kernels"


def use_kernel_cache(configured: pathlib.Path | None) -> str | None:
    """Has Triton keep its kernels in the configured folder, else in one of this process.

    Args:
        configured: The setting. None: what the environment says already, or `default_folder`.

    Returns:
        One line for the operator if the kernels won't last.
    """
    if configured is None and os.environ.get(VARIABLE):
        return None
    folder = configured or default_folder(os.environ)
    try:
        os.environ[VARIABLE] = str(checked_folder(folder))
    except UnusableFolder as unusable:
        temporary = tempfile.mkdtemp(prefix="headrace-kernels-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        os.environ[VARIABLE] = temporary
        return f"{unusable}; kernels are compiled anew at every start, --kernel-cache names another folder"
    return None


def hash_compiler() -> threading.Thread:
    """Has a thread read the compiler whose hash is in the name of every kernel's file.

    The first kernel of a process waits for it, also where all are compiled already: 416 MB, 0.4 s
    of a core that others use too. Hashing leaves the interpreter to the start that goes on.
    """
    thread = threading.Thread(target=triton_key, name="headrace-compiler-hash", daemon=True)
    thread.start()
    return thread


def checked_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder, made if need be, as an absolute path.

    Raises:
        UnusableFolder: It can't be made or written to, or others may write to it.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnusableFolder(f"kernel cache {folder}: others may write to it, and what it holds is run")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UnusableFolder(f"kernel cache {folder}: {error.strerror}") from None
    return folder
