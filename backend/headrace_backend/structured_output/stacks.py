"""Threads with stacks of a known depth.

llguidance's compiler recurses with the depth of what it is given, and a stack that overflows ends
the process. So a grammar is tried in a process of its own first, on a stack that is smaller than
those on which it is compiled and followed here.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading

from llguidance import LLExecutor

TRIAL_STACK_BYTES = 8 << 20
STACK_BYTES = 4 * TRIAL_STACK_BYTES

_sizing = threading.Lock()


def thread_pool(num_threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """A pool whose threads have `STACK_BYTES` of stack, which are taken as they are used."""
    pool = concurrent.futures.ThreadPoolExecutor(num_threads, f"headrace-{name}")
    # The size counts for threads that start while it is set; a pool starts one for each task until
    # it has all.
    barrier = threading.Barrier(num_threads)
    with _sizing:
        before = threading.stack_size(STACK_BYTES)
        try:
            started = [pool.submit(barrier.wait) for _ in range(num_threads)]
        finally:
            threading.stack_size(before)
    concurrent.futures.wait(started)
    return pool


def library_threads(num_threads: int) -> LLExecutor:
    """The library's own threads, with the same stack."""
    # Read when the library starts its first thread, which is one of these.
    os.environ["RUST_MIN_STACK"] = str(STACK_BYTES)
    return LLExecutor(num_threads)
