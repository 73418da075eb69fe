"""Compiles Triton kernels for cards that this machine does not have.

They are compiled as their own launchers would launch them.

`_ROOMS` names the rooms.

    python -m tests.support.compiled_kernels ROOM 80|86|89|90

runs the launchers on CPU tensors with compilation in place of launching, and prints one line of
JSON per kernel. A process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from tests.support.attention_case import Case, Shape, empty_cache
from tests.support.raw_case import RawCase
from tests.support.thread_branches import branches_of_threads
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from headrace_kernels import card, finite_rows, rms_norm, rounded_tokens, swiglu
from headrace_kernels.attention import paged as attention
from headrace_kernels.attention import rope_kv
from headrace_kernels.experts import mixture, router, routing, scored_routing, tile_table
from headrace_kernels.experts.expert_weights import ExpertPart, ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating
from headrace_kernels.experts.grouped_gemm_sm90 import GroupedTile, multiply_grouped_gemm
from headrace_kernels.experts.mxfp4_gemm_sm90 import Mxfp4Tile, multiply_mxfp4_gemm
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import block_quantized_kernels as block_linear_kernels
from headrace_kernels.linear import (
    dense_small_batch,
    dense_small_batch_kernels,
    dense_small_batch_sm90,
    gemm_int8,
    gemm_weight_only,
    gemv_8bit,
    gemv_int4,
    input_order,
    launch_rules,
    small_batch,
    small_batch_8bit_sm90,
)
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.few_bits import stream_sm90
from headrace_kernels.linear.gated import dense as gated_dense
from headrace_kernels.linear.gated import dense_sm90 as gated_dense_sm90
from headrace_kernels.linear.w4a8 import dequantized, gemm_sm90
from headrace_kernels.linear.w4a8 import products as w4a8_products
from headrace_kernels.rounded_tokens import Activations, RoundedTokens
from headrace_kernels.weight_formats import block_weight
from headrace_kernels.weight_formats.mxfp4 import allocate_mxfp4
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    plane_inputs,
)

# Largest shared memory of a program, by architecture. sm_86 (A10, RTX 3090) and sm_89 (L40S, L4,
# RTX 4090) differ by FP8 alone: what has none is compiled for sm_89 in place of both.
_SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


class _Card:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[list[Any]]:
    """Inside, `kernel[grid](...)` compiles for the architecture and launches nothing.

    Yields the list that the compiled kernels are added to.
    """
    compiled: list[Any] = []

    def compile_only(self: Any, grid: object) -> Any:
        return lambda *args, **kwargs: compiled.append(self.run(*args, grid=grid, warmup=True, **kwargs))

    triton.runtime.driver.set_active(_Card(arch))
    with mock.patch.object(JITFunction, "__getitem__", compile_only):
        yield compiled


def resources(kernel: Any) -> dict[str, Any]:
    """A kernel's name, spilled bytes of stack, shared memory, products and doubtful branches."""
    usage = _code_report(kernel, "-res-usage")
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return {
        "name": kernel.metadata.name,
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": kernel.metadata.shared,
        "shared_limit": _SHARED_BYTES[kernel.metadata.target.arch],
        "warpgroup_products": kernel.asm["ttgir"].count("warp_group_dot "),
        "exchanges": kernel.asm["ttgir"].count("convert_layout"),
        "tiles_copied": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", kernel.asm["ptx"])),
        "num_warps": kernel.metadata.num_warps,
        "warp_product_layouts": _warp_product_layouts(kernel.asm["ttgir"]),
        "thread_branches": branches_of_threads(kernel.asm["ptx"]),
    }


def _warp_product_layouts(code: str) -> list[str]:
    """Layouts of all tensors that warp products in inline assembly take or give.

    A layout says which thread holds what.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<{(.*)}>", code, re.MULTILINE))
    lines = [line for line in code.splitlines() if "elementwise_inline_asm" in line and "mma.sync" in line]
    return sorted({layouts[name] for line in lines for name in re.findall(r"tensor<[^#>]*, (#\w+)>", line)})


def code_counts(kernel: Any) -> dict[str, int]:
    """How often a product of warp groups is waited for, and how many of FP8 there are.

    Only the assembler's code says so, whose listing takes a sixth of the time that compiling takes.
    """
    code = _code_report(kernel, "-sass") if "wgmma" in kernel.asm["ptx"] else ""
    return {"waits_for_products": code.count("WARPGROUP.DEPBAR"), "fp8_products": code.count("QGMMA")}


def _code_report(kernel: Any, question: str) -> str:
    """What the card maker's tool says about a kernel's code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, question, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Cards that share their kernels out: each combination is compiled for one of them.
_CARDS = (80, 90)


def _has_turn(arch: int, *places: int, every: bool) -> bool:
    """Whether a combination, by its values' places, is this card's to compile.

    Any value meets every card, and any two values meet on one. Or all combinations are.
    """
    return every or (sum(places) + _CARDS.index(arch)) % len(_CARDS) == 0


# An 8B Llama; groups and heads that are no power of two, with a window; many query heads to one
# key/value head; wide heads.
_HEADS = (
    Shape(32, 8, 128, 16, None, torch.bfloat16),
    Shape(6, 2, 80, 16, 100, torch.float16),
    Shape(40, 1, 128, 16, None, torch.bfloat16),
    Shape(8, 4, 256, 16, None, torch.bfloat16),
)
# gpt-oss' layers with a window, whose kernels differ from others' by the sinks.
_SINKS = Shape(64, 8, 64, 16, 128, torch.bfloat16, has_sinks=True)

