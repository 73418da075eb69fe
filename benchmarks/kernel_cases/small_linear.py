"""Cases of small-batch products: a decoder layer of an 8B Llama and its output head.

They stand beside cuBLAS.

Owns the shapes, the data and what counts as the same work without fusion. `python -m
benchmarks.sweep_small_linear` times all tiles on the same products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.linear import dense_small_batch as small_linear
from headrace_kernels.linear.dense_small_batch_kernels import Tile, multiply
from headrace_kernels.linear.dense_small_batch_sm90 import StreamTile, multiply_streams
from headrace_kernels.rms_norm import add_rms_norm
from headrace_kernels.swiglu import swiglu

EPS = 1e-5
Case = tuple[Callable[[], object], int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One of the products: sizes, and what is fused with it."""

    # Of the result, after SwiGLU.
    num_outputs: int
    num_inputs: int
    normed: bool = False
    gated: bool = False
    added: bool = False
    out_dtype: torch.dtype = torch.bfloat16

    @property
    def weight_rows(self) -> int:
        """Rows of the weight: gate and up apart."""
        return self.num_outputs * (2 if self.gated else 1)


SHAPES = {
    "qkv": Shape(6144, 4096, normed=True),
    "o": Shape(4096, 4096, added=True),
    "gate_up": Shape(14336, 4096, normed=True, gated=True),
    "down": Shape(4096, 14336, added=True),
    "lm_head": Shape(128_256, 4096, out_dtype=torch.float32),
}


class Operands:
    """Gaussian data for one product, and the ways to compute it."""

    def __init__(self, shape: Shape, num_rows: int, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.shape = shape
        self.x = randn(num_rows, shape.num_inputs)
        self.pending = randn(num_rows, shape.num_inputs)
        self.norm_weight = randn(shape.num_inputs)
        self.weight = randn(shape.weight_rows, shape.num_inputs) * 0.02
        self.residual = randn(num_rows, shape.num_outputs)

    def bytes_and_flops(self) -> tuple[int, int]:
        """What must be read and written, and computed, at least."""
        out = self.residual.numel() * self.shape.out_dtype.itemsize
        moved = self.weight.nbytes + self.x.nbytes + out * (2 if self.shape.added else 1)
        return moved, 2 * self.weight.numel() * len(self.x)

    def expected(self) -> Tensor:
        """The result in fp64."""
        x = self.x.double()
        if self.shape.normed:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm_weight.double()
        y = x @ self.weight.double().t()
        if self.shape.gated:
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        return y + self.residual.double() if self.shape.added else y

    def fused(self, tile: Tile | StreamTile) -> Tensor:
        """By one of our kernels.

        What is added to is a fresh copy: for the check, not for the clock.
        """
        out = self.residual.clone() if self.shape.added else self.empty_out().fill_(float("nan"))
        self.run_fused(tile, out)
        return out

    def run_fused(self, tile: Tile | StreamTile, out: Tensor) -> None:
        """The launches of `fused` alone."""
        norm = (self.norm_weight, EPS) if self.shape.normed else None
        if isinstance(tile, StreamTile):
            multiply_streams(self.x, self.weight, None, out, tile, norm, self.shape.gated, self.shape.added)
            return
        multiply(self.x, self.weight, None, out, tile, norm, self.shape.gated, self.shape.added)

    def empty_out(self) -> Tensor:
        """For a result."""
        return torch.empty_like(self.residual, dtype=self.shape.out_dtype)

    def run_cublas(self) -> Tensor:
        """The product alone."""
        if self.shape.out_dtype == torch.float32:
            return torch.mm(self.x, self.weight.t(), out_dtype=torch.float32)
        return functional.linear(self.x, self.weight)

    def run_separate(self) -> Tensor:
        """The product by cuBLAS and the operations around it, as a layer that does not fuse.

        The addition is in the next norm.
        """
        x = self.x
        if self.shape.normed:
            x = add_rms_norm(self.pending, x, self.norm_weight, EPS)
        if self.shape.out_dtype == torch.float32:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        y = functional.linear(x, self.weight)
        return swiglu(y) if self.shape.gated else y


def _fused_case(shape: Shape, num_rows: int) -> Case:
    operands = Operands(shape, num_rows)
    out = operands.residual if shape.added else operands.empty_out()
    tile = small_linear.stream_rule(num_rows, operands.weight, shape.gated) or small_linear.launch_rule(
        num_rows, shape.num_outputs, shape.num_inputs
    )
    return lambda: operands.run_fused(tile, out), *operands.bytes_and_flops()


def _separate_case(shape: Shape, num_rows: int) -> Case:
    operands = Operands(shape, num_rows)
    return operands.run_separate, *operands.bytes_and_flops()


def products_of_an_8b_llama() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Every product at 1, 8 and 16 rows, by the launch rule and by cuBLAS.

    cuBLAS has the operations around it.
    """
    for num_rows in (1, 8, 16):
        for name, shape in SHAPES.items():
            yield f"{name} {num_rows}", functools.partial(_fused_case, shape, num_rows)
            yield f"{name} {num_rows}_torch", functools.partial(_separate_case, shape, num_rows)
