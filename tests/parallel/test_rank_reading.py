"""Each rank keeps its own bytes of the files.

Columns are read one row at a time where they lie far apart, and cut out of whole rows elsewhere,
and the ranks' parts make the whole either way.
"""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import ignore_progress

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.weights import checkpoint_files
from headrace_backend.weights.checkpoint_files import CheckpointFiles, RowSpan
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement, Shard, WeightTarget
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_model_folder import InvalidModelFolder, TensorRecord

# Half a row of the long ones is as far from the next as is worth a read; of the short ones nothing
# is.
ROWS, LONG, SHORT = 6, 1 << 16, 1 << 12


class Folder:
    """The part of a ModelFolder that loading needs."""

    def __init__(self, path: pathlib.Path, weight: torch.Tensor) -> None:
        safetensors.torch.save_file({"w": weight}, path / "w.safetensors")
        offset = (path / "w.safetensors").stat().st_size - weight.nbytes
        self.weights_folder = path
        self.tensors = {"w": TensorRecord("w.safetensors", "F32", tuple(weight.shape), offset, weight.nbytes)}


class Reads:
    """Counts what is read of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self._preadv = os.preadv
        monkeypatch.setattr(checkpoint_files.os, "preadv", self._counted)

    def _counted(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = self._preadv(descriptor, buffers, offset)
        self.sizes.append(count)
        return count


def parts_of(folder: Folder, columns: int, world_size: int, reads: Reads) -> list[torch.Tensor]:
    """Each rank's columns; what `reads` has afterwards is the last rank's."""
    parts = []
    for rank in range(world_size):
        reads.sizes.clear()
        kept = Shard(rank, world_size).split(columns)
        part = torch.full((folder.tensors["w"].shape[0], len(kept)), torch.nan)
        target = WeightTarget.of(part, range(len(part)), kept)
        load_weights(folder, {"w": target}, ignore_progress)  # type: ignore[arg-type]  # as much of it as is needed
        parts.append(part)
    return parts


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_read_their_own_bytes_only_where_parts_lie_far_apart(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    weight, reads = torch.randn(ROWS, LONG), Reads(monkeypatch)
    parts = parts_of(Folder(tmp_path, weight), LONG, world_size, reads)
    assert torch.equal(torch.cat(parts, dim=1), weight)
    assert reads.sizes == ([weight.nbytes] if world_size == 1 else [parts[-1].nbytes // ROWS] * ROWS)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_parts_that_lie_close_are_cut_out_of_few_reads_of_bounded_size(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    weight, reads = torch.randn(200, SHORT), Reads(monkeypatch)
    parts = parts_of(Folder(tmp_path, weight), SHORT, world_size, reads)
    assert torch.equal(torch.cat(parts, dim=1), weight)
    assert sum(reads.sizes) <= weight.nbytes
    assert len(reads.sizes) == -(-weight.nbytes // (1 << 20)) and max(reads.sizes) <= 1 << 20


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), row_bytes=st.integers(2, 300), num_rows=st.integers(1, 20))
def test_any_part_is_the_same_whichever_way_it_is_read(
    tmp_path: pathlib.Path, data: st.DataObject, row_bytes: int, num_rows: int
) -> None:
    first = data.draw(st.integers(0, row_bytes - 1))
    span = RowSpan(row_bytes, first, data.draw(st.integers(1, row_bytes - first)))
    before = data.draw(st.integers(0, 9))
    rows = np.random.default_rng(0).integers(0, 256, (num_rows, row_bytes), np.uint8)
    # The file ends with the last part: nothing behind it is needed.
    (tmp_path / "f").write_bytes(bytes(before) + rows.tobytes()[: (num_rows - 1) * row_bytes + first + span.num_bytes])
    expected = torch.from_numpy(rows[:, first : first + span.num_bytes].copy()).flatten()
    for gap, scratch in ((0, 1), (1 << 20, 1), (1 << 20, 1000)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_files, "_LEAST_GAP_BYTES", gap)
            patch.setattr(checkpoint_files, "_SCRATCH_BYTES", scratch)
            files, found = CheckpointFiles(tmp_path), torch.empty(num_rows * span.num_bytes, dtype=torch.uint8)
            files.read_rows(found, before, span, "f", "w")
            files.close()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("gap", [0, 1 << 20])
def test_a_file_that_ends_within_a_part_is_named_whichever_way_it_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    monkeypatch.setattr(checkpoint_files, "_LEAST_GAP_BYTES", gap)
    (tmp_path / "f").write_bytes(bytes(10 * 100 - 51))
    files = CheckpointFiles(tmp_path)
    with pytest.raises(InvalidModelFolder, match="f: is truncated: tensor 'w' ends before byte 950"):
        files.read_rows(torch.empty(10 * 30, dtype=torch.uint8), 0, RowSpan(100, 20, 30), "f", "w")
    files.close()


def test_spans_are_the_columns_that_are_kept() -> None:
    assert RowSpan.of_columns(range(1024, 2048), (10, 4096), 4) == RowSpan(16384, 4096, 4096)
    assert RowSpan.of_columns(range(0, 4096), (10, 4096), 4).is_whole
    assert RowSpan.of_columns(None, (10,), 2) == RowSpan(2, 0, 2)


@pytest.mark.parametrize(
    ("row_bytes", "num_bytes", "is_apart"),
    [(8 << 10, 4 << 10, False), (28 << 10, 14 << 10, False), (112 << 10, 14 << 10, False),
     (256 << 10, 128 << 10, True), (448 << 10, 56 << 10, True)],
)  # fmt: skip
def test_parts_are_read_one_by_one_where_that_was_measured_to_be_faster(
    row_bytes: int, num_bytes: int, is_apart: bool
) -> None:
    assert RowSpan(row_bytes, 0, num_bytes).is_apart == is_apart


def test_rows_in_blocks_are_read_whole() -> None:
    weight = BlockLinearWeight((BlockKind.Q8_0,), (4,), 4096, Placement(torch.float32, torch.device("cpu")))
    target = WeightTarget(weight.destination(range(4)), range(2, 6), range(4096))
    row_bytes = 4096 // 32 * 34
    assert RowSpan.of(target, TensorRecord("w", "Q8_0", (10, 4096), 0, 10 * row_bytes)) == RowSpan(
        row_bytes, 0, row_bytes
    )
    plain = WeightTarget.of(torch.empty(4, 1024), range(2, 6), range(1024, 2048))
    assert RowSpan.of(plain, TensorRecord("w", "BF16", (10, 4096), 0, 10 * 8192)) == RowSpan(8192, 2048, 2048)
    assert RowSpan.of(plain, TensorRecord("w", "F32", (10, 4096), 0, 10 * 16384)) == RowSpan(16384, 4096, 4096)
