"""A session with a backend of a benchmark's own: what it says of one that does not start."""

from __future__ import annotations

import pytest
from benchmarks.engine_session import engine_session


async def test_a_backend_that_ends_while_its_worker_starts_is_asked_for_its_last_words() -> None:
    """It refuses calls, and a moment later says why."""
    with pytest.raises(RuntimeError, match=r"(?s)exit code [1-9][0-9]*\).*kv_memory from 131072"):
        async with engine_session({"model": "models/demo", "device": "cpu", "kv_memory": "500GiB"}):
            pass
