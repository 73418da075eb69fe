"""The traces are those that every engine was measured with.

Shapes and tokenizer are what they say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import random

import numpy as np
import pytest
import torch
from benchmarks import weight_files
from benchmarks.shapes import SHAPES, Shape, shape_of, write_model_folder
from benchmarks.synthetic_tokenizer import FIRST_WORD, NUM_SPECIAL, as_words
from benchmarks.workloads import LONG_PROMPT_TOKENS, WORKLOADS, Trace, build, fitted
from tests.support.model_builds import load_model
from tokenizers import Tokenizer

from headrace_kernels.weight_formats.quantized_weight import QuantKind, dequantize
from headrace_model_folder import ModelFolder

# Of the traces that the rival engines were measured with: they must never change.
HASHES = {
    ("single", 0): "83bc19127544e187",
    ("burst256", 0): "1686f0921a39b164",
    ("mix1000", 0): "697c80ac3d9065ab",
    ("prefill8k", 0): "4205aacd913cfc7d",
    ("longctx", 0): "94b83bdf0cc8f04d",
    ("poisson15", 0): "64a28005996b001f",
    ("single", 5): "226bcef1f04afc34",
    ("mix1000", 5): "85225d8fbe5c20e4",
}
# Parameters as the models' makers state them.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "demo": 6_951_168,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-9b": 8_953_803_264,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def digest(trace: Trace) -> str:
    return hashlib.sha256(repr([(list(prompt), output) for prompt, output in trace]).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("name", "seed"), HASHES)
def test_traces_are_those_of_every_comparison(name: str, seed: int) -> None:
    assert digest(build(name, seed).trace) == HASHES[name, seed]


def test_poisson_arrivals_are_those_of_every_comparison() -> None:
    rng, arrivals = random.Random(0), build("poisson15").arrivals_s
    assert arrivals is not None and len(arrivals) == 300
    assert arrivals[0] == pytest.approx(0.12404047407101489)
    assert arrivals[-1] == pytest.approx(sum(rng.expovariate(15.0) for _ in range(300)))


def test_the_long_prompt_comes_between_the_others() -> None:
    workload, base = build("longprompt_poisson15"), build("poisson15")
    (place,) = workload.apart
    assert workload.arrivals_s is not None
    assert len(workload.trace[place][0]) == LONG_PROMPT_TOKENS
    assert [entry for index, entry in enumerate(workload.trace) if index != place] == base.trace
    assert list(workload.arrivals_s) == sorted(workload.arrivals_s)
    short = build("longprompt_poisson15", requests=4)
    assert len(short.trace) == 5 and {len(short.trace[index][0]) for index in short.apart} == {LONG_PROMPT_TOKENS}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_unchanged_for_large_models_and_fit_small_ones(name: str) -> None:
    workload = build(name, requests=3)
    assert fitted(workload, 128_256, 131_072) is workload
    small = fitted(workload, 4096, 2048)
    assert small.cut and small.longest <= 2048
    assert all(10 <= token < 4096 for prompt, _ in small.trace for token in prompt)


def test_users_think_and_ask_more_than_there_is_time_for() -> None:
    workload = build("users1000", requests=200)
    assert workload.users is not None and len(workload.users.turns) == 200 and workload.arrivals_s is None
    turns = [turn for own in workload.users.turns for turn in own]
    assert [turn.index for turn in turns] == list(range(len(workload.trace)))
    assert all(sum(turn.think_s for turn in own) > 300 for own in workload.users.turns)
    thought = sum(turn.think_s for turn in turns) / len(turns)
    assert thought == pytest.approx(45, rel=0.1)
    # As many requests in a tenth of the time, with the same prompts, and the first users' alone.
    assert digest(build("users1000", requests=3).trace) == "39eb31aa6a603dce"
    assert [round(own[0].think_s, 6) for own in workload.users.turns[:3]] == [105.44761, 103.182179, 67.975331]
    short = build("users1000", requests=20, seconds=30.0)
    assert short.cut and short.users is not None and not workload.cut
    assert short.trace == workload.trace[: len(short.trace)] and short.trace != build("users1000", 1, 20).trace
    assert len(build("users1000@3").trace) == sum(map(len, short.users.turns[:3]))
    lengths = [len(prompt) for prompt, _ in workload.trace]
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(365, rel=0.15)


def test_a_shorter_time_of_users_who_think_as_long_is_the_beginning() -> None:
    whole, begun = build("users1000", 3, requests=50), build("users1000", 3, requests=50, seconds=90.0, think_s=45.0)
    assert begun.users is not None and whole.users is not None and begun.cut
    assert (begun.users.seconds, begun.users.think_s, whole.users.think_s) == (90.0, 45.0, 45.0)
    for own, first in zip(whole.users.turns, begun.users.turns, strict=True):
        assert [turn.think_s for turn in own[: len(first)]] == [turn.think_s for turn in first]
        assert [whole.trace[turn.index] for turn in own[: len(first)]] == [begun.trace[turn.index] for turn in first]
        assert sum(turn.think_s for turn in first) > 90


def test_an_unknown_workload_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="burst257.*single, burst256"):
        build("burst257")


def test_a_workload_may_have_a_seed_of_its_own() -> None:
    made = build("poisson15+3", seed=50)
    assert made.name == "poisson15+3"
    assert dataclasses.replace(made, name="poisson15") == build("poisson15", seed=53)
    assert len(build("burst256@2+7").trace) == 8
    with pytest.raises(ValueError, match=r"NAME\+SEED"):
        build("poisson15+x")


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_model_folders_of_the_stated_size(name: str, tmp_path: pathlib.Path) -> None:
    folder = write_model_folder(name, tmp_path)
    opened = ModelFolder.open(folder, require_weights=False)
    assert opened.parameter_count == PARAMETERS[name]
    assert opened.token_table is None
    assert shape_of(folder).layer_parameters == SHAPES[name].layer_parameters
    assert shape_of(folder).kv_elements == SHAPES[name].kv_elements
    assert shape_of(folder).linear == SHAPES[name].linear


def test_dummy_weights_are_a_folder_that_loads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_SHARD_BYTES", 4 << 20)
    folder = write_model_folder("demo", tmp_path)
    assert weight_files.write_weights(folder) == 2 * PARAMETERS["demo"]
    opened = ModelFolder.open(folder)
    assert len({record.file for record in opened.tensors.values()}) > 2
    model = load_model(opened, opened.config, torch.float32, torch.device("cpu"), "folder", 0, lambda *_: None)
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert all(0.015 < weight.std() < 0.025 and weight.isfinite().all() for weight in weights)
    assert all((parameter == 1).all() for parameter in model.parameters() if parameter.dim() == 1)


# Folders of other tools in FP8 are in tests/models/test_quantized_folders.
@pytest.mark.slow
@pytest.mark.parametrize(("layers", "scheme"), [("fp8", "compressed-tensors fp8"), ("fp8_blocks", "fp8 fp8")])
def test_dummy_layers_in_fp8_are_a_folder_that_loads(layers: str, scheme: str, tmp_path: pathlib.Path) -> None:
    folder = write_model_folder("demo", tmp_path)
    num_bytes = weight_files.write_weights(folder, layers=layers)
    opened = ModelFolder.open(folder)
    assert num_bytes == sum(record.num_bytes for record in opened.tensors.values())
    model = load_model(opened, opened.config, torch.float32, torch.device("cpu"), "folder", 0, lambda *_: None)
    assert model.quantization is not None and model.quantization.scheme == scheme
    assert len(model.low_bit_weights) == 4 * model.num_layers
    for weight in model.low_bit_weights.values():
        numbers = dequantize(weight.quantized)
        assert 0.015 < numbers.std() < 0.025 and numbers.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["fp8", "fp8_blocks"])
def test_dummy_experts_in_fp8_are_a_folder_that_loads(
    layers: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (256, 2, 4, 2, 64, 128, 1024, 2048, 1e6)
    shape = Shape("Qwen3MoeForCausalLM", *sizes, num_experts=4, experts_per_token=2)
    monkeypatch.setitem(SHAPES, "small", shape)  # type: ignore[arg-type]  # A dictionary, said to be read only.
    folder = write_model_folder("small", tmp_path)
    weight_files.write_weights(folder, layers=layers)
    opened = ModelFolder.open(folder)
    model = load_model(opened, opened.config, torch.float32, torch.device("cpu"), "folder", 0, lambda *_: None)
    # Of each layer attention's two and the experts' two, but not the router.
    assert len(model.low_bit_weights) == 4 * model.num_layers
    assert all(weight.quantized.kind is QuantKind.FP8 for weight in model.low_bit_weights.values())


def test_numbers_are_rounded_to_e4m3_as_torch_does() -> None:
    values = np.random.default_rng(0).standard_normal(10_000, np.float32) * np.float32(100)
    found = torch.frombuffer(bytearray(weight_files._e4m3(values)), dtype=torch.float8_e4m3fn).float()
    expected = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow  # Benchmarks alone use it.
@pytest.mark.parametrize("name", ["llama-3.1-8b", "demo"])
def test_the_synthetic_tokenizer_gives_back_ids_and_text(name: str, tmp_path: pathlib.Path) -> None:
    vocab_size = SHAPES[name].vocab_size
    folder = write_model_folder(name, tmp_path, tokenizer=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    words = list(range(FIRST_WORD, vocab_size - NUM_SPECIAL))
    assert tokenizer.encode(tokenizer.decode(words)).ids == words
    prompt = as_words(build("single").trace[0][0], vocab_size)
    assert len(prompt) == 512 and tokenizer.encode(tokenizer.decode(prompt)).ids == prompt
    text = "Hé ça\n\t日本語 badogu bado ba xyz 123"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    table = ModelFolder.open(folder, require_weights=False).token_table
    assert table is not None and b"".join(table.token_bytes[token] or b"" for token in prompt).decode() == (
        tokenizer.decode(prompt)
    )
