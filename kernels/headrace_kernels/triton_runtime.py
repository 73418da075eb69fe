"""What all Triton kernels here share: when they are used, how they run, and how many were compiled.

Owns the switch between a kernel and its PyTorch reference, and the count of compilations. A server
compiles nothing once it is warm; `compilation_count` is how tests and benchmarks see that it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.runtime import interpreter

# Kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1). Its tl.dot is wrong for
# bf16, so kernels take fp32 operands there.
INTERPRETED: bool = triton.knobs.runtime.interpret

_state = {"forced": False, "compilations": 0}


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on this tensor runs its Triton kernel."""
    return tensor.is_cuda or _state["forced"] is True


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Has operations take their kernels on CPU tensors too, which works in the interpreter only.

    For tests of what is built from kernels.
    """
    assert INTERPRETED, "kernels on CPU tensors need TRITON_INTERPRET=1"
    before, _state["forced"] = _state["forced"], True
    try:
        yield
    finally:
        _state["forced"] = before


def compilation_count() -> int:
    """Kernels that this process has compiled, or loaded from the kernel cache, so far.

    It stands still once everything is warm.
    """
    return _state["compilations"]


def _count(*_: Any, **__: Any) -> None:
    _state["compilations"] += 1


triton.knobs.runtime.jit_post_compile_hook = _count


def _index_scalars(patch: Any) -> Any:
    """Lets the interpreter's loops take bounds that are arrays of one entry.

    They are made ints with int(array), which NumPy from 2.4 on refuses.
    """

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


if INTERPRETED:
    interpreter._patch_lang_tensor = _index_scalars(interpreter._patch_lang_tensor)
