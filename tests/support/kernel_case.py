"""What tests of kernels share: device, fresh random data, poison, and tolerances.

A tolerance is how far a result may be from fp64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from headrace_kernels.triton_runtime import INTERPRETED, forced

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Half a unit in the last place, relative; the interpreter cuts bf16 off instead of rounding it.
# fp32: the error of sums and of fast exponentials and roots.
ROUNDING = {torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11, torch.float32: 2e-6}

# Parameters of an indirect fixture or an argument: where kernels run.
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@contextlib.contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """Has operations on tensors of the device take their kernels.

    Skips the test where that cannot be.
    """
    if device == "cpu":
        if not INTERPRETED:
            pytest.skip("kernels run on the card here, not in the interpreter")
        with forced():
            yield
    else:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        yield


class Numbers:
    """Seeded random tensors, and empty ones that are full of poison."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int) -> torch.Tensor:
        wide = torch.randn(*shape, generator=self._generator, device=self.device)
        return wide.to(self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)


@contextlib.contextmanager
def poisoned_memory(device: str) -> Iterator[None]:
    """Memory that torch hands out is full of NaN, so that a place which a kernel forgets shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        probe = torch.empty(4, device=device)
        assert probe.isnan().all(), "torch no longer poisons"
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before[0]
        torch.use_deterministic_algorithms(before[1])


def assert_rounded(
    found: torch.Tensor, expected: torch.Tensor, roundings: int, scale: torch.Tensor | None = None
) -> None:
    """Asserts that `found` is `expected` (fp64) but for some roundings to its type.

    Args:
        found: The result.
        expected: What the result should be, in the same shape, fp64.
        roundings: How many times a number on the way is rounded to the storage type.
        scale: Values that an error is relative to, where that is not the result itself; broadcasts.
    """
    assert found.shape == expected.shape
    error = (found.double() - expected).abs()
    # A hundredth more: roundings multiply, and sums are fp32.
    allowed = 1.01 * roundings * ROUNDING[found.dtype] * (expected if scale is None else scale).abs() + 1e-6
    assert (error <= allowed).all(), (
        f"off by up to {(error / allowed).nan_to_num(torch.inf).max():.2f} times what rounding explains"
    )
