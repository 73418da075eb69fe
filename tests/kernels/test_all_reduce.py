"""Sums over ranks by reading each other's memory: ranks are processes with the interpreter over shared memory, and must agree to the bit with the reference."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.kernels.rank_in_interpreter import CAPACITY_BYTES, RANK_BYTES, peers_in

from headrace_kernels.all_reduce import (
    ONE_SHOT_BYTES,
    all_reduce_add_rms_norm_reference,
    all_reduce_reference,
    takes,
    takes_norm,
)
from headrace_kernels.triton_runtime import INTERPRETED

_LIMIT_S = 240
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="ranks without cards are processes with the interpreter")


class Case(NamedTuple):
    way: str
    x: np.ndarray
    residual: np.ndarray | None = None
    weight: np.ndarray | None = None


def case(way: str, *shape: int, world_size: int, dtype: type = np.float32) -> Case:
    random = np.random.default_rng(sum(shape) + len(way))
    x = random.standard_normal((world_size, *shape)).astype(dtype)
    if way != "norm":
        return Case(way, x)
    return Case(way, x, random.standard_normal(shape).astype(dtype), random.standard_normal(shape[-1]).astype(dtype))


def run_ranks(folder: pathlib.Path, world_size: int, cases: list[Case], calls: int) -> list[dict[str, np.ndarray]]:
    """All cases one after the other on every rank, without anything between them; results by rank."""
    arrays = {"ways": np.array([case.way for case in cases]), "calls": np.array(calls)}
    for index, each in enumerate(cases):
        arrays |= {f"{name}{index}": value for name, value in each._asdict().items() if isinstance(value, np.ndarray)}
    np.savez(folder / "cases.npz", **arrays)
    memory = os.memfd_create("ranks")
    os.ftruncate(memory, world_size * RANK_BYTES)
    fill_with_poison(memory, world_size, calls)
    command = [sys.executable, "-m", "tests.kernels.rank_in_interpreter"]
    # For every program of a rank, in turn, others wait: they must not wait for each other's threads too.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(memory), str(folder)], pass_fds=(memory,), env=environment
        )
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(_LIMIT_S) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        os.close(memory)
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(world_size)]


def fill_with_poison(memory: int, world_size: int, calls: int) -> None:
    """NaN wherever tensors and sums go, and flags as they are after so many calls."""
    poison = np.full(4 * CAPACITY_BYTES // 4, np.nan, np.float32).tobytes()
    flags = np.full((RANK_BYTES - len(poison)) // 4, 2 * calls, np.int64).astype(np.int32).tobytes()
    for rank in range(world_size):
        os.pwrite(memory, poison + flags, rank * RANK_BYTES)


def check(found: list[dict[str, np.ndarray]], cases: list[Case]) -> None:
    for index, each in enumerate(cases):
        parts = [torch.from_numpy(part) for part in each.x]
        for rank in found:
            if each.residual is None or each.weight is None:
                np.testing.assert_array_equal(rank[f"out{index}"], all_reduce_reference(parts).numpy())
                continue
            residual = torch.from_numpy(each.residual.copy())
            normed = all_reduce_add_rms_norm_reference(parts, residual, torch.from_numpy(each.weight), 1e-5)
            np.testing.assert_array_equal(rank[f"residual{index}"], residual.numpy())
            # The norm's own sum has another order than the reference's: an ulp of fp16, some of fp32.
            tolerance = 2e-3 if each.x.dtype == np.float16 else 2e-6
            np.testing.assert_allclose(rank[f"out{index}"], normed.numpy(), rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(rank[f"out{index}"], found[0][f"out{index}"])


@needs_interpreter
def test_ranks_agree_whatever_follows_what(tmp_path: pathlib.Path) -> None:
    """Sizes that fill one vector, some programs, all of the memory; ways that follow each other; several calls in each half; marks, which are twice the calls, that pass the greatest int32 on the way."""
    world_size = 3
    cases = [
        case("two", 4, world_size=world_size),
        case("two", CAPACITY_BYTES // 4, world_size=world_size),
        case("norm", 3, 40, world_size=world_size),
        case("one", 1028, world_size=world_size),
        case("norm", 1, 128, world_size=world_size, dtype=np.float16),
        case("two", 8, 24, world_size=world_size, dtype=np.float16),
        case("norm", 40, 64, world_size=world_size),
        case("one", CAPACITY_BYTES // 4, world_size=world_size),
    ]
    check(run_ranks(tmp_path, world_size, cases, calls=(1 << 30) - 4), cases)


def test_what_does_not_fit_is_left_to_others() -> None:
    peers = peers_in(torch.empty(0, dtype=torch.uint8), 0, 2, 0)
    assert takes(torch.empty(CAPACITY_BYTES // 4), peers)
    assert not takes(torch.empty(CAPACITY_BYTES // 4 + 4), peers)
    assert not takes(torch.empty(5), peers)
    assert not takes(torch.empty(8, 8)[:, :4], peers)
    with pytest.raises(AssertionError, match="begins with an allocation"):
        takes(torch.empty(9)[1:], peers)
    assert takes_norm(torch.empty(2, 64), peers)
    assert CAPACITY_BYTES < ONE_SHOT_BYTES
