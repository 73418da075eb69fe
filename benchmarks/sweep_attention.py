"""Times tiles, warps and stages of the paged attention kernels on one shape each.

The launch rules in `headrace_kernels` are chosen from them.

python -m benchmarks.sweep_attention decode|prefill [--batch 32] [--context 8192] [--limit-s 120]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.graph_timing import graph_seconds
from benchmarks.kernel_cases.attention import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, Layer, head_bytes, layer, seen
from headrace_kernels.attention.decode import decode_attention
from headrace_kernels.attention.prefill import prefill_attention
from headrace_kernels.attention.quantized_kv import KV_TYPES
from headrace_kernels.attention.tiles import Launch

_COPIES = 3


def launches(kind: str) -> Iterator[Launch]:
    """What is tried.

    A decode's keys are found by a table that is loaded before them: two stages more are one more
    tile in flight.
    """
    if kind == "decode":
        yield from itertools.starmap(Launch, itertools.product((64, 128), (2, 4), (3, 5, 7)))
    else:
        yield from itertools.starmap(Launch, itertools.product((32, 64, 128), (4, 8), (2, 3, 4)))


def runs(kind: str, data: Layer, launch: Launch) -> Callable[[], object]:
    """One launch of the kernel (and of the merging one, where there is one) on a layer's data."""
    output = torch.empty_like(data.query)
    step, arguments = data.step, (data.query, data.kv_cache, data.step)

    def run() -> None:
        if kind == "decode":
            assert step.decode is not None
            decode_attention(*arguments, step.decode, SCALE, None, output, launch=launch)
        else:
            assert step.prefill is not None
            prefill_attention(*arguments, step.prefill, SCALE, None, output, launch=launch)

    return run


def main() -> None:
    """Command line: one line per combination, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["decode", "prefill"])
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv", choices=["", *KV_TYPES], default="", help="of a quantized cache")
    parser.add_argument("--limit-s", type=float, default=120)
    options = parser.parse_args()
    batch = options.batch or (32 if options.kind == "decode" else 1)
    row = (options.context - 1, 1) if options.kind == "decode" else (0, options.context)
    keys, pairs = seen([row] * batch)
    copies = [layer([row] * batch, kv=options.kv) for _ in range(_COPIES)]
    end = time.monotonic() + options.limit_s
    for launch in launches(options.kind):
        if time.monotonic() > end:
            print("out of time")
            return
        try:
            seconds = statistics.median(graph_seconds([runs(options.kind, data, launch) for data in copies]))
        except Exception as error:
            # Most often more shared memory than the card has.
            print(launch, type(error).__name__, flush=True)
            continue
        rates = (
            f"{2 * keys * NUM_KV_HEADS * head_bytes(options.kv) / seconds / 1e12:.3f} TB/s "
            f"{4 * pairs * NUM_HEADS * HEAD_DIM / seconds / 1e12:.1f} TFLOP/s"
        )
        print(f"{launch} {seconds * 1e6:.1f} us {rates}", flush=True)


if __name__ == "__main__":
    main()
