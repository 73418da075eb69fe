"""The layer that predicts the token after the next, as a drafter: exact, and it changes no answer.

On a CPU, on several ranks, and by the GPU's kernels in the interpreter. States and layer of the
oracle are transformers'.
"""

from __future__ import annotations

import functools
import pathlib

import pytest
import torch
from tests.support.gguf_writer import from_folder
from tests.support.kernel_case import DEVICES
from tests.support.mtp_models import MtpOracle, make_agreeing, write_mtp_model
from tests.support.quantized_folders import Quantized, Recipe, quantize_folder
from tests.support.rank_threads import on_ranks
from tests.worker.driver import MAX_MODEL_LEN
from tests.worker.speculation import head_drafting
from tests.worker.speculation.drafted_rows import run
from tests.worker.speculation.test_cpu_verification import OPTIONS, job
from tests.worker.speculation.test_draft_model import NUM_DRAFTS

from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import load_model
from headrace_backend.models.mtp_head import MtpBuild, MtpHead
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Schemes
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_model_folder import InvalidModelFolder, ModelFolder, open_mtp

OFF = Schemes()


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_mtp_model(tmp_path_factory.mktemp("models") / "glm")


@pytest.fixture(scope="session")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder whose layer behind the last one is always right."""
    path = write_mtp_model(tmp_path_factory.mktemp("models") / "agreeing")
    make_agreeing(path)
    return path


def build_of(config: object, records: object, shard: Shard, bits: Schemes, device: str) -> ModelBuild:
    where = torch.device("cpu" if device == "cpu" else "cuda:0")
    return ModelBuild(config, torch.float32, where, bits, shard, records, MAX_MODEL_LEN)  # type: ignore[arg-type]


def plain_of(path: pathlib.Path, shard: Shard = ALONE, bits: Schemes = OFF, device: str = "cpu") -> CausalLM:
    """The model of a folder, without its layer behind the last one."""
    folder = ModelFolder.open(path)
    return load_model(build_of(folder.config, folder.tensors, shard, bits, device), folder, lambda *_: None)


def pair_of(
    path: pathlib.Path, device: str = "cpu", shard: Shard = ALONE, bits: Schemes = OFF
) -> tuple[CausalLM, MtpHead]:
    """The model of a folder, and its layer beside it."""
    target = plain_of(path, shard, bits, device)
    layer = open_mtp(ModelFolder.open(path))
    build = MtpBuild(build_of(layer.config, layer.tensors, shard, bits._replace(head=None), device), 256)
    return target, build.loaded(layer, target, lambda *_: None, 0)


@pytest.fixture(scope="session")
def pair(path: pathlib.Path) -> tuple[CausalLM, MtpHead]:
    return pair_of(path)


@pytest.fixture(scope="session")
def plain(path: pathlib.Path) -> CausalLM:
    return plain_of(path)


@pytest.fixture(scope="session")
def oracle(path: pathlib.Path) -> MtpOracle:
    return MtpOracle(path)


def test_the_layer_drafts_what_transformers_layer_says(pair: tuple[CausalLM, MtpHead], oracle: MtpOracle) -> None:
    head_drafting.assert_drafts_are_the_oracles(pair, oracle)


def test_the_layer_of_a_gguf_file_drafts_the_same(
    path: pathlib.Path, oracle: MtpOracle, tmp_path: pathlib.Path
) -> None:
    """It stands behind the last layer, with copies of embedding and head that nobody reads."""
    gguf, _ = from_folder(path, "F32")
    file = gguf.write(tmp_path / "glm.gguf")
    head_drafting.assert_drafts_are_the_oracles(pair_of(file), oracle)
    gguf.tensors = {name: tensor for name, tensor in gguf.tensors.items() if not name.startswith("blk.2.")}
    with pytest.raises(InvalidModelFolder, match="nextn_predict_layers is 1, and the file has no tensors of a layer 2"):
        open_mtp(ModelFolder.open(gguf.write(file)))


@pytest.mark.slow  # Layers with other parts; that of every day has all of them.
@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_norm": False, "attention_bias": False},
        {"n_group": 2, "topk_group": 1, "n_shared_experts": 2},
        # Dense layers, the one behind the last among them.
        {"first_k_dense_replace": 9},
        {"tie_word_embeddings": True},
    ],
    ids=["bare", "groups", "dense", "tied"],
)
def test_layers_of_other_parts_draft_what_transformers_says(changes: dict[str, object], tmp_path: pathlib.Path) -> None:
    path = write_mtp_model(tmp_path / "glm", **changes)
    head_drafting.assert_drafts_are_the_oracles(pair_of(path), MtpOracle(path))


def test_prompts_in_chunks_and_behind_a_prefix_hit_draft_the_same(
    pair: tuple[CausalLM, MtpHead], oracle: MtpOracle
) -> None:
    head_drafting.assert_chunks_and_prefix_hits_draft_the_same(pair, oracle)


def test_blocks_that_are_copied_have_states_too(pair: tuple[CausalLM, MtpHead], oracle: MtpOracle) -> None:
    head_drafting.assert_copied_blocks_have_states(pair, oracle)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_the_layer_changes_no_answer(pair: tuple[CausalLM, MtpHead], plain: CausalLM, option: str) -> None:
    head_drafting.assert_no_answer_changes(pair, plain, option, 12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantized_cache_answers_as_without(pair: tuple[CausalLM, MtpHead], plain: CausalLM, kv_dtype: str) -> None:
    head_drafting.assert_no_answer_changes(pair, plain, "temperature", 16, kv_dtype)


@pytest.mark.parametrize("option", ["greedy", "temperature"])
def test_a_layer_that_knows_the_model_has_all_its_drafts_accepted(agreeing: pathlib.Path, option: str) -> None:
    jobs = [job(row, 31, **OPTIONS[option]) for row in (0, 2)]
    head_drafting.assert_drafts_are_accepted(pair_of(agreeing), plain_of(agreeing), jobs, 4.9)


@pytest.mark.parametrize("whole_experts", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["parts", "experts"])
def test_ranks_share_the_layer_and_draft_as_one(path: pathlib.Path, oracle: MtpOracle, whole_experts: bool) -> None:
    """Each has a part of the layer, the model's embedding and its output layer."""

    def drafted(shard: Shard) -> tuple[list[list[int]], list[tuple[int, int, list[int]]]]:
        if whole_experts:
            shard = Shard(shard.rank, shard.world_size, shard.collectives, whole_experts=True)
        runner, drafter = head_drafting.cpu_runner(*pair_of(path, shard=shard))
        found = run(runner, [job(row, 9) for row in (0, 2)], lambda: NUM_DRAFTS)
        if shard.rank == 0:
            head_drafting.assert_as_oracle(oracle, drafter, found)
        return [each.tokens for each in found], drafter.drafted

    first, second = on_ranks(2, drafted)
    assert first == second


