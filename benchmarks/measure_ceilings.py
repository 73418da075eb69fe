"""Copy bandwidth and matrix rates of one device, as a line of JSON.

On a GPU the copy is an elementwise kernel inside a CUDA graph (a memcpy node is slower than the
memory), on a CPU it is a copy between arrays that no cache holds. Matrices are Gaussian: a product
of zeros runs faster.

    python -m benchmarks.measure_ceilings --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

from benchmarks.graph_timing import clock_seconds, graph_seconds
from headrace_kernels import card

GPU_GEMM = (28672, 4096, (256, 2048, 8192))
CPU_GEMM = (4096, 4096, (64, 256))
_GPU_COPY_BYTES = 2 << 30
_CPU_COPY_BYTES = 256 << 20


def copy_bytes_s(device: torch.device) -> float:
    """Bytes read and written per second by the fastest of some copies."""
    num_bytes = _GPU_COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    source = torch.full((num_bytes // 4,), 0.5, device=device)
    target = torch.empty_like(source)
    if device.type == "cuda":
        return 2 * num_bytes / min(graph_seconds([lambda: torch.mul(source, 1.0, out=target)] * 10))
    return 2 * num_bytes / min(clock_seconds([lambda: target.copy_(source)]))


def gemm_flop_s(device: torch.device, rows: int) -> float:
    """Rate of `rows` x K times K x N: bf16 on a GPU, fp32 on a CPU.

    It is the median, since a clock's first peak does not last.
    """
    on_gpu = device.type == "cuda"
    columns, depth, _ = GPU_GEMM if on_gpu else CPU_GEMM
    dtype = torch.bfloat16 if on_gpu else torch.float32
    weight = torch.randn(columns, depth, device=device, dtype=dtype).mul_(0.02)
    entry = torch.randn(rows, depth, device=device, dtype=dtype)
    product = torch.empty(rows, columns, device=device, dtype=dtype)

    def launch() -> object:
        return torch.mm(entry, weight.t(), out=product)

    seconds = graph_seconds([launch] * 20) if on_gpu else clock_seconds([launch])
    return 2 * rows * columns * depth / statistics.median(seconds)


def fp8_gemm_flop_s(device: torch.device, rows: int) -> float:
    """Rate of the same product of e4m3 by e4m3, one scale for each side, at the card's own sums."""
    columns, depth, _ = GPU_GEMM
    weight = torch.randn(columns, depth, device=device).to(torch.float8_e4m3fn)
    entry = torch.randn(rows, depth, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), device=device)
    product = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)

    def launch() -> object:
        return torch._scaled_mm(
            entry, weight.t(), scale, scale, out_dtype=product.dtype, use_fast_accum=True, out=product
        )

    return 2 * rows * columns * depth / statistics.median(graph_seconds([launch] * 20))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if options.device == "auto" else options.device)
    on_gpu = device.type == "cuda"
    _, _, all_rows = GPU_GEMM if on_gpu else CPU_GEMM
    values = {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if on_gpu else "",
        "copy_bytes_s": copy_bytes_s(device),
        "gemm_flop_s": {rows: gemm_flop_s(device, rows) for rows in all_rows},
        "fp8_gemm_flop_s": {rows: fp8_gemm_flop_s(device, rows) for rows in all_rows if card.has_fp8_products(device)},
    }
    print(json.dumps(values))


if __name__ == "__main__":
    main()
