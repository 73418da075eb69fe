"""Tests that share a card: each gives back what it took, and one may want the card alone.

Owns the turns of the processes that share one suite on one machine. PyTorch keeps memory that
tensors had for tensors to come, of which other processes, and a test that looks at free memory,
have nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pathlib
import tempfile
from collections.abc import Iterator

import torch

_TURNS = pathlib.Path(tempfile.gettempdir()) / f"headrace-tests-card-{os.getuid()}.lock"


@contextlib.contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Waits until nobody has a card alone, or, for a caller that wants it alone, nobody has it."""
    with _TURNS.open("w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            gc.collect()
            torch.cuda.empty_cache()
