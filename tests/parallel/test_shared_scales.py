"""Int8 and fp8 of ranks are parts of one rank's to the bit, scales of whole rows included.

So it is wherever a row's largest magnitude lies; what that costs in reads is reported, and paid
only where it is needed.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import ignore_progress, write_checkpoint
from tests.models.test_pinned_loader import load_late
from tests.support.examples import examples
from tests.support.model_builds import load_model
from tests.support.rank_threads import ThreadCollectives, on_ranks

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization import low_bit_weight
from headrace_backend.quantization.low_bit_weight import QuantizedRows
from headrace_backend.quantization.shared_scales import LargestMagnitudes
from headrace_backend.weights import checkpoint_files
from headrace_backend.weights.placement import ALONE, Shard, WeightTarget
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, quantize_rows
from headrace_model_folder import InvalidModelFolder, ModelFolder

CPU = torch.device("cpu")
# Weights of layers whose inputs are shared out.
CUT = (".o_proj.weight", ".down_proj.weight")
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"

scheme_names = pytest.mark.parametrize("scheme", ["int8", "fp8"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder whose rows have their largest magnitude in other columns than the next row's.

    It lies in columns of other ranks, and is far larger than what the others have.
    """
    made = tmp_path_factory.mktemp("outliers")
    write_checkpoint(made, "llama-wide")
    tensors = safetensors.torch.load_file(made / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(CUT):
            rows, inputs = tensor.shape
            tensor[torch.arange(rows), (torch.arange(rows) * (inputs // 4) + 3) % inputs] = 5.0
            # One that a single rank has nothing but zeros of.
            tensor[7, : inputs // 2] = 0
    safetensors.torch.save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def load(path: pathlib.Path, scheme: str, shard: Shard = ALONE, **changes: Any) -> CausalLM:
    folder = ModelFolder.open(path)
    about = {"dtype": torch.float32, "device": CPU, "load": "folder", "seed": 3, "progress": ignore_progress}
    return load_model(folder, folder.config, **about | changes, scheme=Scheme.named(scheme, 32), shard=shard)


class Part:
    """What a rank has of one checkpoint tensor."""

    def __init__(self, target: WeightTarget) -> None:
        rows = target.destination
        assert isinstance(rows, QuantizedRows)
        outputs = slice(rows._outputs.start, rows._outputs.stop)
        self.numbers, self.scales = rows.weight.packed[outputs].float(), rows.weight.scales[outputs]
        self.rows, self.columns = target.rows, target.columns or range(0)


def parts(model: CausalLM) -> dict[str, Part]:
    """Parts of the layers' products."""
    targets = model.weight_targets().items()
    return {name: Part(target) for name, target in targets if isinstance(target.destination, QuantizedRows)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("source", "dtype"), [("folder", torch.float32), ("dummy", torch.bfloat16)])
@pytest.mark.parametrize("world_size", [2, 4])
@scheme_names
def test_numbers_and_scales_are_those_of_one_rank(
    path: pathlib.Path, scheme: str, world_size: int, source: Literal["folder", "dummy"], dtype: torch.dtype
) -> None:
    how = {"load": source, "dtype": dtype}
    whole = parts(load(path, scheme, **how))
    ranks = on_ranks(world_size, lambda shard: parts(load(path, scheme, shard, **how)))
    for rank in ranks:
        assert rank.keys() == whole.keys() and len(whole) == 3 * 7
        for name, part in rank.items():
            rows = slice(part.rows.start, part.rows.stop)
            assert torch.equal(part.scales, whole[name].scales[rows]), name
            columns = slice(part.columns.start, part.columns.stop)
            assert torch.equal(part.numbers, whole[name].numbers[rows, columns]), name
            assert (len(part.columns) < len(whole[name].columns)) == (name.endswith(CUT))


class Seen:
    """What is reported while a model is loaded."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, int, str]] = []

    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        self.reports.append((phase, done, total, unit))

    def phases(self) -> list[tuple[str, int, int, str]]:
        """The last report of each phase, in the order in which they begin; none goes back."""
        last: dict[str, tuple[str, int, int, str]] = {}
        for report in self.reports:
            assert report[:1] + report[2:] == last.setdefault(report[0], report)[:1] + last[report[0]][2:]
            assert report[1] >= last[report[0]][1] and report[0] == list(last)[-1]
            last[report[0]] = report
        return list(last.values())


@pytest.mark.parametrize("scheme", ["off", "int4", "nf4", "int8", "fp8"])
def test_ranks_meet_once_and_read_twice_only_what_has_scales_of_whole_rows(
    tmp_path: pathlib.Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small model's bytes are few.
    monkeypatch.setattr(checkpoint_files, "_UNIT", 1)
    write_checkpoint(tmp_path, "llama-blocks")
    sizes = {name: record.num_bytes for name, record in ModelFolder.open(tmp_path).tensors.items()}

    def loaded(shard: Shard) -> tuple[list[tuple[str, int, int, str]], int]:
        seen = Seen()
        load(tmp_path, scheme, shard, progress=seen)
        assert isinstance(shard.collectives, ThreadCollectives | None)
        return seen.phases(), shard.collectives.num_calls if shard.collectives else 0

    total, cut = sum(sizes.values()), sum(size for name, size in sizes.items() if name.endswith(CUT))
    first, second = ("scales", cut, cut, "MiB"), ("weights", total, total, "MiB")
    assert loaded(ALONE) == ([second], 0)
    expected = ([first, second], 1) if scheme in ("int8", "fp8") else ([second], 0)
    assert on_ranks(2, loaded) == [expected, expected]


@scheme_names
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_named_by_the_rank_that_finds_it(
    tmp_path: pathlib.Path, scheme: str, value: float
) -> None:
    write_checkpoint(tmp_path, "llama-wide")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors[DOWN_PROJ][5, -1] = value
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = rf"model\.safetensors: tensor '{DOWN_PROJ}' holds a value that is not finite"
    phases: dict[int, list[str]] = {}

    def loaded(shard: Shard) -> None:
        seen = Seen()
        try:
            load(tmp_path, scheme, shard, progress=seen)
        finally:
            phases[shard.rank] = [report[0] for report in seen.phases()]

    with pytest.raises(InvalidModelFolder, match=said):
        on_ranks(2, loaded)
    # In the first pass; the other rank, whose part is finite, did not go on without it.
    assert phases == {0: ["scales"], 1: ["scales"]}


@scheme_names
def test_a_part_that_is_packed_wrongly_is_refused_by_name(
    path: pathlib.Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where scales are larger than a part by itself would have, which rounding explains."""

    def broken(rows: torch.Tensor, target: QuantizedWeight, first_row: int, magnitudes: torch.Tensor | None) -> None:
        quantize_rows(rows, target, first_row, magnitudes)
        if magnitudes is not None:
            target.packed[first_row : first_row + len(rows)] = target.packed[first_row : first_row + len(rows)].roll(
                1, 1
            )

    monkeypatch.setattr(low_bit_weight, "quantize_rows", broken)
    with pytest.raises(QuantizationRefused, match=r"tensor 'model\.layers\.0\.self_attn\.o_proj\.weight' is not what"):
        on_ranks(2, lambda shard: load(path, scheme, shard))


@settings(max_examples=examples(12, least=4), deadline=None)
@given(
    piece_bytes=st.sampled_from([1, 300, 4097, 1 << 20]),
    num_readers=st.integers(1, 4),
    rank=st.integers(0, 3),
)
def test_magnitudes_come_through_pinned_buffers_in_pieces_of_any_size(
    path: pathlib.Path, piece_bytes: int, num_readers: int, rank: int
) -> None:
    model = on_ranks(4, lambda shard: load(path, "off", shard))[rank]
    stored = safetensors.torch.load_file(path / "model.safetensors")
    targets = {name: target for name, target in model.weight_targets().items() if name.endswith(CUT)}
    largest = {name: LargestMagnitudes(target.destination) for name, target in targets.items()}
    into = {name: dataclasses.replace(targets[name], destination=largest[name]) for name in targets}
    load_late(path, into, piece_bytes, num_readers)
    for name, target in targets.items():
        assert target.columns is not None
        kept = stored[name][:, target.columns.start : target.columns.stop]
        assert torch.equal(largest[name].found, kept.abs().amax(1))
