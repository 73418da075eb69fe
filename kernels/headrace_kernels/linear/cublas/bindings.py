"""The part of cuBLASLt's interface that names the algorithm of a product, by ctypes.

PyTorch takes the first algorithm that the library's heuristic names. Of FP8 products with a scale
for each token and output the heuristic names only one, of 128 x 128 outputs, although the library
has dozens; of others it names eight, whose first is not always the fastest. This file changes the
tile of what the heuristic names, and asks the library whether it can multiply so.

Names, numbers and layouts are those of `cublasLt.h`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

# 12.9, the first with a scale for each token and output.
_LEAST_VERSION = 120_900
_COMPUTE_32F = 68
_REAL_32F = 0
_REAL_OF = {torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_OP_N, _OP_T = 0, 1
# cublasLtMatmulDescAttributes_t.
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER, _DESC_FAST_ACCUM, _DESC_BIAS_DATA_TYPE = 17, 18, 25, 26
_DESC_A_SCALE_MODE, _DESC_B_SCALE_MODE = 31, 32
_EPILOGUE_BIAS = 4
# An address for what a launch sets: the library names no algorithm where one is missing.
_SOME_ADDRESS = 4096
# cublasLtMatmulMatrixScale_t: scales for each row of A, or column of B; for 128 inputs of each; for
# 128 inputs of 128.
_SCALE_OUTER_VEC_32F, _SCALE_VEC128_32F, _SCALE_BLK128X128_32F = 3, 4, 5
# cublasLtMatmulAlgoConfigAttributes_t.
_CONFIG_TILE_ID, _CONFIG_SPLITK_NUM, _CONFIG_REDUCTION_SCHEME = 1, 2, 3
_CONFIG_CUSTOM_OPTION, _CONFIG_CLUSTER_SHAPE_ID = 5, 8
# cublasLtMatmulPreferenceAttributes_t.
_PREF_MAX_WORKSPACE_BYTES = 1
# What programs that take tiles in turn count them in takes some bytes; sums of split inputs, which
# no product here has, would take megabytes.
_MOST_WORKSPACE_BYTES = 1 << 20

_POINTER = ctypes.c_void_p
_SIGNATURES = {
    "cublasLtCreate": [_POINTER],
    "cublasLtMatmulDescCreate": [_POINTER, ctypes.c_int, ctypes.c_int],
    "cublasLtMatmulDescSetAttribute": [_POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t],
    "cublasLtMatrixLayoutCreate": [_POINTER, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatmulPreferenceCreate": [_POINTER],
    "cublasLtMatmulPreferenceDestroy": [_POINTER],
    "cublasLtMatmulPreferenceSetAttribute": [_POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [*[_POINTER] * 7, ctypes.c_int, _POINTER, _POINTER],
    "cublasLtMatmulAlgoConfigSetAttribute": [_POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t],
    "cublasLtMatmulAlgoCheck": [_POINTER] * 8,
    "cublasLtMatmul": [*[_POINTER] * 14, ctypes.c_size_t, _POINTER],
}


class TileName(NamedTuple):
    """How the library calls a way to cut a product."""

    # cublasLtMatmulTile_t.
    tile: int
    # CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, from 0 to 7: which of a tile's kernels it is.
    option: int
    # cublasLtClusterShape_t.
    cluster: int


class ProductShape(NamedTuple):
    """The sizes of a product, each at least 1, its type, what it adds and how it adds up."""

    num_tokens: int
    num_outputs: int
    num_inputs: int
    # Of both sides: bf16, or e4m3 with scales.
    number: torch.dtype
    has_bias: bool
    # Whether products of e4m3 are added up by the tensor cores alone, which keep 14 bits of a sum.
    # Otherwise fp32 takes over their sums of 128 inputs.
    has_fast_sums: bool = False
    # e4m3: whether tokens have a scale for each 128 inputs, and weights one for 128 inputs of 128
    # outputs. Otherwise tokens and outputs have one each.
    in_blocks: bool = False


class Scales(NamedTuple):
    """What e4m3 numbers are multiplied by, in fp32, both contiguous."""

    # [num_tokens, 1], or in blocks [groups, num_tokens].
    of_tokens: Tensor
    # [num_outputs], or in blocks [blocks of outputs, groups up to a multiple of 4].
    of_outputs: Tensor


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("words", ctypes.c_uint64 * 8),)


class _Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """The library that PyTorch has loaded, with a handle of its own on one card."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        """Makes the handle.

        Args:
            library: What `loaded_library` finds.
            device: The card.
        """
        self.handle = _POINTER()
        self._library = library
        for name, arguments in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        with torch.cuda.device(device):
            self.call("cublasLtCreate", ctypes.byref(self.handle))

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the library.

        Raises:
            RuntimeError: It returned another status than success.
        """
        if status := self.status(name, *arguments):
            raise RuntimeError(f"{name} failed with cublasStatus_t {status}")

    def status(self, name: str, *arguments: object) -> int:
        """What a function of the library returns: 0 is success."""
        return int(getattr(self._library, name)(*arguments))


