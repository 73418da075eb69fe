"""Which models may draft: refused by name, with both sides' numbers, before weights are read."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.eagle_heads import head_config, random_head, write_head
from tests.support.mtp_models import write_mtp_model
from tests.support.running_server import DEMO

from headrace_backend.config import EngineConfig
from headrace_backend.draft_rules import unsuitable_draft
from headrace_backend.layers.rotary import RotaryTable
from headrace_backend.tp_rules import rank_part
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.start_up.draft_model import DraftingBuild, EagleBuild, MtpDraftBuild, drafting_build
from headrace_backend.worker.start_up.memory_plan import model_memory
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_model_folder import ModelFolder

DRAFT = DEMO / "draft"


@pytest.fixture(scope="module")
def target() -> ModelFolder:
    return ModelFolder.open(DEMO)


def reason(target: ModelFolder, draft: pathlib.Path, **engine: Any) -> str | None:
    config = EngineConfig(model=DEMO, draft_model=draft, speculate="draft", **engine)
    return unsuitable_draft(config, target)


def changed(path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """The demo's draft model with other fields in its config.json, as a folder without weights."""
    shutil.copytree(DRAFT, path)
    config = json.loads((DRAFT / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "model.safetensors").unlink()
    return path


def table_bytes(build: DraftingBuild) -> int:
    """Bytes of the rotary tables that a head holds once it is made."""
    assert isinstance(build, EagleBuild | MtpDraftBuild)
    modules = build.build.empty_head().modules()
    return sum(module.table.nbytes for module in modules if isinstance(module, RotaryTable))


def test_the_demo_pair_suits(target: ModelFolder) -> None:
    assert reason(target, DRAFT) is None
    assert unsuitable_draft(EngineConfig(model=DEMO), target) is None


def test_another_vocabulary_is_refused_with_both_sizes(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    larger = changed(tmp_path / "larger", vocab_size=5000)
    assert reason(target, larger, load="dummy") == (
        "draft_model larger: has a vocabulary of 5000 tokens, and the model has one of 4096; they must be the same"
    )


def test_a_draft_model_with_states_is_refused(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "full_attention_interval": 2}
    recurrent = changed(tmp_path / "recurrent", architectures=["Qwen3_5ForCausalLM"], **linear)
    assert reason(target, recurrent, load="dummy") == (
        "draft_model recurrent: has recurrent layers (Qwen3_5ForCausalLM), whose states do not go back where a draft "
        "is rejected"
    )


def test_a_draft_model_of_uneven_layers_is_refused(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    heads = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 64, "hidden_size_per_layer_input": 0}
    fields = {"hidden_activation": "gelu_pytorch_tanh", "rope_parameters": None, "rope_scaling": None}
    uneven = changed(tmp_path / "uneven", architectures=["Gemma4ForCausalLM"], **heads, **fields)
    said = reason(target, uneven, load="dummy")
    assert said is not None
    assert said.startswith("draft_model uneven: has layers (Gemma4ForCausalLM) whose keys and values differ in size")


def test_the_same_ids_with_other_meanings_are_refused_with_both_hashes(
    target: ModelFolder, tmp_path: pathlib.Path
) -> None:
    swapped = changed(tmp_path / "swapped")
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.__getitem__)[1000:1002]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = reason(target, swapped, load="dummy")
    assert target.token_table is not None and said is not None
    assert said.startswith("draft_model swapped: its tokenizer has another vocabulary (4096 tokens, hash ")
    assert said.endswith(f"than the model's (4096 tokens, hash {target.token_table.digest()})")


def test_a_draft_model_without_a_tokenizer_is_refused(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    mute = changed(tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    assert reason(target, mute, load="dummy") == (
        "draft_model mute: has no tokenizer.json, by which its vocabulary is compared with the model's"
    )


def test_a_shorter_context_is_refused_unless_sequences_are_as_short(
    target: ModelFolder, tmp_path: pathlib.Path
) -> None:
    short = changed(tmp_path / "short", max_position_embeddings=512)
    assert reason(target, short, load="dummy") == (
        "draft_model short: has a context of 512 tokens, and sequences have up to 2048: max_model_len of at most 512 "
        "works"
    )
    assert reason(target, short, load="dummy", max_model_len=512) is None


def test_a_folder_that_is_none_is_refused_as_such(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    assert reason(target, tmp_path / "nowhere") == f"draft_model: {tmp_path / 'nowhere'}: no such model folder"
    broken = changed(tmp_path / "broken")
    said = reason(target, broken)
    assert said is not None and said.startswith("draft_model: ") and "safetensors" in said


def test_bits_that_do_not_suit_are_refused_by_the_name_of_the_setting(
    target: ModelFolder, tmp_path: pathlib.Path
) -> None:
    packed = changed(
        tmp_path / "packed", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    )
    said = reason(target, packed, load="dummy", draft_quantize="int8")
    assert said is not None
    assert "draft_quantize is int8, and the folder is quantized already (gptq); draft_quantize off works" in said


def test_ranks_that_do_not_divide_a_shared_draft_model_are_refused(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    narrow = changed(tmp_path / "narrow", num_attention_heads=3, num_key_value_heads=3, head_dim=32)
    assert reason(target, narrow, load="dummy", tp=2) is None
    assert reason(target, narrow, load="dummy", tp=2, draft_sharing="whole") is None
    said = reason(target, narrow, load="dummy", tp=2, draft_sharing="shared")
    assert said is not None and said.startswith("draft_model narrow: draft_sharing is shared, and tp is 2, ")
    assert said.endswith("draft_sharing whole works too")


def test_sharing_is_for_draft_models_alone() -> None:
    with pytest.raises(ValueError, match="draft_sharing is shared, and speculate is ngram: it is for the draft model"):
        EngineConfig(model=DEMO, speculate="ngram", draft_sharing="shared")


def head_folder(path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A head for the demo, whose sizes are other ones by `changes` of its target's."""
    target = json.loads((DEMO / "config.json").read_text()) | changes.pop("target", {})
    config = head_config(target, 1024, changes.pop("layers", (2, 4, 5)))
    return write_head(path, config, random_head(config | changes))


def head_reason(target: ModelFolder, head: pathlib.Path) -> str | None:
    return unsuitable_draft(EngineConfig(model=DEMO, draft_model=head, speculate="eagle"), target)


def test_a_head_of_the_models_sizes_suits(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    assert head_reason(target, head_folder(tmp_path / "head")) is None


def test_a_head_for_another_model_is_refused_with_both_sizes(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    wide = head_folder(tmp_path / "wide", target={"hidden_size": 512})
    assert head_reason(target, wide) == ("draft_model wide: is for a model of hidden_size 512, and the model's is 256")
    other = head_folder(tmp_path / "other", target={"vocab_size": 5000})
    assert head_reason(target, other) == (
        "draft_model other: is for a vocabulary of 5000 tokens, and the model has one of 4096; they must be the same"
    )
    deep = head_folder(tmp_path / "deep", layers=(2, 16, 29))
    assert head_reason(target, deep) == (
        "draft_model deep: reads the streams that enter layers 2, 16, 29, and the model has layers 0 to 7; "
        "eagle_aux_hidden_state_layer_ids in the head's config.json names them"
    )


def test_a_head_of_another_width_needs_an_embedding(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    sizes = json.loads((DEMO / "config.json").read_text()) | {"hidden_size": 128}
    config = head_config(sizes, 1024, (2, 4, 5), target_hidden_size=256)
    tensors = random_head(config)
    bare = write_head(tmp_path / "bare", config, tensors)
    assert head_reason(target, bare) == (
        "draft_model bare: has no embedding, and the model's has 256 elements a token where the head has 128"
    )
    own = write_head(tmp_path / "own", config, tensors | {"embed_tokens.weight": torch.zeros(4096, 128)})
    assert head_reason(target, own) is None


def test_a_heads_memory_is_its_weights_the_streams_and_a_state_beside_each_key(
    target: ModelFolder, tmp_path: pathlib.Path
) -> None:
    head = head_folder(tmp_path / "head")
    config = EngineConfig(model=DEMO, draft_model=head, speculate="eagle", max_num_batched_tokens=64, device="cpu")
    sizes = WorkerSizes.of(config, 128)
    build = drafting_build(config, target, sizes, torch.float32, torch.device("cpu"), Schemes(), ALONE)
    assert build is not None
    draft = build.memory()
    numbers = sum(
        tensor.numel()
        for name, tensor in random_head(json.loads((head / "config.json").read_text())).items()
        if name.endswith("weight")
    )
    assert draft.weights == (4 * numbers, 64 * 3 * 256 * 4)
    about = (target.config.description, sizes, draft.weights._replace(weights=0, scratch=0), torch.float32, False)
    with_head, alone = model_memory(*about, draft), model_memory(*about)
    # Keys and values of 4 heads of 32, and 256 numbers of a state.
    assert with_head.kv_block - alone.kv_block == config.block_size * 4 * (2 * 4 * 32 + 256)
    assert with_head.weights - alone.weights == 4 * numbers
    assert with_head.activations - alone.activations >= draft.weights.scratch
    assert with_head.rotary - alone.rotary == table_bytes(build)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model whose folder has its MTP layer."""
    return write_mtp_model(tmp_path_factory.mktemp("models") / "glm")


def mtp_reason(path: pathlib.Path, **engine: Any) -> str | None:
    folder = ModelFolder.open(path, require_weights=engine.get("load") != "dummy")
    return unsuitable_draft(EngineConfig(model=path, speculate="mtp", **engine), folder)


def test_a_model_with_its_layer_suits_whatever_ranks_and_bits(glm: pathlib.Path) -> None:
    assert mtp_reason(glm) is None
    assert mtp_reason(glm, load="dummy") is None
    assert mtp_reason(glm, tp=2, expert_parallel=True, quantize="int8") is None


def test_a_model_without_the_layer_is_refused(target: ModelFolder) -> None:
    assert unsuitable_draft(EngineConfig(model=DEMO, speculate="mtp"), target) == (
        "speculate is mtp, and the model (LlamaForCausalLM) has no MTP layer to draft with: that of "
        "Glm4MoeForCausalLM is read, where num_nextn_predict_layers in config.json is 1, and that of Qwen3.5, where "
        "mtp_num_hidden_layers is 1 and mtp_use_dedicated_embeddings is not true"
    )


def test_a_folder_that_lacks_the_layer_is_refused_where_it_is_to_draft(
    glm: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bare = pathlib.Path(shutil.copytree(glm, tmp_path / "bare"))
    tensors = {name: each for name, each in load_file(glm / "model.safetensors").items() if ".layers.2." not in name}
    save_file(tensors, bare / "model.safetensors")
    assert mtp_reason(bare) == (
        "speculate is mtp, and the model's folder has no MTP layer that can be read: config.json announces an MTP "
        "layer (num_nextn_predict_layers or mtp_num_hidden_layers is 1), and the folder has no tensors model.layers.2.*"
    )
    assert unsuitable_draft(EngineConfig(model=bare), ModelFolder.open(bare)) is None


def test_a_layer_that_does_not_bear_the_bits_or_ranks_is_refused(tmp_path: pathlib.Path) -> None:
    """The model's own layers are dense here, and the one behind them has experts."""
    path = write_mtp_model(tmp_path / "glm", first_k_dense_replace=2, intermediate_size=64, moe_intermediate_size=17)
    said = mtp_reason(path, tp=2)
    assert said is not None
    assert said.startswith(
        "speculate is mtp, and the MTP layer does not suit: tp is 2, which does not divide the inner"
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_layers_memory_is_a_ranks_part_of_it_and_of_its_keys_and_every_state(
    glm: pathlib.Path, num_ranks: int
) -> None:
    config = EngineConfig(model=glm, speculate="mtp", max_num_batched_tokens=64, device="cpu", tp=num_ranks)
    folder, sizes = ModelFolder.open(glm), WorkerSizes.of(config, 128)
    shard = Shard(0, num_ranks)
    build = drafting_build(config, folder, sizes, torch.float32, torch.device("cpu"), Schemes(), shard)
    assert build is not None
    draft = build.memory()
    own = {name: each for name, each in load_file(glm / "model.safetensors").items() if ".layers.2." in name}
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    numbers = {name: each.numel() for name, each in own.items() if not name.endswith(copies)}
    # Rank 0 has half of each projection that ranks share, with half of its bias.
    shared = sum(size for name, size in numbers.items() if re.search(r"(q|k|v|o|gate|up|down)_proj", name))
    assert draft.weights == (4 * (sum(numbers.values()) - shared + shared // num_ranks), 64 * 32 * 4)
    part = rank_part(folder.config.description, num_ranks)
    about = (part, sizes, draft.weights._replace(weights=0, scratch=0), torch.float32, False)
    with_layer, alone = model_memory(*about, draft), model_memory(*about)
    # Keys and values of the rank's heads of 16, and 32 numbers of a state.
    assert with_layer.kv_block - alone.kv_block == config.block_size * 4 * (2 * 2 // num_ranks * 16 + 32)
    assert with_layer.rotary - alone.rotary == table_bytes(build)