_QUANTIZED = (
    Shape(32, 8, 128, 16, None, torch.bfloat16, "int8"),
    Shape(32, 8, 128, 16, None, torch.bfloat16, "fp8"),
    Shape(6, 2, 80, 16, 100, torch.float16, "fp8"),
)
# Wide heads: what reads the cache.
_QUANTIZED_WIDE = (
    Shape(8, 4, 256, 16, None, torch.bfloat16, "int8"),
    Shape(8, 4, 256, 16, None, torch.bfloat16, "fp8"),
)
# As Gemma 4's layers that see everything.
_WIDEST = Shape(32, 4, 512, 16, None, torch.bfloat16)


def _decode_raw(shape: Shape, normed: bool, interleaved: bool = False, wide_norms: bool = False) -> None:
    case = RawCase(
        shape,
        [700],
        "cpu",
        normed=normed,
        rotary_dim=shape.head_dim // 2 if interleaved else None,
        interleaved=interleaved,
        wide_norms=wide_norms,
    )
    attention.rotate_write_attend(case.raw, case.kv_cache, case.step, shape.scale, shape.window, case.case.sinks)


_ABILITIES = (
    ("has_warpgroup_products", 90),
    ("has_warpgroup_instructions", 90),
    ("has_copy_engine", 90),
    ("has_fp8_products", 89),
)


def compile_attention(arch: int) -> list[Any]:
    """Compiles attention's kernels for several shapes.

    The first two have every kernel of a decode, a mixed and a gathered step; all have decodes
    alone; the first has drafts; quantized caches have wide heads too.
    """
    llama = _HEADS[0]
    with contextlib.ExitStack() as stack:
        for ability, oldest in _ABILITIES:
            stack.enter_context(mock.patch.object(card, ability, lambda device, oldest=oldest: arch >= oldest))
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        stack.enter_context(mock.patch.object(attention, "INTERPRETED", True))
        compiled = stack.enter_context(compiling_for(arch))
        for shape in (*_HEADS[:2], _SINKS):
            for rows, gather_bytes in ([(700, 1), (0, 20)], 0), ([(2048, 512)], 1 << 24):
                case = Case(shape, rows, "cpu", gather_bytes=gather_bytes, shares=shape is not _SINKS)
                attention.paged_attention(case.query, case.kv_cache, case.step, shape.scale, shape.window, case.sinks)
        if arch >= 90:
            # Heads of 256 are gathered without warps of three trades.
            case = Case(_HEADS[-1], [(2048, 768)], "cpu", gather_bytes=1 << 25)
            attention.paged_attention(case.query, case.kv_cache, case.step, _HEADS[-1].scale)
        for shape in (*_HEADS, _SINKS):
            _decode_raw(shape, normed=shape.window is not None)
        _decode_raw(llama, normed=False, interleaved=True)
        _decode_raw(_HEADS[-1], normed=True, wide_norms=True)
        if arch >= 90:
            _decode_raw(_WIDEST, normed=True, wide_norms=True)
            case = Case(_WIDEST, [(700, 20)], "cpu", max_query_len=1)
            attention.paged_attention(case.query, case.kv_cache, case.step, _WIDEST.scale)
        for query_len in (2, 4, 8, 16):
            case = Case(llama, [(700, 1)], "cpu", max_query_len=query_len)
            attention.paged_attention(case.query, case.kv_cache, case.step, llama.scale)
        for shape in _QUANTIZED:
            _quantized_steps(shape)
        for shape in _QUANTIZED_WIDE:
            _decode_raw(shape, normed=False)
            case = Case(shape, [(700, 20)], "cpu", max_query_len=1)
            attention.paged_attention(case.query, case.kv_cache, case.step, shape.scale)
    return compiled


def _quantized_steps(shape: Shape) -> None:
    """All that a quantized cache has of its own.

    It has writing, decodes alone, drafts, chunks through the table, and gathering.
    """
    raw = RawCase(shape, [700], "cpu").raw
    heads = (raw.qkv, raw.rotations, empty_cache(50, shape, "cpu"), torch.zeros(1, dtype=torch.int64))
    with mock.patch.object(rope_kv, "uses_triton", lambda tensor: True):
        for interleaved in (False, True):
            rope_kv.rope_and_write_kv(*heads, raw.num_heads, interleaved=interleaved)
    _decode_raw(shape, normed=shape.window is not None)
    for rows, gather_bytes, query_len in (
        ([(700, 8), (0, 20)], 0, 1 if shape.window else 8),
        ([(2048, 512)], 1 << 24, 1),
    ):
        case = Case(shape, rows, "cpu", gather_bytes=gather_bytes, max_query_len=query_len)
        attention.paged_attention(case.query, case.kv_cache, case.step, shape.scale, shape.window)


class _Product(NamedTuple):
    num_outputs: int
    num_inputs: int
    normed: bool = False
    gated: bool = False
    add: bool = False
    out_dtype: torch.dtype = torch.bfloat16


# Of an 8B Llama: queries, keys and values; attention's output; gate and up; down; the head. And one
# too short to be streamed.
_PRODUCTS = (
    _Product(6144, 4096, normed=True),
    _Product(4096, 4096, add=True),
    _Product(14_336, 4096, normed=True, gated=True),
    _Product(4096, 14_336, add=True),
    _Product(128_256, 4096, out_dtype=torch.float32),
    _Product(1024, 256, normed=True),
)

# Those that are launched early: of gpt-oss-20b queries, keys and values, and attention's output; a
# small model's; gate and up of a small one and of an 8B Llama; its down, and that of a 70B one.
_EARLY_PRODUCTS = (
    _Product(5120, 2880, normed=True),
    _Product(2880, 4096, add=True),
    _Product(2048, 1024, normed=True),
    _Product(3072, 1024, normed=True, gated=True),
    _Product(1984, 4096, normed=True, gated=True),
    _Product(4096, 14_336, add=True),
    _Product(8192, 28_672, add=True),
)

# Normed ones for 8 rows, with a bias: of an 8B Llama both, and one of few outputs, whose inputs are
# in slices.
_NORMED_STREAMS = (_PRODUCTS[0], _PRODUCTS[2], _Product(1024, 2560, normed=True))


