"""A server whose weights were quantized while they were read says so and answers right.

A prefix hit changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy, read
from tests.support.running_server import DEMO, RunningServer, refused, running_server

from headrace.v1 import generation_pb2, inference_pb2
from headrace_model_folder import ModelFolder, expected_tensors

SETTINGS = {
    "int4": ("--quantize", "int4", "--quantize-group", "64"),
    "int8": ("--quantize", "int8"),
    "nf4": ("--quantize", "nf4"),
}


# What the others do is tried without a server: `test_worker_process` (what is said of int8),
# `test_quantized_layers` (logits, prefixes), `test_nf4_loading`.
@pytest.fixture(
    scope="module", params=["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "nf4"))]
)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(scheme: str) -> Iterator[RunningServer]:
    with running_server("--dtype", "fp32", "--device", "cpu", "--num-blocks", "512", *SETTINGS[scheme]) as running:
        yield running


def test_the_model_says_how_it_was_quantized(server: RunningServer, scheme: str) -> None:
    with connected(server.address) as stub:
        model = stub.GetModel(inference_pb2.GetModelRequest()).model
    report, shapes = model.quantization, expected_tensors(ModelFolder.open(DEMO, require_weights=False).config)
    layers = sum(rows * columns for name, (rows, *rest) in shapes.items() for columns in rest if "_proj" in name)
    assert (report.scheme, report.group_size) == (scheme, 0 if scheme == "int8" else 64)
    assert model.memory_plan.weight_bytes == 4 * (model.parameter_count - layers) + layers * report.bits_per_weight / 8
    assert report.worst_tensor in shapes
    assert 0 < report.mean_relative_error <= report.worst_relative_error < (0.02 if scheme == "int8" else 0.15)


@pytest.mark.parametrize(("question", "answer"), [("What is 17 plus 25?", "42"), ("What is 9 times 8?", "72")])
def test_answers_are_right(server: RunningServer, question: str, answer: str) -> None:
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text=question)])
    spec = generation_pb2.GenerationSpec(sampling=generation_pb2.SamplingParameters(temperature=0))
    with connected(server.address) as stub:
        chat: Transcript = read(
            stub.Chat(inference_pb2.ChatRequest(messages=[message], spec=spec), timeout=CALL_TIMEOUT_S)
        )
    assert chat.reason() == generation_pb2.FINISH_REASON_STOP and answer in chat.texts[0]


# Prefixes over such weights are in tests/models/test_quantized_layers, of a server in
# test_equal_answers.
@pytest.mark.slow
def test_a_prefix_hit_changes_nothing(server: RunningServer) -> None:
    prompt = [17 * index % 4000 for index in range(3, 203)]
    first, second = (generate(server.address, greedy(prompt, 40)) for _ in range(2))
    assert first.done is not None and second.done is not None
    assert (first.done.usage.cached_tokens, second.done.usage.cached_tokens) == (0, 192)
    assert second.tokens == first.tokens


# The worker says the same in `test_worker_process`; its logits: tests/models/test_head_weight.
@pytest.mark.slow
def test_an_output_layer_of_8_bits_beside_a_tied_embedding() -> None:
    """By itself: said, exact in memory, right."""
    with running_server(
        "--dtype", "fp32", "--device", "cpu", "--num-blocks", "512", "--quantize-head", "int8"
    ) as server:
        with connected(server.address) as stub:
            model = stub.GetModel(inference_pb2.GetModelRequest()).model
        report, config = model.quantization, ModelFolder.open(DEMO, require_weights=False).config
        assert (report.scheme, report.head_scheme, report.worst_tensor) == ("", "int8", "")
        assert 8 < report.head_bits_per_weight < 8.2 and 0 < report.head_relative_error < 0.02
        copy = config.vocab_size * config.description.hidden_size * report.head_bits_per_weight / 8
        assert config.description.head.tied and model.memory_plan.weight_bytes == 4 * model.parameter_count + copy
        test_answers_are_right(server, "What is 17 plus 25?", "42")


def test_groups_that_do_not_divide_end_the_start() -> None:
    ended, _ = refused("--quantize", "int4")
    assert ended.returncode == 2
    assert "quantize_group is 128, which does not divide the 704 inputs" in ended.stderr
    assert "quantize_group 64 works" in ended.stderr
