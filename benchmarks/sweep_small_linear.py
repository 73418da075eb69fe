"""Times every tile of the small-batch kernels on a GPU, to set the launch rule.

    python -m benchmarks.sweep_small_linear [--rows 1 2 4 8 16 32] [--seconds 60]

For every product of an 8B Llama and every number of rows: each tile's result is checked against
fp64, then timed inside a CUDA graph over weights that do not fit the L2 cache together. Printed are
the best tiles beside cuBLAS alone and cuBLAS with the operations around it, and in the end the sum
of a whole model (32 layers and the head). Products that no tile computes right, and those that the
time did not suffice for, are named.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch

from benchmarks.graph_timing import graph_seconds
from benchmarks.kernel_cases.small_linear import SHAPES, Operands, Shape
from headrace_kernels.hopper.row_streams import MAX_WARPGROUP_ROWS
from headrace_kernels.linear.dense_small_batch_kernels import MAX_ROWS, Tile, variants
from headrace_kernels.linear.dense_small_batch_sm90 import StreamTile, stream_variants, takes_streams

# Together far more than the 50 MB of an H200's L2 cache.
ROTATED_BYTES = 400e6
NUM_LAYERS = 32
# bf16 sums of one rounding; the tensor cores' rows are rounded twice in the norm before.
TOLERANCE = 2e-2


def rotation(shape: Shape, num_rows: int) -> list[Operands]:
    """Operands enough that a weight has left the cache when its turn comes again."""
    count = max(2, int(ROTATED_BYTES / (shape.weight_rows * shape.num_inputs * 2))) if shape.num_outputs < 1e5 else 1
    return [Operands(shape, num_rows, seed) for seed in range(count)]


def microseconds(launches: list[Callable[[], object]]) -> float:
    """The median time of one launch."""
    # Short products several times over, so that the graph's own start does not count.
    rounds = max(1, 12 // len(launches))
    return sorted(graph_seconds(launches * rounds))[2] * 1e6


def timed(operands: list[Operands], tile: Tile | StreamTile, expected: torch.Tensor) -> float:
    """Microseconds of a tile; infinite if its result is wrong."""
    found = operands[0].fused(tile).double()
    error = float((found - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        print(f"  WRONG {tile}: relative error {error:.3g}", flush=True)
        return float("inf")
    return microseconds(
        [functools.partial(operand.run_fused, tile, operand.empty_out().zero_()) for operand in operands]
    )


def sweep(name: str, num_rows: int) -> tuple[float, float, float]:
    """Prints one product's best tiles.

    Returns microseconds of the best, of cuBLAS and of cuBLAS with the operations around it.
    """
    shape = SHAPES[name]
    operands = rotation(shape, num_rows)
    expected = operands[0].expected()
    times: dict[Tile | StreamTile, float] = {}
    tiles: list[Tile | StreamTile] = []
    if num_rows <= MAX_ROWS:
        tiles += variants(num_rows, shape.num_outputs, shape.gated)
    if 2 <= num_rows <= MAX_WARPGROUP_ROWS and takes_streams(operands[0].weight):
        tiles += stream_variants(num_rows, shape.gated)
    for tile in tiles:
        try:
            times[tile] = timed(operands, tile, expected)
        except Exception as error:  # a tile that this card can't run says so, and the others go on
            print(f"  FAILED {tile}: {error!r:.200}", flush=True)
    cublas = microseconds([operand.run_cublas for operand in operands])
    separate = microseconds([operand.run_separate for operand in operands])
    best = sorted(times, key=lambda tile: times[tile])
    assert best, "no tile ran"
    terabytes = operands[0].bytes_and_flops()[0] / times[best[0]] / 1e6
    print(
        f"{name} rows={num_rows}: best {times[best[0]]:.1f} us ({terabytes:.2f} TB/s), cuBLAS {cublas:.1f}, separate "
        f"{separate:.1f}"
    )
    for tile in best[:4]:
        print(f"    {times[tile]:7.1f} {tuple(tile)}", flush=True)
    return times[best[0]], cublas, separate


def main() -> None:
    """Sweeps until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 4, 16, 2, 32])
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    for num_rows in arguments.rows:
        if time.monotonic() > end:
            print(f"no time left for {num_rows} rows")
            continue
        results = {name: sweep(name, num_rows) for name in SHAPES}
        sums = [
            sum(result[which] * (1 if name == "lm_head" else NUM_LAYERS) for name, result in results.items()) / 1e3
            for which in range(3)
        ]
        print(
            f"rows={num_rows}, 8B in all: best tiles {sums[0]:.2f} ms, cuBLAS {sums[1]:.2f}, separate {sums[2]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
