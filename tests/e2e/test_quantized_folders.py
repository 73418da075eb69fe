"""Servers over folders that other tools quantized.

Each says its format and answers right. A folder that is to be quantized once more ends the start,
and the doctor finds what is packed wrongly.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.quantized_folders import Quantized, Recipe, quantize_folder
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, read
from tests.support.running_server import DEMO, RunningServer, refused, running_server

from headrace.v1 import generation_pb2, inference_pb2

RECIPES = {
    "gptq int4": Recipe("gptq", group=64, ordered=True),
    "fp8 fp8": Recipe("fp8-inv", bits=8, group=128),
}


# What is computed from each format is in tests/models/test_quantized_folders; what a server says of
# such a folder, in test_quantize_report.
@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in RECIPES])
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return quantize_folder(DEMO, tmp_path_factory.mktemp("folder"), RECIPES[scheme])


@pytest.fixture(scope="module")
def server(folder: Quantized) -> Iterator[RunningServer]:
    with running_server("--device", "cpu", "--num-blocks", "512", model=folder.path) as running:
        yield running


def test_the_model_says_its_format(server: RunningServer, scheme: str) -> None:
    with connected(server.address) as stub:
        report = stub.GetModel(inference_pb2.GetModelRequest()).model.quantization
    recipe = RECIPES[scheme]
    assert (report.scheme, report.group_size) == (scheme, recipe.group)
    assert recipe.bits < report.bits_per_weight < recipe.bits + 2.5
    assert (report.mean_relative_error, report.worst_tensor) == (0, "")
    assert report.activations == ("fp8 per 128 inputs" if scheme == "fp8 fp8" else "")


QUESTIONS = [("What is 17 plus 25?", "42"), ("What is 9 times 8?", "72")]


def check_answer(server: RunningServer, question: str, answer: str) -> None:
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text=question)])
    spec = generation_pb2.GenerationSpec(sampling=generation_pb2.SamplingParameters(temperature=0))
    with connected(server.address) as stub:
        chat: Transcript = read(
            stub.Chat(inference_pb2.ChatRequest(messages=[message], spec=spec), timeout=CALL_TIMEOUT_S)
        )
    assert chat.reason() == generation_pb2.FINISH_REASON_STOP and answer in chat.texts[0]


@pytest.mark.parametrize(("question", "answer"), QUESTIONS)
def test_answers_are_right(server: RunningServer, question: str, answer: str) -> None:
    check_answer(server, question, answer)


# Real ranks over such a folder draw the tokens of one in tests/parallel/test_shared_folders.
@pytest.mark.slow
def test_answers_of_two_ranks_are_right(tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(DEMO, tmp_path, Recipe("gptq", group=64))
    with running_server("--device", "cpu", "--num-blocks", "512", "--tp", "2", model=folder.path) as running:
        for question, answer in QUESTIONS:
            check_answer(running, question, answer)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (RECIPES["gptq int4"], "self_attn.o_proj does not bear: its 256 inputs are in an order of groups (act-order)"),
        (RECIPES["fp8 fp8"], "mlp.down_proj does not bear: its 704 inputs give 352 to each, which a block of 128"),
    ],
)
def test_ranks_do_not_cut_what_belongs_together(tmp_path: pathlib.Path, recipe: Recipe, reason: str) -> None:
    folder = quantize_folder(DEMO, tmp_path, recipe)
    ended, _ = refused("--device", "cpu", "--tp", "2", model=folder.path)
    assert ended.returncode == 2 and f"tp is 2, which model.layers.0.{reason}" in ended.stderr
    assert "; tp 1 works" in ended.stderr


def test_such_a_folder_is_not_quantized_again(tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(DEMO, tmp_path, Recipe("awq", group=64, symmetric=False))
    ended, _ = refused("--quantize", "int8", model=folder.path)
    assert ended.returncode == 2 and "the folder is quantized already (awq)" in ended.stderr


# It does in tests/supervisor/test_doctor, with another folder.
@pytest.mark.slow
def test_the_doctor_names_what_is_packed_wrongly(tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(DEMO, tmp_path, Recipe("awq", group=64, symmetric=False))
    scales = "model.layers.5.mlp.up_proj.scales"
    folder.tensors[scales] = folder.tensors[scales].roll(1, 1)
    folder.rewrite()
    command = (sys.executable, "-m", "headrace_supervisor", "doctor", "--model", str(folder.path), "--weights")
    judged = subprocess.run(command, env=os.environ | {"COLUMNS": "1000"}, capture_output=True, text=True, timeout=240)
    assert judged.returncode == 1 and "layer 'model.layers.5.mlp.up_proj': its scales" in judged.stdout
