"""A backend that can't serve says why in one line, quickly, and leaves what is there alone."""

from __future__ import annotations

import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import structlog
from tests.backend.backend_harness import ENVIRONMENT, connected, running_backend, start_backend
from tests.model_folder.test_gguf import small

from headrace_backend.server.main import main


def refused(config: object, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a start with this configuration is refused with."""
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    assert main(["--config-json", str(path)]) == 2
    structlog.reset_defaults()
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    return error


def config_of(model: pathlib.Path, tmp_path: pathlib.Path, **engine: Any) -> dict[str, Any]:
    return {"engine": {"model": str(model), **engine}, "listen": f"unix:{tmp_path}/private/engine.sock"}


def broken_model(model: pathlib.Path, target: pathlib.Path, **changes: Any) -> pathlib.Path:
    shutil.copytree(model, target)
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_process_refuses_a_model_folder_quickly(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(model, tmp_path)))
    started = time.monotonic()
    command = [sys.executable, "-m", "headrace_backend", "--config-json", "-"]
    with (tmp_path / "config.json").open() as config:
        process = subprocess.run(command, env=ENVIRONMENT, stdin=config, capture_output=True, text=True, timeout=600)
    # Below 2 s on a quiet machine.
    assert time.monotonic() - started < 60.0
    assert process.returncode == 2
    assert process.stdout == ""
    [line] = process.stderr.splitlines()
    assert line.startswith("headrace backend: model folder: ") and "safetensors" in line


async def test_an_address_for_probes_that_is_taken_is_refused(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        backend = start_backend(tmp_path, model, backend={"probe": address})
        assert await backend.wait_exit() == 2
    assert f"cannot listen on {address} for probes" in backend.log and "Traceback" not in backend.log


def test_model_folder_is_refused_in_one_line(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = broken_model(model, tmp_path / "unknown", architectures=["MysteryModel"])
    quantized = broken_model(model, tmp_path / "quantized", quantization_config={"quant_method": "gptq", "bits": 4})
    gguf = small().write(tmp_path / "small.gguf")
    for folder, engine, said in (
        (tmp_path / "nowhere", {}, "nowhere"),
        (unknown, {"load": "dummy"}, "MysteryModel"),
        (model, {"load": "dummy", "max_model_len": 4096}, "2048 tokens"),
        (
            model,
            {"load": "dummy", "quantize": "int4"},
            "the 8 inputs of model.layers.0.self_attn.q_proj.weight; quantize int8 and fp8 work",
        ),
        (
            quantized,
            {"load": "dummy", "quantize": "int4", "quantize_group": 64},
            "quantize is int4, and the folder is quantized already (gptq)",
        ),
        (gguf, {"quantize_head": "int8"}, "quantize_head is int8, and small.gguf is a GGUF file"),
    ):
        assert said in refused(config_of(folder, tmp_path, **engine), tmp_path, capsys)
        assert list((tmp_path / "private").iterdir()) == []


def test_configuration_is_refused_by_field(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = config_of(model, tmp_path, load="dummy")
    for config, said in (
        ("{", "JSON"),
        (good | {"listen": "nonsense"}, "listen is 'nonsense'"),
        (good | {"listen": "127.0.0.1:0"}, "token_file"),
        (good | {"mystery": 1}, "mystery"),
        (config_of(model, tmp_path, block_size=7), "engine.block_size"),
    ):
        assert said in refused(config, tmp_path, capsys)


def test_taken_port_is_refused(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config = config_of(model, tmp_path, load="dummy")
        config |= {"listen": listen, "token_file": str(tmp_path / "token")}
        assert listen in refused(config, tmp_path, capsys)


async def test_second_backend_on_the_socket_is_refused_and_the_first_goes_on(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with running_backend(tmp_path, model) as backend, connected(backend.address) as client:
        await client.wait_serving()
        second = start_backend(tmp_path, model)
        assert await second.wait_exit() == 2
        assert str(backend.socket) in second.log
        assert f"process {backend.process.pid}" in second.log
        assert (await client.load()).kv_blocks == 256
        async with connected(backend.address) as other:
            assert (await other.load()).kv_blocks == 256


async def test_worker_that_refuses_the_model_ends_the_backend_with_its_line(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    backend = start_backend(tmp_path, model, "--refuse-model")
    assert await backend.wait_exit() == 2
    plain = [line for line in backend.log.splitlines() if not line.startswith("{")]
    assert plain == ["headrace backend: worker 0: model.safetensors: tensor 'x' is missing"]


async def test_memory_that_is_too_small_at_first_ends_the_backend(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    no_memory = tmp_path / "no-memory"
    no_memory.touch()
    backend = start_backend(tmp_path, model, "--no-memory-file", str(no_memory))
    assert await backend.wait_exit() == 2
    assert "headrace backend: worker 0: weights 2.0 MiB; 1.0 MiB are free" in backend.log.splitlines()


@pytest.mark.parametrize("restarts", [1, 2])
async def test_worker_that_always_dies_is_given_up(model: pathlib.Path, tmp_path: pathlib.Path, restarts: int) -> None:
    backend = start_backend(tmp_path, model, "--die-at-start", max_worker_restarts=restarts)
    assert await backend.wait_exit() == 3
    assert len(backend.log_lines("worker lost")) == restarts
    assert not backend.socket.exists()


async def test_worker_that_does_not_start_in_time_is_given_up(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    backend = start_backend(tmp_path, model, "--start-s", "600", max_worker_restarts=1, start_timeout_s=6.0)
    assert await backend.wait_exit() == 3
    [lost] = backend.log_lines("worker lost")
    assert "no start-up progress for 6 s" in lost["reason"]
    # The stacks say where it hung.
    assert "fake_worker.py" in backend.log
