"""Unchanged programs of Triton, vLLM's backend and KServe against `headrace serve`.

The server has two service processes.

`slow`: the first run downloads some hundred megabytes. See `programs` for what has to be named in
the environment.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from tests.conformance.programs import ROOT, checkout, perf_analyzer, python, require_downloads, run
from tests.kserve.conformance_models import all_models
from tests.support.running_server import RunningServer, running_server

pytestmark = pytest.mark.slow

# Program -> what it prints when it is content; health_metadata prints nothing of the kind.
EXAMPLES = {
    "simple_grpc_health_metadata": "",
    "simple_grpc_infer_client": "PASS: infer",
    "simple_grpc_async_infer_client": "PASS: Async infer",
    "simple_grpc_aio_infer_client": "PASS: grpc aio infer",
    "simple_grpc_string_infer_client": "PASS: string",
    "simple_grpc_custom_args_client": "PASS: CustomArgs",
    "simple_grpc_keepalive_client": "PASS: KeepAlive",
    "simple_grpc_custom_repeat": "PASS: Decoupled API",
    "simple_grpc_sequence_sync_infer_client": "PASS: Sequence",
    "simple_grpc_sequence_stream_infer_client": "PASS: Sequence",
    "simple_grpc_aio_sequence_stream_infer_client": "PASS: grpc aio sequence stream",
    "grpc_explicit_byte_content_client": "PASS: explicit string",
    "grpc_explicit_int8_content_client": "PASS: explicit int8",
    "grpc_explicit_int_content_client": "PASS: explicit int",
    "simple_grpc_shm_client": "PASS: system shared memory",
    "simple_grpc_shm_string_client": "PASS: system shared memory",
}
WITH_DYNAMIC_SEQUENCES = [name for name in EXAMPLES if "sequence" in name]
PERF_DATA = {
    "vllm_model": {
        "text_input": ["hello"],
        "stream": [True],
        "sampling_parameters": ['{"max_tokens": 16, "ignore_eos": true}'],
        "exclude_input_in_output": [True],
    },
    "ensemble": {"text_input": ["hi"], "stream": [True], "max_tokens": [16], "end_id": [-1]},
}
NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    require_downloads()
    with running_server(
        "--device", "cpu", "--services", "2", "--conformance-models", all_models.__name__, "--kserve-shared-memory"
    ) as started:
        yield started
        # Programs that drop calls, as perf_analyzer does at the end of each, are nobody's error.
        assert not [line for line in started.lines if "[error" in line or "Traceback" in line]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_tritons_client_passes(server: RunningServer, name: str) -> None:
    folder = checkout("TRITON_CLIENT_CHECKOUT", "src/python/examples")
    assert EXAMPLES[name] in run(python(), folder / f"{name}.py", "-u", server.address)


@pytest.mark.parametrize("name", WITH_DYNAMIC_SEQUENCES)
def test_dynamic_sequences_pass(server: RunningServer, name: str) -> None:
    folder = checkout("TRITON_CLIENT_CHECKOUT", "src/python/examples")
    assert EXAMPLES[name] in run(python(), folder / f"{name}.py", "-d", "-u", server.address)


@pytest.mark.parametrize("options", [(), ("-s", "--exclude-inputs-in-outputs"), ("--exclude-inputs-in-outputs",)])
@pytest.mark.parametrize("model", ["vllm_model", "demo"])
def test_the_sample_of_vllms_backend_passes(
    server: RunningServer, tmp_path: pathlib.Path, model: str, options: tuple[str, ...]
) -> None:
    folder = checkout("VLLM_BACKEND_CHECKOUT", "samples")
    prompts = ("--input-prompts", folder / "prompts.txt", "--results-file", tmp_path / "results.txt")
    assert "PASS: vLLM example" in run(
        python(), folder / "client.py", "-u", server.address, "-m", model, *prompts, *options
    )


@pytest.mark.parametrize("model", PERF_DATA)
def test_perf_analyzer_finds_the_ledger_it_keeps_itself(
    server: RunningServer, tmp_path: pathlib.Path, model: str
) -> None:
    program, libraries = perf_analyzer()
    data, export = tmp_path / "in.json", tmp_path / "out.json"
    data.write_text(json.dumps({"data": [PERF_DATA[model]]}))
    shapes = [part for name in PERF_DATA[model] for part in ("--shape", f"{name}:1")] if model == "ensemble" else []
    printed = run(
        program, "-m", model, "-u", server.address, "-i", "grpc", "--async", "--streaming", "--concurrency-range=4",
        f"--request-count={NUM_REQUESTS}", f"--input-data={data}", f"--profile-export-file={export}",
        "--stability-percentage=999", *shapes, LD_LIBRARY_PATH=libraries,
    )  # fmt: skip
    assert f"Successful request count: {NUM_REQUESTS}" in printed
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    assert len(requests) >= NUM_REQUESTS
    # One response per token, the last of which says that it is; a response may bring several when
    # the reader is behind.
    assert all(1 <= len(request["response_timestamps"]) <= 17 for request in requests)


@pytest.mark.parametrize("theirs", ["tritonclient.grpc", "kserve"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_our_messages_live_beside_a_clients(theirs: str, ours_first: bool) -> None:
    require_downloads()
    imports = ["headrace_protos.inference.grpc_service_pb2", theirs]
    program = f"import {', '.join(imports if ours_first else reversed(imports))}"
    run(python(), "-c", program, PYTHONPATH=str(ROOT / "protos" / "python"))


def test_kserves_client_passes(server: RunningServer) -> None:
    program = pathlib.Path(__file__).parent / "kserve_client.py"
    assert "PASS: kserve" in run(python(), program, server.address)
