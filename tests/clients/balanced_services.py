"""Real services of equal names whose engines differ: the first one's can do most.

Each has a fake engine that takes as many requests per second as the others and is busier by its
place, so that its weight is less. A caller finds which one answered by `waiting_tokens` of GetLoad,
the service's number from 1 on.
"""

from __future__ import annotations

import asyncio
import functools
import pathlib
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from tests.service.harness import running_service

from headrace_protos.engine.v1 import engine_pb2

_ROWS = 16
_ROWS_EACH = 4
_REQUESTS_PER_S = 50
_START_S = 240.0


@contextmanager
def balanced_services(model_path: pathlib.Path, count: int = 2) -> Iterator[list[str]]:
    """Runs the services on an event loop of their own; yields their addresses.

    Service number n uses n times 4 of 16 rows, so that its weight is that of the first over n.
    """
    started, stop = threading.Event(), asyncio.Event()
    addresses: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for number in range(1, count + 1):
                folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-")))
                running = await stack.enter_async_context(running_service(model_path, folder))
                running.engine.other_load = functools.partial(_load, number)
                addresses.append(running.address)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(_START_S), "the services did not start"
    try:
        yield addresses
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_START_S)


def _load(number: int) -> engine_pb2.Load:
    return engine_pb2.Load(
        running_sequences=_ROWS_EACH * number,
        max_running_sequences=_ROWS,
        waiting_tokens=number,
        taken_requests=int(time.monotonic() * _REQUESTS_PER_S),
    )