def launch_product(num_rows: int, product: _Product, early: bool = False) -> None:
    """With the tile that the rule chooses."""
    x = torch.empty(num_rows, product.num_inputs, dtype=torch.bfloat16)
    weight = torch.empty(product.num_outputs * (1 + product.gated), product.num_inputs, dtype=torch.bfloat16)
    out = torch.empty(num_rows, product.num_outputs, dtype=product.out_dtype)
    norm = (torch.empty(product.num_inputs, dtype=torch.bfloat16), 1e-5) if product.normed else None
    rule = dense_small_batch.launch_rule
    tile = rule(num_rows, product.num_outputs, product.num_inputs, product.gated, early)
    fused = {"norm": norm, "gated": product.gated, "add": product.add}
    dense_small_batch_kernels.multiply(x, weight, None, out, tile, **fused, early=early)


def launch_streams(num_rows: int, product: _Product, has_bias: bool = False) -> None:
    """With the tile that the rule chooses for sm_90."""
    weight = torch.empty(product.num_outputs * (1 + product.gated), product.num_inputs, dtype=torch.bfloat16)
    tile = dense_small_batch.stream_rule(num_rows, weight, product.gated)
    assert tile is not None, "weights of an 8B Llama are streamed"
    x = torch.empty(num_rows, product.num_inputs, dtype=torch.bfloat16)
    bias = torch.empty(len(weight), dtype=torch.bfloat16) if has_bias else None
    out = torch.empty(num_rows, product.num_outputs, dtype=product.out_dtype)
    is_inside = product.normed and dense_small_batch._norms_inside(x, tile, product.gated)
    norm = (torch.empty(product.num_inputs, dtype=torch.bfloat16), 1e-5) if is_inside else None
    dense_small_batch_sm90.multiply_streams(x, weight, bias, out, tile, norm, product.gated, product.add)


def launch_gated(num_outputs: int, activation: swiglu.Activation) -> None:
    """With the tile of a card of 132 multiprocessors, and a bias where it is GeGLU."""
    tile = gated_dense.gated_tile(num_outputs, 132)
    assert tile is not None, "the outputs fill a wave"
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (64, 2 * num_outputs))
    bias = None if activation == "silu" else torch.empty(2 * num_outputs, dtype=torch.bfloat16)
    out = torch.empty(64, num_outputs, dtype=torch.bfloat16)
    gated_dense_sm90.multiply_gated(x, weight, bias, out, tile, activation)


def compile_small_linear(arch: int) -> list[Any]:
    """The kernels of few rows' products."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        stack.enter_context(mock.patch.object(dense_small_batch_kernels, "rms_norm", lambda x, *_: x))
        compiled = stack.enter_context(compiling_for(arch))
        for num_rows, product in itertools.product((1, 2, 8), _PRODUCTS):
            launch_product(num_rows, product)
        if arch == 90:
            stack.enter_context(mock.patch.object(card, "has_warpgroup_instructions", lambda device: True))
            stack.enter_context(mock.patch.object(card, "multiprocessors", lambda device: 132))
            for num_rows, product in itertools.product((12, 24), _PRODUCTS[:-1]):
                launch_streams(num_rows, product)
            for product in _NORMED_STREAMS:
                launch_streams(8, product, has_bias=True)
            for product in _EARLY_PRODUCTS:
                launch_product(1, product, early=True)
            # Three pieces, two, one.
            launch_gated(14_336, "silu")
            launch_gated(12_288, "gelu_tanh")
            launch_gated(8192, "silu")
    return compiled


def launch_low_bits(num_rows: int, product: _Product, weight: QuantizedWeight) -> None:
    """With the tile that the rules choose: few rows with what is fused, more rows alone."""
    x = torch.empty(num_rows, product.num_inputs, dtype=weight.dtype)
    if num_rows > small_batch.MAX_SMALL_BATCH_ROWS:
        out = torch.empty(num_rows, weight.num_outputs, dtype=weight.dtype)
        gemm_weight_only.multiply_gemm(x, weight, None, out, launch_rules.gemm_rule(num_rows, weight))
        return
    out = torch.empty(num_rows, product.num_outputs, dtype=weight.dtype)
    norm = (torch.empty(product.num_inputs, dtype=weight.dtype), 1e-5) if product.normed else None
    if num_rows == 1:
        row_tile = launch_rules.gemv_rule(weight, product.gated)
        gemv_8bit.multiply_gemv(x, weight, None, out, row_tile, norm, product.gated, product.add)
        return
    tile = launch_rules.small_batch_rule(num_rows, weight, product.gated)
    small_batch.multiply_small_batch(x, weight, None, out, tile, norm, product.gated, product.add)


def _rows(weight: int, product: int, every: bool) -> tuple[int, ...]:
    """One small and one large number of rows for a weight and a product, by their places.

    Any two of the three meet; with `every`, all four combinations.

    Or all four.
    """
    return (1, 12, 64, 200) if every else ((1, 64), (12, 200))[(weight + product) % 2]


def compile_low_bits(arch: int, every: bool = False) -> list[Any]:
    """Compiles the kernels of quantized weights.

    They have the longest products of an 8B Llama, groups of 128, and one of fp16 with odd sizes;
    dequantizing, to fp32 too.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        for what in ("has_warpgroup_instructions", "has_warpgroup_products"):
            stack.enter_context(mock.patch.object(card, what, lambda device: arch == 90))
        stack.enter_context(mock.patch.object(small_batch, "rms_norm", lambda x, *_: x))
        stack.enter_context(mock.patch.object(card, "has_fp8_products", lambda device: arch >= 89))
        stack.enter_context(mock.patch.object(card, "launches_early", lambda device: arch >= 90))
        compiled = stack.enter_context(compiling_for(arch))
        products = (_PRODUCTS[2], _PRODUCTS[3], _Product(100, 352, normed=True))
        for (i, kind), (j, product) in itertools.product(enumerate(QuantKind), enumerate(products)):
            dtype = torch.bfloat16 if product.num_inputs > 352 else torch.float16
            group = 128 if kind is QuantKind.INT4 and product.num_inputs % 128 == 0 else product.num_inputs
            outputs = product.num_outputs * (1 + product.gated)
            weight = allocate(kind, outputs, product.num_inputs, group, dtype, torch.device("cpu"))
            for num_rows in _rows(i, j, every):
                launch_low_bits(num_rows, product, weight)
            gemm_weight_only.dequantize_into(weight, range(8), torch.empty(8, product.num_inputs, dtype=dtype))
        for kind in QuantKind:
            # Activations in fp32 are multiplied by dequantized weights alone.
            group = 64 if kind is QuantKind.INT4 else 256
            weight = allocate(kind, 50, 256, group, torch.float32, torch.device("cpu"))
            gemm_weight_only.dequantize_into(weight, range(8), torch.empty(8, 256, dtype=torch.float32))
    return compiled


