"""How many tokens of a row a worker's steps settle at most, and which batches have graphs."""

from __future__ import annotations

import json
import pathlib
from unittest import mock

import pytest
import torch
from benchmarks.shapes import write_model_folder

from headrace_backend.config import EngineConfig
from headrace_backend.worker.channel import RankLinks
from headrace_backend.worker.start_up.fitted_runner import Phases
from headrace_backend.worker.start_up.sizes import fitting_tokens_per_row
from headrace_backend.worker.start_up.start import WorkerStart
from headrace_backend.worker.step.shape import drafted_totals
from headrace_model_folder import ModelFolder


@pytest.mark.parametrize(
    ("shape", "num_kv_heads", "tokens", "most"),
    [
        ("llama-3.1-8b", 8, "auto", 9),
        ("gpt-oss-20b", 8, "auto", 9),
        # 16 query tokens of 16 heads are more rows than the decode kernel holds.
        ("llama-3.1-8b", 2, "auto", 8),
        ("llama-3.1-8b", 2, "8", 9),
        # A state for each draft.
        ("qwen3.5-9b", 4, "auto", 8),
        ("qwen3.5-9b", 4, "3", 4),
    ],
)
def test_auto_drafts_as_many_as_the_decode_kernel_takes(
    shape: str, num_kv_heads: int, tokens: str, most: int, tmp_path: pathlib.Path
) -> None:
    folder = write_model_folder(shape, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": num_kv_heads}))
    model = ModelFolder.open(folder, require_weights=False).config
    settings = EngineConfig(model=folder, speculate="ngram", speculate_tokens=tokens)
    assert fitting_tokens_per_row(settings, model) == most
    assert fitting_tokens_per_row(EngineConfig(model=folder), model) == 1


def test_graphs_of_drafts_are_of_steps_that_launches_would_lengthen() -> None:
    totals = drafted_totals((1, 2, 4, 64, 256), 9)
    assert {2, 9, 18, 36, 576} <= set(totals) and 320 in totals
    assert max(totals) <= 1024 and 9 * 256 not in totals
    assert drafted_totals((1,), 5) == [5]


@pytest.mark.parametrize(
    ("shape", "setting", "few"),
    [
        ("qwen3-30b-a3b", "auto", [*range(1, 9), 10, 12, 14]),
        ("llama-3.1-8b", "auto", [1, 2, 4, 8]),
        ("qwen3-30b-a3b", "1,2", [1, 2]),
    ],
)
def test_a_worker_of_a_mixture_has_graphs_of_few_rows(
    shape: str, setting: str, few: list[int], tmp_path: pathlib.Path
) -> None:
    path = write_model_folder(shape, tmp_path)
    # The CPU has no graphs, so that others than auto are refused there.
    config = EngineConfig(model=path, load="dummy", device="cpu", graph_sizes=setting, max_num_seqs=64)
    with mock.patch("headrace_backend.worker.start_up.start._prepared_device", lambda *_: torch.device("cpu")):
        start = WorkerStart(config, ModelFolder.open(path, require_weights=False), mock.Mock(), Phases({}), RankLinks())
    sizes = start._sizes
    assert [size for size in sizes.batch_graphs if size < 16] == few
    smaller = sizes.with_steps(2048, 32).batch_graphs
    assert setting != "auto" or [size for size in smaller if size < 16] == few
