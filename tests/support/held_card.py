"""Takes all free memory of a card, and holds it until it is killed.

    python -m tests.support.held_card INDEX

By the driver alone: nothing that would need memory of its own.
"""

from __future__ import annotations

import ctypes
import signal
import sys

# The driver deals memory out in pieces of 2 MiB.
_LEAST_BYTES = 2 << 20


def main(index: int) -> None:
    """Never returns."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        assert not (error := getattr(driver, name)(*arguments)), f"{name} failed with {error}"

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    size, held = free.value, 0
    while size >= _LEAST_BYTES:
        if driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size)):
            size //= 2
        else:
            held += size
    print(f"holds {held} bytes", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]))