def compile_nibble_rows(arch: int, every: bool = False) -> list[Any]:
    """Compiles the GEMV with INT4: groups of every size, and sizes that no tile divides.

    Numbers of outputs are odd, so that scales and zero points do not begin at even places.
    """
    sizes = [(4096, 2048, 128), (1001, 768, 64), (17, 352, 32), (1, 8, 8)]
    tiles = [gemv_int4.Int4GemvTile(*cut) for cut in ((16, 4, 4), (32, 2, 2, 168), (16, 8, 1))]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        stack.enter_context(mock.patch.object(card, "launches_early", lambda device: arch >= 90))
        compiled = stack.enter_context(compiling_for(arch))
        for i, (outputs, inputs, group) in enumerate(sizes):
            dtype = (torch.bfloat16, torch.float16)[i % 2]
            weight = allocate(QuantKind.INT4, 2 * outputs, inputs, group, dtype, torch.device("cpu"))
            for j, (tile, gated) in enumerate(zip(tiles, (False, False, True), strict=True)):
                if not _has_turn(arch, i, j, every=every):
                    continue
                x, out = torch.empty(1, inputs, dtype=dtype), torch.empty(1, 2 * outputs // (1 + gated), dtype=dtype)
                norm = (torch.empty(inputs, dtype=dtype), 1e-5) if outputs % 2 else None
                gemv_int4.multiply_gemv_int4(x, weight, None, out, tile, norm, gated)
    return compiled


def compile_few(arch: int) -> list[Any]:
    """Compiles the small-batch kernel with 8 bits: every class of rows.

    It has all that may be fused or split, and the first tile that is worth timing.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(small_batch_8bit_sm90, "rms_norm", lambda x, *_: x))
        compiled = stack.enter_context(compiling_for(arch))
        for (kind, dtype), product, num_rows in itertools.product(
            ((QuantKind.FP8, torch.bfloat16), (QuantKind.INT8, torch.float16)), _PRODUCTS[2:4], (8, 16, 32, 64)
        ):
            outputs = product.num_outputs * (1 + product.gated)
            weight = allocate(kind, outputs, product.num_inputs, product.num_inputs, dtype, torch.device("cpu"))
            x = torch.empty(num_rows, product.num_inputs, dtype=dtype)
            out = torch.empty(num_rows, product.num_outputs, dtype=dtype)
            sizes = (num_rows, product.num_outputs, product.num_inputs, product.gated)
            tile = small_batch_8bit_sm90.small_batch_8bit_variants(*sizes)[0]
            small_batch_8bit_sm90.multiply_small_batch_8bit(
                x, weight, None, out, tile, None, product.gated, product.add
            )
    return compiled


def compile_bit_streams(arch: int) -> list[Any]:
    """Compiles the kernel that streams weights of few bits: the rules' tiles of each class of rows.

    Products have all that is fused, norms where the rule says that they are inside.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "has_warpgroup_instructions", lambda device: True))
        stack.enter_context(mock.patch.object(card, "multiprocessors", lambda device: 132))
        compiled = stack.enter_context(compiling_for(arch))
        kinds = (
            (QuantKind.FP8, torch.bfloat16, 0, Arrangement()),
            (QuantKind.FP8, torch.bfloat16, 128, Arrangement(scale_outputs=128)),
            (QuantKind.INT8, torch.float16, 0, Arrangement()),
            (QuantKind.INT4, torch.bfloat16, 128, Arrangement()),
        )
        # Gates of Qwen3 8B and 14B have other tiles than those of an 8B Llama.
        gates = tuple(_Product(*sizes, normed=True, gated=True) for sizes in ((12_288, 4096), (17_408, 5120)))
        for (kind, dtype, group, arrangement), product, num_rows in itertools.product(
            kinds, (*_PRODUCTS[:-1], *gates), (8, 16)
        ):
            outputs, inputs = product.num_outputs * (1 + product.gated), product.num_inputs
            weight = allocate(kind, outputs, inputs, group or inputs, dtype, torch.device("cpu"), arrangement)
            tile = launch_rules.bit_stream_rule(num_rows, weight, product.gated)
            if tile is None:
                continue
            x, out = (torch.empty(num_rows, size, dtype=dtype) for size in (inputs, product.num_outputs))
            is_inside = product.normed and launch_rules.norms_inside(num_rows, dtype)
            norm = (torch.empty(inputs, dtype=dtype), 1e-5) if is_inside else None
            bias = torch.empty(outputs, dtype=dtype) if num_rows == 8 else None
            stream_sm90.multiply_bit_streams(x, weight, bias, out, tile, norm, product.gated, product.add)
    return compiled


