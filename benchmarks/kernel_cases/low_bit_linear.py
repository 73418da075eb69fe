"""Cases of products with 8-bit and int4 weights: those of a decoder layer of an 8B Llama.

They go by the rules, beside cuBLAS with weights in bf16 and the operations around it.

Owns the data and the ways to compute a product; the shapes are `small_linear`'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernel_cases import small_linear
from benchmarks.kernel_cases.small_linear import EPS, Case, Shape
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import gemm_dequantized
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.gemm_fp8 import scaled_linear
from headrace_kernels.linear.gemm_weight_only import GemmTile, multiply_gemm
from headrace_kernels.linear.small_batch import SmallBatchTile, multiply_small_batch
from headrace_kernels.rounded_tokens import round_tokens
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    dequantize,
    quantize_rows,
)

SHAPES = {name: shape for name, shape in small_linear.SHAPES.items() if name != "lm_head"}
GROUP_SIZE = 128


def random_weight(kind: QuantKind, shape: Shape, seed: int = 0) -> QuantizedWeight:
    """Gaussian numbers, rounded."""
    group = GROUP_SIZE if kind is QuantKind.INT4 else shape.num_inputs
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = allocate(kind, shape.weight_rows, shape.num_inputs, group, torch.bfloat16, torch.device("cuda"))
    rows = torch.randn(shape.weight_rows, shape.num_inputs, generator=generator, device="cuda", dtype=torch.bfloat16)
    quantize_rows(rows.mul_(0.02), weight, 0)
    return weight


# What folders of other tools have beyond: kind, group (0: all inputs), arrangement.
ARRANGED = {
    "int8 g128": (QuantKind.INT8, 128, Arrangement()),
    "int8 g128 zeros": (QuantKind.INT8, 128, Arrangement(has_zeros=True)),
    "int8 a8": (QuantKind.INT8, 0, Arrangement(inputs=InputRounding(torch.int8))),
    "int4 ordered": (QuantKind.INT4, 128, Arrangement(is_ordered=True)),
    "fp8 blocks": (QuantKind.FP8, 128, Arrangement(scale_outputs=128)),
}


def arranged_weight(name: str, shape: Shape, seed: int = 0) -> QuantizedWeight:
    """Random bits that scatter as weights do, scales that bring them to 0.02."""
    kind, group, arrangement = ARRANGED[name]
    sizes = (shape.weight_rows, shape.num_inputs, group or shape.num_inputs)
    weight = allocate(kind, *sizes, torch.bfloat16, torch.device("cuda"), arrangement)
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind is QuantKind.INT4:
        weight.packed.random_(-(1 << 15), 1 << 15, generator=generator)
    else:
        scattered = torch.randn(weight.packed.shape, generator=generator, device="cuda").mul_(40)
        weight.packed.copy_(scattered.clamp_(-127, 127))
    weight.scales.fill_(0.02 / (4 if kind is QuantKind.INT4 else 40))
    if weight.zeros is not None:
        weight.zeros.fill_(8 if kind is QuantKind.INT4 else 3)
    if weight.order is not None:
        weight.order.copy_(torch.randperm(shape.num_inputs, generator=generator, device="cuda"))
    return weight


class Operands:
    """Data for one product, and the ways to compute it."""

    def __init__(self, shape: Shape, weight: QuantizedWeight, num_rows: int, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed + 1)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.shape, self.weight = shape, weight
        self.x = randn(num_rows, shape.num_inputs)
        self.norm_weight = randn(shape.num_inputs)
        self.residual = randn(num_rows, shape.num_outputs)
        self.product = torch.empty(num_rows, shape.weight_rows, dtype=torch.bfloat16, device="cuda")

    def another(self) -> Operands:
        """Returns a copy of the weight at other addresses, for rotation."""
        copy = object.__new__(Operands)
        copy.__dict__.update(self.__dict__)
        zeros = None if self.weight.zeros is None else self.weight.zeros.clone()
        packed, scales = self.weight.packed.clone(), self.weight.scales.clone()
        copy.weight = dataclasses.replace(self.weight, packed=packed, scales=scales, zeros=zeros)
        return copy

    def bytes_and_flops(self) -> tuple[int, int]:
        """What must be read and written, and computed, at least."""
        moved = self.weight.num_bytes + self.x.nbytes + self.residual.nbytes * (2 if self.shape.added else 1)
        return moved, 2 * self.weight.num_outputs * self.weight.num_inputs * len(self.x)

    def expected_product(self, normed: bool) -> Tensor:
        """The product alone in fp64."""
        x = self.x.double()
        if normed:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm_weight.double()
        numbers = torch.empty(self.weight.num_outputs, self.weight.num_inputs, device="cuda")
        return x @ dequantize(self.weight, numbers).double().t()

    def expected(self) -> Tensor:
        """With what is fused, in fp64."""
        y = self.expected_product(self.shape.normed)
        if self.shape.gated:
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        return y + self.residual.double() if self.shape.added else y

    def small(self, tile: SmallBatchTile, out: Tensor) -> None:
        """Few rows, with what is fused; into `out` like `residual`."""
        norm = (self.norm_weight, EPS) if self.shape.normed else None
        multiply_small_batch(self.x, self.weight, None, out, tile, norm, self.shape.gated, self.shape.added)

    def wide(self, tile: GemmTile) -> Tensor:
        """More rows, the product alone."""
        multiply_gemm(self.x, self.weight, None, self.product, tile)
        return self.product

    def scaled(self) -> Tensor:
        """FP8 activations, the product alone with their rounding."""
        return scaled_linear(round_tokens(self.x, InputRounding(torch.float8_e4m3fn)), self.weight, None)

    def restored(self) -> Tensor:
        """By way of bf16, the product alone with the restoring."""
        return gemm_dequantized.dequantized_linear(self.x, self.weight, None)

    def by_the_rules(self) -> object:
        """Multiplies in the way that a layer does."""
        x, weight, shape = self.x, self.weight, self.shape
        if shape.gated:
            return quantized_linear.norm_swiglu(x, self.norm_weight, EPS, weight, None)
        if shape.normed:
            return quantized_linear.norm_linear(x, self.norm_weight, EPS, weight, None)
        quantized_linear.linear_add(x, weight, None, self.residual)
        return None


def _case(kind: QuantKind, shape: Shape, num_rows: int) -> Case:
    operands = Operands(shape, random_weight(kind, shape), num_rows)
    return operands.by_the_rules, *operands.bytes_and_flops()


def _separate_case(shape: Shape, num_rows: int) -> Case:
    operands = small_linear.Operands(shape, num_rows)
    return operands.run_separate, *operands.bytes_and_flops()


def products_of_an_8b_llama() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Every product at 1 to 2,048 rows."""
    for num_rows in (1, 16, 64, 256, 2048):
        for name, shape in SHAPES.items():
            for kind in QuantKind:
                yield f"{kind.value} {name} {num_rows}", functools.partial(_case, kind, shape, num_rows)
            yield f"bf16 {name} {num_rows}_torch", functools.partial(_separate_case, shape, num_rows)


def _arranged_case(name: str, shape: Shape, num_rows: int) -> Case:
    operands = Operands(shape, arranged_weight(name, shape), num_rows)
    return operands.by_the_rules, *operands.bytes_and_flops()


def products_with_weights_of_other_tools() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Products with weights as other tools write them.

    They have scales of groups and blocks, zero points, an order of inputs, and activations in 8
    bits.
    """
    for num_rows in (1, 16, 256, 2048):
        for shape_name, shape in SHAPES.items():
            for name in ARRANGED:
                yield f"{name} {shape_name} {num_rows}", functools.partial(_arranged_case, name, shape, num_rows)