@pytest.mark.slow  # Ranks share plain weights every day.
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("whole_experts", [False, True], ids=["parts", "experts"])
def test_ranks_that_quantize_draft_as_one(kind: str, whole_experts: bool, tmp_path: pathlib.Path) -> None:
    path = write_mtp_model(tmp_path / "glm", hidden_size=64, intermediate_size=128, moe_intermediate_size=64)
    bits = Schemes.named(kind, 32 if kind == "int4" else 0, "off" if kind == "int4" else kind)

    def drafted(shard: Shard) -> tuple[list[list[int]], list[tuple[int, int, list[int]]]]:
        if shard.world_size > 1 and whole_experts:
            shard = Shard(shard.rank, shard.world_size, shard.collectives, whole_experts=True)
        runner, drafter = head_drafting.cpu_runner(*pair_of(path, shard=shard, bits=bits))
        found = run(runner, [job(row, 9) for row in (0, 2)], lambda: NUM_DRAFTS)
        return [each.tokens for each in found], drafter.drafted

    assert on_ranks(2, drafted) == [drafted(ALONE)] * 2


def test_seeded_weights_draft_without_tensors(path: pathlib.Path) -> None:
    folder = ModelFolder.open(path, require_weights=False)
    layer = open_mtp(folder)
    target = load_model(build_of(folder.config, {}, ALONE, OFF, "cpu"), None, lambda *_: None)
    head = MtpBuild(build_of(layer.config, {}, ALONE, OFF, "cpu"), 256).loaded(None, target, lambda *_: None, 3)
    runner, drafter = head_drafting.cpu_runner(target, head)
    [found] = run(runner, [job(0, 9)], lambda: NUM_DRAFTS)
    assert len(found.tokens) >= 9 and all(found.ok) and drafter.drafted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("which", "batch_sizes", "kv_dtype"),
    # A small model's passes, padded, are drafted with every day (test_draft_model.py).
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("agreeing", (1, 2, 4, 8), "int8"), ("path", (), "auto"))
    ],
    ids=["right-padded", "random-exact"],
)
def test_a_gpus_passes_draft_what_a_cpus_draft(
    which: str, batch_sizes: tuple[int, ...], kv_dtype: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    folder: pathlib.Path = request.getfixturevalue(which)
    make = functools.partial(pair_of, folder)
    head_drafting.assert_a_gpu_drafts_what_a_cpu_drafts(make, plain_of(folder), device, batch_sizes, kv_dtype)


RECIPES = {
    "fp8": Recipe("fp8", bits=8, group=0),
    "packed": Recipe("packed", group=0),
    "gptq": Recipe("gptq", group=0),
    "awq": Recipe("awq", group=32, symmetric=False),
}


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder whose sizes hold groups and words."""
    path = tmp_path_factory.mktemp("models") / "wide"
    return write_mtp_model(path, intermediate_size=64, moe_intermediate_size=32)


def leave_plain(folder: Quantized, prefix: str) -> None:
    """Writes the numbers of some projections as plain weights."""
    for name in [name for name in folder.weights if name.startswith(prefix)]:
        for tensor in [each for each in folder.tensors if each.startswith(f"{name}.") and not each.endswith("bias")]:
            del folder.tensors[tensor]
        folder.tensors[f"{name}.weight"] = folder.weights[name].float()
    folder.rewrite()


def test_experts_of_the_layer_that_are_not_all_in_one_format_are_refused(
    wide: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    made = quantize_folder(wide, tmp_path, RECIPES["fp8"])
    leave_plain(made, "model.layers.2.mlp.experts.0.")
    with pytest.raises(InvalidModelFolder, match="are in different formats: experts of one layer"):
        open_mtp(ModelFolder.open(made.path))


@pytest.mark.parametrize("is_plain", [False, True], ids=["quantized", "plain"])
@pytest.mark.parametrize(
    "recipe", ["fp8", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "fp8")]
)
def test_folders_of_other_tools_have_the_layer_quantized_or_not(
    wide: pathlib.Path, recipe: str, is_plain: bool, tmp_path: pathlib.Path
) -> None:
    """Whatever config.json says of it: a layer's own tensors decide.

    The oracle has the numbers of the quantized folder in fp32. Experts never round their inputs,
    and no other layer does so here.
    """
    made = quantize_folder(wide, tmp_path, RECIPES[recipe])
    if is_plain:
        leave_plain(made, "model.layers.2.")
    pair = pair_of(made.path)
    assert bool(pair[1].low_bit_weights) != is_plain
    head_drafting.assert_drafts_are_the_oracles(pair, MtpOracle(made.plain))


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_the_layer_is_quantized_while_it_is_read_as_the_model_is(agreeing: pathlib.Path, kind: str) -> None:
    """What stands before it stays plain, and its drafts stay right."""
    bits = Schemes.named(kind, 0, "off")
    target, head = pair_of(agreeing, bits=bits)
    assert head.quantization is not None and head.quantization.worst_tensor.startswith("model.layers.2.")
    assert not any("eh_proj" in path or "router" in path for path in head.low_bit_weights)
    jobs = [job(row, 31) for row in (0, 2)]
    head_drafting.assert_drafts_are_accepted((target, head), plain_of(agreeing, bits=bits), jobs, 4.5)