def compile_w4a8(arch: int) -> list[Any]:
    """Compiles the GEMM of INT4 weights and rounded tokens, with the tile of the rule.

    One product has its tiles split, another has them whole; planes are of 64 and of 128 inputs.
    """
    with mock.patch.object(card, "multiprocessors", lambda device: 132), compiling_for(arch) as compiled:
        for num_rows, product, group in itertools.product((128, 256), _PRODUCTS[1:4], (64, 128)):
            outputs = product.num_outputs * (1 + product.gated)
            weight = allocate(QuantKind.INT4, outputs, product.num_inputs, group, torch.bfloat16, torch.device("cpu"))
            rounding = InputRounding(torch.float8_e4m3fn)
            tokens = RoundedTokens.empty((num_rows, product.num_inputs), rounding, torch.device("cpu"))
            plane = plane_inputs(product.num_inputs, group)
            sums = torch.empty(num_rows, product.num_inputs // (4 * plane) * gemm_sm90.SUMS_OF_STEP)
            bias, out = (torch.empty(*rows, outputs, dtype=torch.bfloat16) for rows in ((), (num_rows,)))
            for splits in (0, 1):
                gemm_sm90.multiply_w4a8(tokens, sums, weight, bias, out, w4a8_products._TILE._replace(splits=splits))
    return compiled


def compile_head(arch: int) -> list[Any]:
    """Compiles an 8B Llama's output layer in 8 bits, with results in fp32.

    The kernel is whichever the rules choose for a number of rows.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        stack.enter_context(mock.patch.object(card, "has_fp8_products", lambda device: arch >= 89))
        for what in ("has_warpgroup_instructions", "has_warpgroup_products"):
            stack.enter_context(mock.patch.object(card, what, lambda device: arch == 90))
        for room in (quantized_linear, rounded_tokens, gemm_int8):
            stack.enter_context(mock.patch.object(room, "uses_triton", lambda x: True))
        compiled = stack.enter_context(compiling_for(arch))
        for kind in (QuantKind.INT8, QuantKind.FP8):
            kept = Arrangement(keeps_activations=True)
            weight = allocate(kind, 128_256, 4096, 4096, torch.bfloat16, torch.device("cpu"), kept)
            for num_rows in (1, 12, 32, 64, 200):
                x = torch.empty(num_rows, 4096, dtype=torch.bfloat16)
                assert quantized_linear.linear(x, weight, None, torch.float32).dtype == torch.float32
    return compiled


# What folders of other tools need beyond: INT8 in groups and by outputs (0), with and without zero
# points, FP8 in blocks.
_ARRANGED = (
    (QuantKind.INT8, 128, Arrangement(), torch.bfloat16),
    (QuantKind.INT8, 64, Arrangement(), torch.bfloat16),
    (QuantKind.INT8, 32, Arrangement(has_zeros=True), torch.bfloat16),
    (QuantKind.INT8, 0, Arrangement(has_zeros=True), torch.bfloat16),
    (QuantKind.FP8, 128, Arrangement(scale_outputs=128), torch.bfloat16),
    (QuantKind.FP8, 128, Arrangement(scale_outputs=128), torch.float16),
)


def compile_arranged(arch: int, every: bool = False) -> list[Any]:
    """Compiles weights with groups of 8 bits, with orders of inputs, and with rounded activations.

    Products are the longest of an 8B Llama.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        stack.enter_context(mock.patch.object(small_batch, "rms_norm", lambda x, *_: x))
        stack.enter_context(mock.patch.object(card, "has_fp8_products", lambda device: arch >= 89))
        for room in (gemm_int8, input_order):
            stack.enter_context(mock.patch.object(room, "uses_triton", lambda x: True))
        stack.enter_context(mock.patch.object(card, "launches_early", lambda device: arch >= 90))
        compiled = stack.enter_context(compiling_for(arch))
        for (i, arranged), (j, product) in itertools.product(enumerate(_ARRANGED), enumerate(_PRODUCTS[2:4])):
            kind, group, arrangement, dtype = arranged
            outputs = product.num_outputs * (1 + product.gated)
            sizes = (outputs, product.num_inputs, group or product.num_inputs)
            weight = allocate(kind, *sizes, dtype, torch.device("cpu"), arrangement)
            for k, num_rows in enumerate(_rows(i, j, every)):
                if _has_turn(arch, i // 2, k, every=every):
                    launch_low_bits(num_rows, product, weight)
            if _has_turn(arch, i, j, every=every):
                gemm_weight_only.dequantize_into(weight, range(8), torch.empty(8, product.num_inputs, dtype=dtype))
        sizes = (4096, 14_336, 14_336)
        weight = allocate(QuantKind.INT8, *sizes, torch.bfloat16, torch.device("cpu"))
        tokens = RoundedTokens.empty((300, 14_336), InputRounding(torch.int8), torch.device("cpu"))
        gemm_int8.scaled_linear(tokens, weight, None)
        input_order.take_inputs(torch.empty(300, 14_336, dtype=torch.bfloat16), torch.empty(14_336, dtype=torch.int32))
    return compiled


def compile_rounded(arch: int) -> list[Any]:
    """Compiles the rounding of tokens of an 8B Llama and of a model of 5,120.

    They are rounded by what makes them, and by a kernel of their own, which also takes a static
    scale; to e4m3, also in groups, where the card multiplies it, and so is an INT4 weight that is
    to be multiplied by such tokens.
    """
    roundings = [InputRounding(torch.int8)]
    if arch >= 89:
        roundings += [InputRounding(torch.float8_e4m3fn), InputRounding(torch.float8_e4m3fn, 128)]
    with contextlib.ExitStack() as stack:
        for room in (rms_norm, rounded_tokens, swiglu, dequantized):
            stack.enter_context(mock.patch.object(room, "uses_triton", lambda x: True))
        stack.enter_context(mock.patch.object(card, "launches_early", lambda device: arch >= 90))
        compiled = stack.enter_context(compiling_for(arch))
        for rounding, dtype, (hidden, inner) in itertools.product(
            roundings, (torch.bfloat16, torch.float16), ((4096, 14_336), (5120, 25_600))
        ):
            x, weight = torch.empty(3, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
            rms_norm.rounded_rms_norm(x, weight, 1e-5, rounding)
            rms_norm.rounded_add_rms_norm(x, x, weight, 1e-5, rounding)
            rms_norm.rounded_add_rms_norm(x, x, weight, 1e-5, rounding, keeps=True)
            for activation in ("silu", "gelu_tanh"):
                swiglu.rounded_swiglu(torch.empty(3, 2 * inner, dtype=dtype), rounding, activation)
            rounded_tokens.round_tokens(x, rounding)
            if not rounding.group_size:
                rounded_tokens.round_tokens(x, dataclasses.replace(rounding, scale=0.5))
        if arch >= 89:
            weight = allocate(QuantKind.INT4, 6144, 4096, 128, torch.bfloat16, torch.device("cpu"))
            dequantized.round_to_e4m3(weight, range(6144), torch.empty(6144, 4096, dtype=torch.float8_e4m3fn))
    return compiled


def compile_finite(arch: int) -> list[Any]:
    """Rows of three models, at addresses of any alignment."""
    with mock.patch.object(finite_rows, "uses_triton", lambda x: True), compiling_for(arch) as compiled:
        for dtype, hidden in itertools.product((torch.bfloat16, torch.float16), (896, 4096, 8192)):
            for first in range(3):
                finite_rows.finite_rows(
                    torch.empty(6 * hidden, dtype=dtype)[first : first + 5 * hidden].view(5, hidden)
                )
    return list({id(kernel): kernel for kernel in compiled}.values())


def _multiply_blocks(weight: block_weight.BlockWeight, num_rows: int) -> None:
    x = torch.empty(num_rows, weight.num_inputs, dtype=weight.dtype)
    out = torch.empty(num_rows, weight.num_outputs, dtype=weight.dtype)
    block_linear_kernels.multiply_small_batch(x, weight, torch.empty(weight.num_outputs, dtype=weight.dtype), out)


def _look_up_blocks(weight: block_weight.BlockWeight) -> None:
    tokens = torch.zeros(3, dtype=torch.int64)
    block_linear_kernels.gather(weight, tokens, torch.empty(3, weight.num_inputs, dtype=weight.dtype))


def compile_blocks(arch: int, every: bool = False) -> list[Any]:
    """Compiles the kernels of block weights, every kind at a product of an 8B Llama.

    They have the first and last class of small batches, dequantizing rows, and looking them up.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        compiled = stack.enter_context(compiling_for(arch))
        cpu = torch.device("cpu")
        for i, kind in enumerate(block_weight.BlockKind):
            # fp16 has a conversion of its own, whatever the planes.
            dtype = (
                torch.float16 if kind in (block_weight.BlockKind.Q5_0, block_weight.BlockKind.Q5_K) else torch.bfloat16
            )
            weight = block_weight.allocate(kind, 64, 4096, dtype, cpu)
            launches = (
                functools.partial(_multiply_blocks, weight, 1),
                functools.partial(_multiply_blocks, weight, 20),
                functools.partial(
                    block_linear_kernels.dequantize_into, weight, range(8), torch.empty(8, 4096, dtype=dtype)
                ),
                functools.partial(_look_up_blocks, weight),
            )
            for j, launch in enumerate(launches):
                if _has_turn(arch, i, j, every=every):
                    launch()
    return compiled


# Kind, group (0: whole rows), and what else folders of other tools have.
_EXPERT_KINDS: tuple[tuple[QuantKind | None, int, Arrangement], ...] = (
    (None, 0, Arrangement()),
    (QuantKind.INT8, 0, Arrangement()),
    (QuantKind.INT8, 128, Arrangement(has_zeros=True)),
    (QuantKind.FP8, 0, Arrangement()),
    (QuantKind.FP8, 128, Arrangement(scale_outputs=128)),
    (QuantKind.INT4, 128, Arrangement()),
)
# Qwen3-30B-A3B, and a rank's quarter of Mixtral 8x7B: experts, of which so many compute a token,
# hidden and inner elements.
_MIXTURES = ((128, 8, 2048, 768), (8, 2, 4096, 3584))
# What grouped GEMMs multiply: kind, group (0: whole rows), tile of gates and ups, tiles of outputs.
_FEW_GROUPED = GroupedTile(32, 128, 4, 5, is_swapped=True)
_GROUPED: tuple[tuple[QuantKind | None, int, tuple[GroupedTile, ...], tuple[GroupedTile, ...]], ...] = (
    (
        None, 0, (GroupedTile(64, 64, 4, 4), GroupedTile(128, 128, 8, 4)),
        (_FEW_GROUPED, GroupedTile(64, 128, 4, 4), GroupedTile(128, 256, 8, 4)),
    ),
    (
        QuantKind.FP8, 0, (GroupedTile(64, 64, 4, 4), GroupedTile(128, 128, 8, 4)),
        (_FEW_GROUPED, GroupedTile(64, 128, 4, 4), GroupedTile(128, 256, 8, 4), GroupedTile(128, 128, 4, 3)),
    ),
    (
        QuantKind.FP8, 128,
        (
            GroupedTile(64, 64, 4, 4),
            *(GroupedTile(pairs, 128, 8, slots, rounds=True) for pairs, slots in ((64, 4), (128, 4))),
        ),
        (_FEW_GROUPED, GroupedTile(64, 128, 4, 4)),
    ),
)  # fmt: skip
# In MXFP4: tiles of gates and ups, and of outputs, with their gating.
_CLAMPED = Gating(True, 1.702, 7.0)
_MXFP4_GROUPED: tuple[tuple[Mxfp4Tile, Gating | None], ...] = (
    (Mxfp4Tile(128, 128, 8, 4), _CLAMPED), (Mxfp4Tile(128, 128, 8, 3), _CLAMPED),
    (Mxfp4Tile(64, 128, 4, 4), None), (Mxfp4Tile(128, 128, 8, 4), None),
)  # fmt: skip


def compile_experts(arch: int) -> list[Any]:
    """Compiles mixtures of experts: routing, one token and two, and tiles of every size.

    Weights are plain and of each kind of few bits, and plain ones of a rank with half of the
    experts. On sm_90 one token's kernels are launched early, and there are grouped GEMMs.
    """
    cpu = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(card, "shared_bytes", lambda device: _SHARED_BYTES[arch]))
        stack.enter_context(mock.patch.object(card, "has_warpgroup_products", lambda device: arch >= 90))
        stack.enter_context(mock.patch.object(card, "launches_early", lambda device: arch >= 90))
        for room in (mixture, router, routing, scored_routing, tile_table):
            stack.enter_context(mock.patch.object(room, "uses_triton", lambda x: True))
        compiled = stack.enter_context(compiling_for(arch))
        for sizes, (kind, grouped, arrangement) in itertools.product(_MIXTURES, _EXPERT_KINDS):
            num_experts, per_token, hidden, inner = sizes
            weights = []
            for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
                stored: torch.Tensor | QuantizedWeight = torch.empty(
                    num_experts * outputs, inputs, dtype=torch.bfloat16
                )
                if kind is not None:
                    rows = num_experts * outputs
                    stored = allocate(kind, rows, inputs, grouped or inputs, torch.bfloat16, cpu, arrangement)
                weights.append(ExpertWeights(stored, num_experts))
            gate_up, down = weights
            average = num_experts // per_token
            # Every class of tiles of plain weights and FP8, of others the largest.
            classes = (8, 16, 32, 64) if kind in (None, QuantKind.FP8) else (64,)
            for num_tokens in (1, *(average * pairs for pairs in classes)):
                x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
                logits = torch.empty(num_tokens, num_experts, dtype=x.dtype)
                choice = routing.choose_experts(logits, per_token, True)
                mixture.mixture(x, choice, gate_up, down)
            if kind is None:
                correction = torch.empty(num_experts)
                for groups in ((1, 1), (4, 2)):
                    scoring = scored_routing.Scoring(*groups, True, 2.5)
                    scored_routing.choose_scored_experts(logits, correction, per_token, scoring)
                norm = torch.empty(hidden, dtype=x.dtype)
                one = routing.Choice(*(column[:1] for column in choice))
                mixture.add_mixture(x[:1], norm, 1e-5, one, gate_up, down)
                routing.sort_pairs(torch.empty(16_384 // per_token, per_token, dtype=torch.int32), num_experts)
                two = routing.Choice(*(column[:2] for column in choice))
                mixture.add_mixture(x[:2], norm, 1e-5, two, gate_up, down)
                mixture.mixture(x[:1], one, *_of_a_rank(weights))
                mixture.mixture(x, choice, *_of_a_rank(weights))
        _mxfp4_mixtures()
        _block_mixtures()
        if arch == 90:
            for kind, group, of_gates, of_outputs in _GROUPED:
                for tiles, gating in ((of_gates, SILU), (of_outputs, None)):
                    for tile in tiles:
                        launch_grouped(kind, group, tile, gating)
            launch_grouped(None, 0, _GROUPED[0][2][-1], _CLAMPED, has_bias=True)
            # All of gpt-oss-20b's inner elements, and a rank's of two.
            for (dtype, inner), (mxfp4_tile, own) in itertools.product(
                ((torch.bfloat16, 2880), (torch.float16, 1440)), _MXFP4_GROUPED
            ):
                launch_mxfp4_grouped(dtype, inner, mxfp4_tile, own)
    return list({id(kernel): kernel for kernel in compiled}.values())


def launch_grouped(
    kind: QuantKind | None, group: int, tile: GroupedTile, gating: Gating | None, has_bias: bool = False
) -> None:
    """Many tokens' product in Qwen3-30B-A3B's experts: gates and ups, or without gating down."""
    num_tokens, cpu = 256, torch.device("cpu")
    num_experts, per_token, hidden, inner = _MIXTURES[0]
    num_pairs, outputs, inputs = num_tokens * per_token, *((hidden, inner) if gating is None else (inner, hidden))
    rows, num_rows = num_experts * outputs * (1 if gating is None else 2), num_pairs if gating is None else num_tokens
    stored: torch.Tensor | QuantizedWeight = torch.empty(rows, inputs, dtype=torch.bfloat16)
    x: Activations = torch.empty(num_rows, inputs, dtype=torch.bfloat16)
    if kind is not None:
        stored = allocate(kind, rows, inputs, group or inputs, torch.bfloat16, cpu, Arrangement(scale_outputs=group))
        x = RoundedTokens.empty((num_rows, inputs), InputRounding(torch.float8_e4m3fn, group), cpu)
    weights = ExpertWeights(stored, num_experts, torch.empty(rows, dtype=torch.bfloat16) if has_bias else None)
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32)
    choice, pairs = routing.Choice(experts, torch.empty(experts.shape)), routing.sort_pairs(experts, num_experts)
    table = tile_table.tile_table(pairs, tile.block_m)
    out: Activations = torch.empty(num_pairs, outputs, dtype=torch.bfloat16)
    if tile.rounds:
        out = RoundedTokens.empty((num_pairs, outputs), InputRounding(torch.float8_e4m3fn, 128), cpu)
    multiply_grouped_gemm(x, choice, pairs, table, weights, out, tile, gating)


def launch_mxfp4_grouped(dtype: torch.dtype, inner: int, tile: Mxfp4Tile, gating: Gating | None) -> None:
    """Many tokens' product in gpt-oss-20b's experts: gates and ups, or without gating down."""
    num_experts, per_token, hidden, num_tokens = 32, 4, 2880, 256
    num_pairs, outputs, inputs = num_tokens * per_token, *((hidden, inner) if gating is None else (inner, hidden))
    rows = num_experts * outputs * (1 if gating is None else 2)
    stored = allocate_mxfp4(rows, inputs, dtype, torch.device("cpu"))
    weights = ExpertWeights(stored, num_experts, torch.empty(rows, dtype=dtype))
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32)
    choice, pairs = routing.Choice(experts, torch.empty(experts.shape)), routing.sort_pairs(experts, num_experts)
    x = torch.empty(num_pairs if gating is None else num_tokens, inputs, dtype=dtype)
    table, out = tile_table.tile_table(pairs, tile.block_m), torch.empty(num_pairs, outputs, dtype=dtype)
    multiply_mxfp4_gemm(x, choice, pairs, table, weights, out, tile, gating)


def _of_a_rank(weights: list[ExpertWeights]) -> list[ExpertWeights]:
    """Experts as the second half of a layer's, which another rank shares."""
    return [dataclasses.replace(each, part=ExpertPart(each.num_experts, 2 * each.num_experts)) for each in weights]


def _block_mixtures() -> None:
    """Experts of a GGUF file, few tokens and many: Q4_K_M's types, and one of every other sort."""
    cpu = torch.device("cpu")
    for kinds in (("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("IQ4_XS", "Q2_K"), ("Q3_K", "Q4_1")):
        gate_up, down = (
            ExpertWeights(block_weight.allocate(block_weight.BlockKind(kind), rows, inputs, torch.bfloat16, cpu), 4)
            for kind, rows, inputs in ((kinds[0], 4 * 2 * 768, 2048), (kinds[1], 4 * 2048, 768))
        )
        for num_tokens in (1, 64):
            x = torch.empty(num_tokens, 2048, dtype=torch.bfloat16)
            choice = routing.choose_experts(torch.empty(num_tokens, 4, dtype=x.dtype), 2, True)
            mixture.mixture(x, choice, gate_up, down)


def _mxfp4_mixtures() -> None:
    """gpt-oss-20b's: one token, normed and added, each class of tiles, and a rank's experts.

    Of experts with fewer inner elements one token, whose loops a compiler may cut otherwise.
    """
    num_experts, per_token, hidden, gating = 32, 4, 2880, Gating(True, 1.702, 7.0)
    weights = _mxfp4_weights(num_experts, hidden, 2880)
    for num_tokens in (1, 64, 128, 256, 512):
        x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
        choice = routing.choose_experts(torch.empty(num_tokens, num_experts, dtype=x.dtype), per_token, True)
        mixture.mixture(x, choice, *weights, gating)
        if num_tokens == 1:
            mixture.add_mixture(x, torch.empty(hidden, dtype=x.dtype), 1e-5, choice, *weights, gating)
            _routers(num_experts, per_token, hidden)
            for inner in (128, 256, 384, 768, 1408):
                mixture.mixture(x, choice, *_mxfp4_weights(num_experts, hidden, inner), gating)
        if num_tokens in (1, 512):
            mixture.mixture(x, choice, *_of_a_rank(weights), gating)


def _mxfp4_weights(num_experts: int, hidden: int, inner: int) -> list[ExpertWeights]:
    """Gate and up, and down, whose rows are all one."""
    weights = []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        stored = allocate_mxfp4(num_experts * outputs, inputs, torch.bfloat16, torch.device("meta"))
        stored = dataclasses.replace(
            stored,
            packed=torch.empty(1, stored.packed.shape[1], dtype=torch.int16).expand(stored.packed.shape),
            scales=torch.empty(1, 4, dtype=torch.uint8).expand(stored.scales.shape[0], 4),
        )
        weights.append(ExpertWeights(stored, num_experts, torch.empty(num_experts * outputs, dtype=torch.bfloat16)))
    return weights


def _routers(num_experts: int, per_token: int, hidden: int) -> None:
    """The choice of one token's experts and of four's, in one launch."""
    weight, bias = (
        torch.empty(num_experts, hidden, dtype=torch.bfloat16),
        torch.empty(num_experts, dtype=torch.bfloat16),
    )
    norm, done = (torch.empty(hidden, dtype=torch.bfloat16), 1e-5), torch.zeros(1, dtype=torch.int32)
    for num_tokens in (1, 4):
        x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
        router.choose_after_norm(x, norm, weight, bias, per_token, True, done)


_ROOMS = {
    "attention": compile_attention,
    "small_linear": compile_small_linear,
    "low_bits": compile_low_bits,
    "low_bits_all": functools.partial(compile_low_bits, every=True),
    "nibble_rows": compile_nibble_rows,
    "nibble_rows_all": functools.partial(compile_nibble_rows, every=True),
    "few": compile_few,
    "bit_streams": compile_bit_streams,
    "w4a8": compile_w4a8,
    "head": compile_head,
    "arranged": compile_arranged,
    "arranged_all": functools.partial(compile_arranged, every=True),
    "rounded": compile_rounded,
    "finite": compile_finite,
    "experts": compile_experts,
    "blocks": compile_blocks,
    "blocks_all": functools.partial(compile_blocks, every=True),
}
# Whose tests ask for `code_counts`: rooms, and a kernel.
_COUNTED = ("low_bits", "low_bits_all", "scaled", "_mxfp4_gemm_kernel")


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    room, for_arch = sys.argv[1], int(sys.argv[2])
    for each in _ROOMS[room](for_arch):
        counts = code_counts(each) if room in _COUNTED or each.metadata.name in _COUNTED else {}
        print(json.dumps(resources(each) | counts))
