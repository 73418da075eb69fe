"""A server of a GGUF file: it says what it holds, answers right, and refuses what can't be."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.gguf_writer import demo_tokenizer, from_folder
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy, read
from tests.support.running_server import DEMO, RunningServer, refused, running_server

from headrace.v1 import generation_pb2, inference_pb2
from headrace_model_folder import ModelFolder

CPU = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "512")


def _choose(name: str, shape: tuple[int, ...]) -> str:
    return "Q6_K" if "v_proj" in name or "embed" in name else "Q4_K"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    gguf, _ = from_folder(DEMO, _choose)
    gguf.metadata |= demo_tokenizer(DEMO)
    return gguf.write(tmp_path_factory.mktemp("gguf") / "demo-q4_k_m.gguf")


@pytest.fixture(scope="module")
def server(file: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(*CPU, model=file) as running:
        yield running


# Such a file's logits are in tests/models/test_gguf_models, one that is served in a start that is
# refused below.
@pytest.mark.slow
def test_the_model_says_what_it_holds(server: RunningServer) -> None:
    with connected(server.address) as stub:
        model = stub.GetModel(inference_pb2.GetModelRequest()).model
    report = model.quantization
    assert model.name == "demo-q4_k_m" and model.revision.startswith("demo-q4_k_m@") and model.has_chat_template
    assert report.scheme == "Q4_K+Q8_0+Q6_K" and 4 < report.bits_per_weight < 8.5
    # The bits are the file's own.
    assert (report.mean_relative_error, report.worst_relative_error, report.worst_tensor) == (0, 0, "")
    norms = 17 * 256
    weights = model.parameter_count - norms
    assert model.memory_plan.weight_bytes == 4 * norms + weights * report.bits_per_weight / 8


# Such a file's logits are in tests/models/test_gguf_models, one that is served in a start that is
# refused below.
@pytest.mark.slow
@pytest.mark.parametrize(("question", "answer"), [("What is 17 plus 25?", "42"), ("What is 9 times 8?", "72")])
def test_answers_are_right(server: RunningServer, question: str, answer: str) -> None:
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text=question)])
    spec = generation_pb2.GenerationSpec(sampling=generation_pb2.SamplingParameters(temperature=0))
    with connected(server.address) as stub:
        chat: Transcript = read(
            stub.Chat(inference_pb2.ChatRequest(messages=[message], spec=spec), timeout=CALL_TIMEOUT_S)
        )
    assert chat.reason() == generation_pb2.FINISH_REASON_STOP and answer in chat.texts[0]


# Of a server that is in test_equal_answers; the weights are those of
# tests/models/test_gguf_models.
@pytest.mark.slow
def test_a_prefix_hit_changes_nothing(server: RunningServer) -> None:
    prompt = [17 * index % 4000 for index in range(3, 203)]
    first, second = (generate(server.address, greedy(prompt, 20)) for _ in range(2))
    assert first.done is not None and second.done is not None
    assert (first.done.usage.cached_tokens, second.done.usage.cached_tokens) == (0, 192)
    assert second.tokens == first.tokens


@pytest.mark.parametrize("setting", ["quantize", "quantize_head"])
def test_such_a_file_is_not_quantized_again(file: pathlib.Path, setting: str) -> None:
    ended, _ = refused(f"--{setting.replace('_', '-')}", "int8", model=file)
    assert ended.returncode == 2
    assert f"{setting} is int8, and demo-q4_k_m.gguf is a GGUF file, whose weights stay as they are" in ended.stderr


def test_ranks_do_not_cut_its_blocks(file: pathlib.Path) -> None:
    ended, _ = refused(*CPU, "--tp", "2", model=file)
    said = (
        "tp is 2, which leaves each rank 128 of o_proj's 256 inputs, and a block of 256 does not divide those; tp 1 "
        "works"
    )
    assert ended.returncode == 2 and said in ended.stderr


# A cache knows nothing of weights: the tests above have these, `test_quantized_kv_server` has that.
@pytest.mark.slow
def test_its_cache_may_be_quantized(file: pathlib.Path) -> None:
    sizes = ModelFolder.open(file).config.description
    with running_server(*CPU, "--kv-dtype", "int8", model=file) as running, connected(running.address) as stub:
        model = stub.GetModel(inference_pb2.GetModelRequest()).model
        transcript = generate(running.address, greedy([17 * index % 4000 for index in range(3, 60)], 8))
    assert model.quantization.scheme == "Q4_K+Q8_0+Q6_K" and model.kv_dtype == "int8"
    assert model.kv_bytes_per_token == 2 * len(sizes.layers) * sizes.attention.num_kv_heads * (
        sizes.attention.head_dim + 4
    )
    assert len(transcript.tokens[0]) == 8


def test_a_file_that_is_cut_ends_the_start(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    ended, _ = refused(model=cut)
    assert ended.returncode == 2 and "cut.gguf: is truncated: tensor" in ended.stderr


# The loader refuses it in tests/models/test_gguf_models; a worker's refusal ends the start with
# `test_quantized_server`'s groups that do not divide.
@pytest.mark.slow
def test_a_scale_that_is_no_number_ends_the_start(tmp_path: pathlib.Path) -> None:
    gguf, _ = from_folder(DEMO, "Q8_0")
    gguf.metadata |= demo_tokenizer(DEMO)
    kind, shape, data = gguf.tensors["blk.1.ffn_up.weight"]
    gguf.tensors["blk.1.ffn_up.weight"] = (kind, shape, np.float16(np.nan).tobytes() + data[2:])
    ended, _ = refused(*CPU, model=gguf.write(tmp_path / "bad.gguf"))
    assert ended.returncode == 2
    assert "bad.gguf: tensor 'model.layers.1.mlp.up_proj.weight' holds a scale that is not finite" in ended.stderr
