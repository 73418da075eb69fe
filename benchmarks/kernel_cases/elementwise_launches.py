"""The launch rules of the elementwise kernels against their alternatives.

Cases are those of `elementwise`, each forced to one launch.

What the rules' notes cite.

Labels: operation, tokens, then the launch as its `launch_rule` gives it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from unittest import mock

from benchmarks.kernel_cases.elementwise import Case, Cases, add_rms_norm_case, rope_kv_case, swiglu_case
from headrace_kernels import rms_norm, swiglu
from headrace_kernels.attention import rope_kv

# (rows, numbers of a row, warps)
_NORMS = tuple((1, 4096, num_warps) for num_warps in (4, 8, 16))
# (tokens, heads, planes, warps)
_HEADS = ((1, 4, 64, 1), (1, 16, 64, 4), (2, 4, 64, 2), (4, 4, 64, 4), (4, 8, 64, 8), (8, 4, 64, 8))
# (outputs, warps)
_OUTPUTS = ((512, 2), (1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8))


def _forced(make: Callable[[], Case], module: types.ModuleType, launch: tuple[int, ...]) -> Case:
    run, num_bytes, flops = make()

    def forced() -> object:
        with mock.patch.object(module, "launch_rule", lambda *_: launch):
            return run()

    return forced, num_bytes, flops


def launches() -> Cases:
    """Each operation at one row, a full batch and a chunk of a prompt."""
    operations: tuple[tuple[Callable[[int], Case], types.ModuleType, tuple[tuple[int, ...], ...]], ...] = (
        (add_rms_norm_case, rms_norm, _NORMS),
        (rope_kv_case, rope_kv, _HEADS),
        (swiglu_case, swiglu, _OUTPUTS),
    )
    for make, module, rules in operations:
        for num_tokens in (1, 256, 8192):
            yield from _labelled(make, module, rules, num_tokens)


def _labelled(
    make: Callable[[int], Case], module: types.ModuleType, rules: tuple[tuple[int, ...], ...], num_tokens: int
) -> Iterator[tuple[str, Callable[[], Case]]]:
    name = module.__name__.rpartition(".")[2]
    for rule in rules:
        label = f"{name} {num_tokens} {'/'.join(map(str, rule))}"
        yield label, lambda rule=rule: _forced(lambda: make(num_tokens), module, rule)
