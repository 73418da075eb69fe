"""The demo model's training loop.

Rows are read as they appear, both row lengths occur from the start, rates end at zero.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "demo" / "scripts"))

import train  # noqa: E402
from demo_model import DemoModel, ModelShape  # noqa: E402
from demo_shards import ROW_TOKENS, SPOKEN_BIT, shard_path  # noqa: E402

TINY = ModelShape(64, 32, 64, 1, 1, 1)


def _write_shard(folder: Path, index: int, rows: int = 4) -> None:
    shard = numpy.full((rows, ROW_TOKENS + 1), index + 8, dtype=numpy.uint16) | numpy.uint16(SPOKEN_BIT)
    numpy.save(shard_path(folder, index), shard)


def test_earlier_shards_are_read_again_while_the_next_is_still_written(tmp_path: Path) -> None:
    ready = train.FRESH_SHARDS
    for index in range(ready):
        _write_shard(tmp_path, index)
    rows = train.Rows(tmp_path, ready + 1, seed=1)
    batches = rows.batches(4)
    first = [int(next(batches)[0, 0]) & (SPOKEN_BIT - 1) for _ in range(ready + 5)]
    assert first[:ready] == [index + 8 for index in range(ready)]
    assert set(first[ready:]) <= set(first[:ready])
    assert rows.repeated == 5
    _write_shard(tmp_path, ready)
    assert int(next(batches)[0, 0]) & (SPOKEN_BIT - 1) == ready + 8


def test_both_row_lengths_are_trained_on_from_the_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_shard(tmp_path, 0)
    monkeypatch.setattr(train, "FRESH_SHARDS", 1)
    schedule = train.Schedule(seconds=600, max_steps=8, batch_rows=2, warmup_steps=1)
    model = DemoModel(TINY)
    lengths: list[int] = []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        lengths.append(batch.shape[1] - 1)
        return sum((parameter.float().pow(2).sum() for parameter in model.parameters()), torch.zeros(()))

    record = train.train(model, loss, train.Rows(tmp_path, 1, seed=1), schedule, "test")
    assert lengths == [1024, 1024, 1024, 2048] * 2
    assert record["steps"] == 8


def test_joined_rows_keep_every_token_of_both_but_one() -> None:
    batch = torch.arange(4 * (ROW_TOKENS + 1)).reshape(4, -1)
    joined = train.join_pairs(batch)
    assert joined.shape == (2, 2 * ROW_TOKENS + 1)
    assert torch.equal(joined[0], torch.cat((batch[0, :-1], batch[1])))


def test_the_rate_warms_up_stays_and_falls_to_zero() -> None:
    schedule = train.Schedule(seconds=60, max_steps=100, batch_rows=2, warmup_steps=10, decay_share=0.5)
    assert train.rate_factor(schedule, 0, 0.0) == pytest.approx(0.1)
    assert train.rate_factor(schedule, 50, 0.5) == 1.0
    assert train.rate_factor(schedule, 75, 0.75) == pytest.approx(0.5)
    assert train.rate_factor(schedule, 100, 1.0) == 0.0