class LibraryProduct:
    """A product of one shape, cut as it was asked to: X W^T and the outputs' bias, in bf16.

    Of e4m3 sums are those of `torch._scaled_mm`, with or without fast accumulation. The library has
    columns one after another, so that W is its left side, and outputs are the rows of what it
    returns.
    """

    def __init__(self, library: CublasLt, shape: ProductShape) -> None:
        """Describes the product to the library; `cut` says how it is multiplied."""
        self._library = library
        # A launch sets the description's pointers first.
        self._lock = threading.Lock()
        self._algorithm: _Algorithm | None = None
        self._workspace_bytes = 0
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        num_tokens, num_outputs, num_inputs, number, has_bias, has_fast_sums, in_blocks = shape
        self._description = _POINTER()
        library.call("cublasLtMatmulDescCreate", ctypes.byref(self._description), _COMPUTE_32F, _REAL_32F)
        self._set(_DESC_TRANSA, ctypes.c_int32(_OP_T))
        self._set(_DESC_TRANSB, ctypes.c_int32(_OP_N))
        if number == torch.float8_e4m3fn:
            of_outputs, of_tokens = _SCALE_OUTER_VEC_32F, _SCALE_OUTER_VEC_32F
            if in_blocks:
                of_outputs, of_tokens = _SCALE_BLK128X128_32F, _SCALE_VEC128_32F
            self._set(_DESC_A_SCALE_MODE, ctypes.c_int32(of_outputs))
            self._set(_DESC_B_SCALE_MODE, ctypes.c_int32(of_tokens))
            self._set_pointers(_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER)
            self._set(_DESC_FAST_ACCUM, ctypes.c_int8(has_fast_sums))
        if has_bias:
            self._set(_DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
            self._set(_DESC_BIAS_DATA_TYPE, ctypes.c_int32(_REAL_OF[torch.bfloat16]))
            self._set_pointers(_DESC_BIAS_POINTER)
        self._weight = self._layout(number, num_inputs, num_outputs)
        self._tokens = self._layout(number, num_inputs, num_tokens)
        self._out = self._layout(torch.bfloat16, num_outputs, num_tokens)

    def cut(self, name: TileName) -> bool:
        """Has inputs whole and tiles so; False: the library can't, or needs megabytes for it."""
        algorithm = self._first_of_heuristic()
        if algorithm is None:
            return False
        for attribute, value in (
            (_CONFIG_SPLITK_NUM, ctypes.c_int32(1)),
            (_CONFIG_REDUCTION_SCHEME, ctypes.c_uint32(0)),
            (_CONFIG_TILE_ID, ctypes.c_uint32(name.tile)),
            (_CONFIG_CUSTOM_OPTION, ctypes.c_uint32(name.option)),
            (_CONFIG_CLUSTER_SHAPE_ID, ctypes.c_uint16(name.cluster)),
        ):
            if self._library.status(
                "cublasLtMatmulAlgoConfigSetAttribute",
                ctypes.byref(algorithm), attribute, ctypes.byref(value), ctypes.sizeof(value),
            ):  # fmt: skip
                return False
        checked = _Candidate()
        status = self._library.status(
            "cublasLtMatmulAlgoCheck", self._library.handle, *self._operands(),
            ctypes.byref(algorithm), ctypes.byref(checked),
        )  # fmt: skip
        if status or checked.workspace_bytes > _MOST_WORKSPACE_BYTES:
            return False
        self._algorithm, self._workspace_bytes = algorithm, checked.workspace_bytes
        return True

    def launch(self, tokens: Tensor, numbers: Tensor, bias: Tensor | None, out: Tensor, scales: Scales | None) -> None:
        """Multiplies on the current stream, after `cut` has returned True. All are contiguous.

        Args:
            tokens: [num_tokens, num_inputs] of the shape's type.
            numbers: [num_outputs, num_inputs] of that type, the weight.
            bias: [num_outputs] bf16, if the shape has one.
            out: [num_tokens, num_outputs] bf16; written.
            scales: What e4m3 is multiplied by; None: bf16.

        Raises:
            RuntimeError: The library refused the launch.
        """
        assert self._algorithm is not None, "cut first"
        assert tokens.is_contiguous() and numbers.is_contiguous() and out.is_contiguous()
        assert bias is None or (bias.is_contiguous() and bias.dtype == out.dtype == torch.bfloat16)
        # It is of this stream: kernels behind this one alone may have its memory next.
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=out.device)
        with self._lock:
            if scales is not None:
                assert scales.of_outputs.is_contiguous() and scales.of_tokens.is_contiguous()
                self._set(_DESC_A_SCALE_POINTER, _POINTER(scales.of_outputs.data_ptr()))
                self._set(_DESC_B_SCALE_POINTER, _POINTER(scales.of_tokens.data_ptr()))
            if bias is not None:
                self._set(_DESC_BIAS_POINTER, _POINTER(bias.data_ptr()))
            self._library.call(
                "cublasLtMatmul", self._library.handle, self._description,
                ctypes.byref(self._one), numbers.data_ptr(), self._weight, tokens.data_ptr(), self._tokens,
                ctypes.byref(self._zero), out.data_ptr(), self._out, out.data_ptr(), self._out,
                ctypes.byref(self._algorithm), workspace.data_ptr(), self._workspace_bytes,
                torch.cuda.current_stream(out.device).cuda_stream,
            )  # fmt: skip

    def _first_of_heuristic(self) -> _Algorithm | None:
        """What PyTorch would take."""
        preference, candidate, found = _POINTER(), _Candidate(), ctypes.c_int()
        room = ctypes.c_size_t(_MOST_WORKSPACE_BYTES)
        self._library.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        self._library.call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference, _PREF_MAX_WORKSPACE_BYTES, ctypes.byref(room), ctypes.sizeof(room),
        )  # fmt: skip
        status = self._library.status(
            "cublasLtMatmulAlgoGetHeuristic", self._library.handle, *self._operands(),
            preference, 1, ctypes.byref(candidate), ctypes.byref(found),
        )  # fmt: skip
        self._library.call("cublasLtMatmulPreferenceDestroy", preference)
        return candidate.algorithm if status == 0 and found.value == 1 and candidate.status == 0 else None

    def _operands(self) -> tuple[ctypes.c_void_p, ...]:
        return self._description, self._weight, self._tokens, self._out, self._out

    def _set(self, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        self._library.call(
            "cublasLtMatmulDescSetAttribute",
            self._description, attribute, ctypes.byref(value), ctypes.sizeof(value),
        )  # fmt: skip

    def _set_pointers(self, *attributes: int) -> None:
        """Gives the library something to go by until a launch knows."""
        for attribute in attributes:
            self._set(attribute, _POINTER(_SOME_ADDRESS))

    def _layout(self, number: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
        """A matrix whose columns lie one behind the other."""
        layout = _POINTER()
        self._library.call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _REAL_OF[number], rows, columns, rows)
        return layout


@functools.cache
def loaded_library() -> ctypes.CDLL | None:
    """The cuBLASLt of the CUDA that PyTorch was built for; None: there is none, or an older one."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library if library.cublasLtGetVersion() >= _LEAST_VERSION else None


@functools.cache
def cublas_lt(device: torch.device) -> CublasLt | None:
    """The library with a handle on a card; None: there is none to be had."""
    library = loaded_library()
    return None if library is None else CublasLt(library, device)
