"""Each rank reads its own bytes of the files: columns where they are long enough, whole rows elsewhere, and the ranks' parts make the whole either way."""

from __future__ import annotations

import os
import pathlib

import pytest
import safetensors.torch
import torch
from tests.models.checkpoints import ignore_progress

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.weights import checkpoint_files
from headrace_backend.weights.checkpoint_files import RowSpan
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement, Shard, WeightTarget
from headrace_kernels.low_bit.block_weight import BlockKind
from headrace_model_folder import TensorRecord

ROWS, COLUMNS = 6, 4096


class Folder:
    """As much of a ModelFolder as loading needs."""

    def __init__(self, path: pathlib.Path, weight: torch.Tensor) -> None:
        safetensors.torch.save_file({"w": weight}, path / "w.safetensors")
        offset = (path / "w.safetensors").stat().st_size - weight.nbytes
        self.weights_folder = path
        self.tensors = {"w": TensorRecord("w.safetensors", "F32", tuple(weight.shape), offset, weight.nbytes)}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_read_their_own_bytes_only(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    folder = Folder(tmp_path, weight)
    read_bytes = 0
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read_bytes
        count = preadv(descriptor, buffers, offset)
        read_bytes += count
        return count

    monkeypatch.setattr(checkpoint_files.os, "preadv", counted)
    parts = []
    for rank in range(world_size):
        read_bytes = 0
        columns = Shard(rank, world_size).split(COLUMNS)
        part = torch.full((ROWS, len(columns)), torch.nan)
        target = WeightTarget.of(part, range(ROWS), columns)
        load_weights(folder, {"w": target}, ignore_progress)  # type: ignore[arg-type]  # as much of it as is needed
        parts.append(part)
        # 2 KiB a row on 8 ranks: not worth a read each.
        assert read_bytes == (part.nbytes if world_size < 8 else weight.nbytes)
    assert torch.equal(torch.cat(parts, dim=1), weight)


def test_spans_are_columns_that_are_worth_it() -> None:
    assert RowSpan.of_columns(range(1024, 2048), (10, 4096), 4) == RowSpan(16384, 4096, 4096)
    assert RowSpan.of_columns(range(0, 512), (10, 4096), 4) == RowSpan(16384, 0, 16384)
    assert RowSpan.of_columns(range(0, 4096), (10, 4096), 4).is_whole
    assert RowSpan.of_columns(None, (10,), 2) == RowSpan(2, 0, 2)


def test_rows_in_blocks_are_read_whole() -> None:
    weight = BlockLinearWeight((BlockKind.Q8_0,), (4,), 4096, Placement(torch.float32, torch.device("cpu")))
    target = WeightTarget(weight.destination(range(4)), range(2, 6), range(4096))
    row_bytes = 4096 // 32 * 34
    assert RowSpan.of(target, TensorRecord("w", "Q8_0", (10, 4096), 0, 10 * row_bytes)) == RowSpan(
        row_bytes, 0, row_bytes
    )
    plain = WeightTarget.of(torch.empty(4, 1024), range(2, 6), range(1024, 2048))
    assert RowSpan.of(plain, TensorRecord("w", "BF16", (10, 4096), 0, 10 * 8192)) == RowSpan(8192, 0, 8192)
    assert RowSpan.of(plain, TensorRecord("w", "F32", (10, 4096), 0, 10 * 16384)) == RowSpan(16384, 4096, 4096)
