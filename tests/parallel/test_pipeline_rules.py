"""How layers are divided over pipeline stages, and what is refused before torch is loaded."""

from __future__ import annotations

import itertools
import pathlib

import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.demo_config import demo_config
from tests.support.examples import examples

from headrace_backend.config import EngineConfig
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.load import WeightMemory, weight_memory
from headrace_backend.pp_rules import Stage, stage_part, stages, unsuitable_pp
from headrace_backend.server.workers.rank_watch import behind
from headrace_backend.server.workers.readiness import together
from headrace_backend.step.messages import QuantizationReport, WorkerReady
from headrace_backend.step.rank_board import RankMark
from headrace_backend.worker.errors import DoesNotFit
from headrace_backend.worker.start_up.device import too_few_cards
from headrace_backend.worker.start_up.memory_plan import Room, model_memory, plan_estimate
from headrace_backend.worker.start_up.sizes import WorkerSizes

CPU = torch.device("cpu")
MIB = 1 << 20
MODEL = demo_config()


def config(pp: int, **values: object) -> EngineConfig:
    return EngineConfig.model_validate({"model": pathlib.Path("model"), "device": "cpu", "pp": pp, **values})


def layers_of(found: tuple[Stage, ...]) -> list[int]:
    """How many layers each stage has, which follow each other without a gap."""
    ends = [(stage.first_layer, stage.end_layer) for stage in found]
    assert ends[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    return [(end or 0) - first for first, end in ends]


def test_equal_layers_are_divided_evenly() -> None:
    # A vocabulary that weighs nothing.
    model = demo_config(num_hidden_layers=10, vocab_size=8)
    assert layers_of(stages(config(5), model)) == [2] * 5
    assert sorted(layers_of(stages(config(4), model))) == [2, 2, 3, 3]


def test_embedding_and_output_layer_count_as_layers_do() -> None:
    """A large vocabulary leaves the first and the last stage fewer layers."""
    model = demo_config(num_hidden_layers=12, vocab_size=40_000)
    first, *between, last = layers_of(stages(config(4), model))
    assert first == last == 1 and between == [5, 5]
    # Layers of 4 bits weigh a quarter beside the same embedding.
    assert layers_of(stages(config(2, quantize="int4"), demo_config(num_hidden_layers=12))) == [6, 6]


@settings(max_examples=examples(60), deadline=None)
@given(num_layers=st.integers(1, 12), pp=st.integers(1, 8), vocabulary=st.sampled_from([16, 4096, 40_000]))
def test_no_division_has_a_smaller_largest_stage(num_layers: int, pp: int, vocabulary: int) -> None:
    model = demo_config(num_hidden_layers=num_layers, vocab_size=vocabulary)
    if num_layers < pp:
        assert unsuitable_pp(config(pp), model) is not None
        return
    assert unsuitable_pp(config(pp), model) is None
    table = vocabulary * model.description.hidden_size
    layer = sum(linear.outputs * linear.inputs for linear in model.description.layers[0].linears)

    def largest(counts: list[int]) -> int:
        sizes = [count * layer for count in counts]
        sizes[0] += table
        sizes[-1] += table
        return max(sizes)

    every = (
        [end - first for first, end in itertools.pairwise((0, *ends, num_layers))]
        for ends in itertools.combinations(range(1, num_layers), pp - 1)
    )
    found = layers_of(stages(config(pp), model))
    assert min(found) >= 1 and sum(found) == num_layers
    assert largest(found) == min(map(largest, every))


def test_stages_together_have_every_tensor_once() -> None:
    """But for a tied embedding, which the last stage has for its output layer."""
    for tied in (True, False):
        described = demo_config(tie_word_embeddings=tied).description
        models = [
            ModelBuild(demo_config(tie_word_embeddings=tied), torch.float32, CPU, stage=stage).weightless_model()
            for stage in stages(config(3), demo_config(tie_word_embeddings=tied))
        ]
        names = [name for model in models for name in model.weight_targets()]
        expected = [name for name, _ in described.tensors()] + ["model.embed_tokens.weight"] * tied
        assert sorted(names) == sorted(expected)


def test_the_plan_knows_a_stages_layers_and_its_streams() -> None:
    """A middle stage has no embedding, no output layer and nothing to draw from."""
    found = stages(config(3), MODEL)
    planned = []
    for stage in found:
        sizes = WorkerSizes.of(config(3), 128, stage)
        weights = weight_memory(ModelBuild(MODEL, torch.float32, CPU, stage=stage))
        planned.append(model_memory(stage_part(MODEL.description, stage), sizes, weights, torch.float32))
    whole_sizes = WorkerSizes.of(config(1), 128)
    whole = model_memory(
        MODEL.description, whole_sizes, weight_memory(ModelBuild(MODEL, torch.float32, CPU)), torch.float32
    )
    table = 4 * MODEL.description.vocab_size * MODEL.description.hidden_size
    # Tied: the last stage has the table once more.
    assert sum(memory.weights for memory in planned) == whole.weights + table
    assert sum(memory.kv_block for memory in planned) == whole.kv_block
    step = 4 * whole_sizes.max_num_batched_tokens * MODEL.description.hidden_size
    assert [memory.streams for memory in planned] == [3 * step, 4 * step, step] and whole.streams == 0
    assert planned[0].activations == planned[1].activations < planned[2].activations == whole.activations


def test_a_stage_that_does_not_fit_says_what_its_streams_take() -> None:
    stage = stages(config(2), MODEL)[0]
    sizes = WorkerSizes.of(config(2), 128, stage)
    with pytest.raises(DoesNotFit, match=r"\+ streams between stages 6\.0 MiB \+ KV cache"):
        plan_estimate(
            sizes, stage_part(MODEL.description, stage), WeightMemory(100 * MIB), torch.float32, Room(CPU, 120 * MIB)
        )


def test_more_stages_than_layers_are_refused() -> None:
    assert unsuitable_pp(config(8), MODEL) is None
    found = unsuitable_pp(config(8), demo_config(num_hidden_layers=6))
    assert found == "pp is 8, and the model has 6 layers: pp of at most 6 works"


def test_more_ranks_than_a_machine_has_are_refused() -> None:
    assert config(2, tp=4).num_ranks == 8
    with pytest.raises(pydantic.ValidationError) as refused:
        config(4, tp=4)
    assert "pp is 4 and tp is 4, which are 16 ranks; one machine has at most 8: pp of at most 2 works with tp 4" in str(
        refused.value
    )


def test_more_ranks_than_cards_are_refused() -> None:
    assert too_few_cards(0, config(2, tp=2), MODEL, 4) is None
    assert too_few_cards(1, config(2, tp=2), MODEL, 4) == (
        "pp is 2 and tp is 2, one GPU for each of 4 ranks from cuda:1 on, and torch sees 4; pp times tp of at most 3 "
        "works"
    )


def test_ranks_of_other_stages_are_late_by_their_steps_alone() -> None:
    """Stages enter collectives of their own, of which the last one has none here."""
    marks = [RankMark(7, 30), RankMark(7, 30), RankMark(7, 4), RankMark(7, 4)]
    assert behind(marks, 2) == []
    marks[1] = RankMark(7, 29)
    assert behind(marks, 2) == [1]
    marks[2:] = [RankMark(6, 3), RankMark(6, 3)]
    assert behind(marks, 2) == [1, 2, 3]


def ready(num_blocks: int, quantization: QuantizationReport | None) -> WorkerReady:
    return WorkerReady("cpu", num_blocks, 16, 1000, {}, copy_bytes_per_s=1e9, quantization=quantization)


def test_stages_report_their_quantized_layers_together() -> None:
    first = QuantizationReport("int8", 0, 8.1, 0.010, 0.02, "model.layers.1.mlp.up_proj.weight", num_tensors=30)
    last = QuantizationReport("int8", 0, 8.1, 0.014, 0.03, "model.layers.9.mlp.up_proj.weight", num_tensors=10)
    last = QuantizationReport(
        **{name: getattr(last, name) for name in QuantizationReport.__struct_fields__ if name != "head_scheme"},
        head_scheme="fp8",
    )
    found = together([ready(50, first), ready(50, first), ready(40, last), ready(41, last)], 2)
    assert (found.num_blocks, found.copy_bytes_per_s) == (40, 4e9)
    report = found.quantization
    assert report is not None and report.mean_relative_error == pytest.approx(0.011)
    assert (report.worst_tensor, report.head_scheme, report.num_tensors) == (
        "model.layers.9.mlp.up_proj.weight",
        "fp8",
        40,
    )
    assert together([ready(50, None)], 1).quantization is None
