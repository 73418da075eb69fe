"""Which numbers of ranks suit a model, a machine and each other.

Refused with the reason and the sizes that work.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.demo_config import demo_config
from tests.support.model_builds import weight_memory
from tests.support.quantized_folders import Recipe
from tests.support.running_server import DEMO

from headrace_backend.config import EngineConfig
from headrace_backend.parallel.rendezvous import Greeting, MixedRanks, Seat, join
from headrace_backend.server.workers.rank_watch import behind
from headrace_backend.step.rank_board import RankBoard, RankMark, create_board
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_backend.weights.placement import Shard
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_backend.worker.start_up.device import too_few_cards
from headrace_model_folder import ModelConfig, ModelFolder
from headrace_model_folder.formats.quantization_config import read_quantization

# 8 heads, 4 key/value heads, 704 inner, 4,096 tokens.
MODEL = ModelFolder.open(DEMO, require_weights=False).config
CPU = torch.device("cpu")


def config(tp: int, **settings: object) -> EngineConfig:
    return EngineConfig(model=pathlib.Path("m"), device="cpu", tp=tp, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tp", "changes", "reason"),
    [
        (3, {}, "tp is 3, which does not divide num_attention_heads 8; tp 1, 2, 4, 8 work"),
        (4, {"intermediate_size": 702}, "tp is 4, which does not divide intermediate_size 702; tp 1, 2 work"),
        (4, {"vocab_size": 5}, "tp is 4, which leaves a rank none of the 5 tokens of vocab_size; tp 1, 2 work"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "tp is 4, which neither divides num_key_value_heads 6 nor is a multiple of it; tp 1, 2 work",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tp: int, changes: dict[str, int], reason: str) -> None:
    assert unsuitable_tp(config(tp), demo_config(**changes)) == reason


def test_whole_experts_of_a_model_without_experts_are_refused() -> None:
    said = unsuitable_tp(config(2, expert_parallel=True), MODEL)
    assert said is not None and said.startswith("expert_parallel is set, and the model has no experts")


def test_files_in_blocks_are_shared_where_blocks_end() -> None:
    said = unsuitable_tp(config(2), dataclasses.replace(MODEL, shared_blocks=(64, 64)))
    assert said == (
        "tp is 2, which leaves each rank 352 of down_proj's 704 inputs, and a block of 64 does not divide those; "
        "tp 1 works"
    )
    mixed = dataclasses.replace(MODEL, shared_blocks=(256, 32))
    said = unsuitable_tp(config(2), mixed)
    assert said is not None and "each rank 128 of o_proj's 256 inputs, and a block of 256 does not divide" in said
    assert unsuitable_tp(config(2), dataclasses.replace(MODEL, shared_blocks=(128, 32))) is None
    assert unsuitable_tp(config(1), mixed) is None


def folder_of(recipe: Recipe, **changes: object) -> ModelConfig:
    """The demo model as another tool would quantize it."""
    plain = demo_config(**changes)
    found = read_quantization(recipe.config(), [linear.name for linear in plain.description.linears])
    assert found is not None
    if recipe.ordered:
        layers = {name: dataclasses.replace(form, order_digest="1") for name, form in found.layers.items()}
        found = dataclasses.replace(found, layers=layers)
    return dataclasses.replace(plain, quantization=found)


@pytest.mark.parametrize(
    ("tp", "recipe", "changes", "reason"),
    [
        # 352 and 176 inner columns: groups of 32, as large as their pieces can be, and half of one.
        (
            4,
            Recipe("gptq"),
            {},
            "mlp.down_proj does not bear: its 704 inputs give 176 to each, which a smallest group of 32 does not "
            "divide; tp 1, 2 work",
        ),
        (
            2,
            Recipe("fp8", bits=8, group=128),
            {},
            "mlp.down_proj does not bear: its 704 inputs give 352 to each, which a block of 128 does not divide; tp 1 "
            "works",
        ),
        (
            2,
            Recipe("packed", ordered=True),
            {},
            "self_attn.o_proj does not bear: its 256 inputs are in an order of groups (act-order), and a group's would "
            "lie on several ranks; tp 1 works",
        ),
        (
            8,
            Recipe("packed", group=0),
            {"intermediate_size": 720},
            "mlp.down_proj does not bear: its 720 inputs give 90 to each, which a word of 8 does not divide; tp 1, 2 "
            "work",
        ),
        (
            4,
            Recipe("awq", group=0, symmetric=False),
            {"intermediate_size": 720},
            "mlp.gate_proj does not bear: its 720 outputs give 180 to each, which a word of 8 does not divide; tp 1, 2 "
            "work",
        ),
    ],
)
def test_folders_are_shared_where_words_groups_and_blocks_end(
    tp: int, recipe: Recipe, changes: dict[str, object], reason: str
) -> None:
    said = unsuitable_tp(config(tp), folder_of(recipe, **changes))
    assert said is not None and said.startswith(f"tp is {tp}, which model.layers.0.") and said.endswith(reason), said


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_scales_of_outputs_or_tensors_need_no_groups(tp: int) -> None:
    for recipe in (Recipe("fp8", bits=8, group=0), Recipe("whole", bits=8, group=-1), Recipe("whole", bits=8, group=0)):
        assert unsuitable_tp(config(tp), folder_of(recipe)) is None


def test_key_value_heads_may_be_fewer_than_ranks() -> None:
    assert unsuitable_tp(config(8), MODEL) is None
    part = rank_part(MODEL.description, 8)
    assert (part.attention.num_heads, part.attention.num_kv_heads, part.vocab_size) == (1, 1, 4096)
    assert {layer.mlp.inner for layer in part.layers} == {88}
    layer = part.layers[0]
    assert [(linear.outputs, linear.inputs) for linear in layer.linears] == [
        *((32, 256), (32, 256), (32, 256), (256, 32)),
        *((88, 256), (88, 256), (256, 88)),
    ]


def test_groups_that_straddle_ranks_are_refused_with_what_works() -> None:
    said = unsuitable_tp(config(2, quantize="int4", quantize_group=64), MODEL)
    assert said is not None
    assert "which leaves each rank 352 of down_proj's 704 inputs, and quantize_group 64 does not divide those" in said
    assert said.endswith("; tp 1 works, quantize_group 32 works with tp 2")
    assert unsuitable_tp(config(2, quantize="int4", quantize_group=32), MODEL) is None
    assert unsuitable_tp(config(2, quantize="int8"), MODEL) is None


def test_blocks_of_nf4_that_straddle_ranks_are_refused() -> None:
    said = unsuitable_tp(config(2, quantize="nf4"), MODEL)
    assert said is not None
    assert "which leaves each rank 352 of down_proj's 704 inputs, and NF4's block of 64 does not divide those" in said
    assert said.endswith("; tp 1 works")
    assert unsuitable_tp(config(2, quantize="nf4"), demo_config(intermediate_size=768)) is None


@given(
    tp=st.integers(1, 8),
    heads=st.integers(1, 12),
    kv=st.integers(1, 12),
    inner=st.integers(1, 16).map(lambda n: 16 * n),
    vocabulary=st.integers(1, 64),
    scheme=st.sampled_from(["off", "int4", "nf4"]),
)
def test_what_is_not_refused_can_be_built_and_the_rest_can_not(
    tp: int, heads: int, kv: int, inner: int, vocabulary: int, scheme: str
) -> None:
    heads_of = {"num_attention_heads": heads * kv, "num_key_value_heads": kv, "head_dim": 16}
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": inner, "vocab_size": vocabulary}
    model = demo_config(**heads_of, **sizes)
    settings = config(tp, quantize=scheme, **({"quantize_group": 32} if scheme == "int4" else {}))
    assert (unsuitable_tp(settings, model) is None) == (tp == 1 or can_be_built(model, tp, settings))


def can_be_built(model: ModelConfig, tp: int, settings: EngineConfig) -> bool:
    try:
        for rank in range(tp):
            scheme = Scheme.named(settings.quantize, settings.quantize_group)
            weight_memory(model, torch.float32, scheme, CPU, Shard(rank, tp))
    except (ValueError, QuantizationRefused):
        return False
    return True


def test_more_ranks_than_cards_are_refused() -> None:
    assert too_few_cards(0, config(4), MODEL, 4) is None
    assert too_few_cards(2, config(2), MODEL, 4) is None
    reason = "tp is 4, one GPU for each rank from cuda:2 on, and torch sees 4; tp 1, 2 work"
    assert too_few_cards(2, config(4), MODEL, 4) == reason
    # Three cards, of which three ranks can't make use.
    said = too_few_cards(0, config(4), MODEL, 3)
    assert said is not None and said.endswith("and torch sees 3; tp 1, 2 work")
    said = too_few_cards(3, config(4), MODEL, 4)
    assert said is not None and said.endswith("; tp 1 works")


def test_devices_of_different_kinds_are_refused_by_every_rank() -> None:
    store = os.memfd_create("store")
    said: list[str] = []

    def come(rank: int, kind: str) -> None:
        with pytest.raises(MixedRanks) as refused:
            join(Seat(rank, 2, store), CPU, Greeting(kind, lambda *_: None, lambda: None, lambda: None))
        said.append(str(refused.value))

    ranks = [threading.Thread(target=come, args=place) for place in enumerate(("NVIDIA H100", "NVIDIA H200"))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    # The refusals hold the frames with the stores in them, and a store that can't open its file any
    # more when it is freed ends the process.
    gc.collect()
    os.close(store)
    expected = "ranks need devices of one kind, and have rank 0: NVIDIA H100; rank 1: NVIDIA H200"
    assert said == [expected, expected]


def test_the_board_shows_who_is_behind() -> None:
    descriptor = create_board(3)
    board = RankBoard(descriptor, 3)
    lines = [RankBoard(descriptor, 3).line(rank) for rank in range(3)]
    os.close(descriptor)
    assert board.marks() == [RankMark(0, 0)] * 3 and behind(board.marks(), 3) == []
    for line in (lines[0], lines[2]):
        line.begin_step(7)
        line.enter_collective()
        line.enter_collective()
    lines[1].begin_step(7)
    lines[1].enter_collective()
    assert board.marks() == [RankMark(7, 2), RankMark(7, 1), RankMark(7, 2)]
    assert behind(board.marks(), 3) == [1]
    before = board.progress()
    assert board.progress() == before
    lines[2].make_progress()
    assert board.progress() != before and behind(board.marks(), 3) == [1]
    board.close()
