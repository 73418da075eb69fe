"""The service as a process of its own: no torch in it, exit codes, signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.service.auth.credentials_case import CertificateFolder
from tests.service.harness import events_of
from tests.service.service_process import ENVIRONMENT, engine, service_process, until_serving
from tests.support.ports import free_address
from tests.support.warm_python import WarmPython

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_service.config import ServiceConfig

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_nothing_of_the_service_imports_torch() -> None:
    folder = _ROOT / "service" / "headrace_service"
    paths = (path.relative_to(folder) for path in folder.rglob("*.py") if not path.stem.startswith("__"))
    modules = sorted(".".join(path.with_suffix("").parts) for path in paths)
    code = f"""
import importlib, sys
for name in {modules!r}: importlib.import_module("headrace_service." + name)
forbidden = ("torch", "transformers", "triton", "headrace_kernels", "headrace_backend")
print([name for name in sys.modules if name.split(".")[0] in forbidden])
"""
    found = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_process_serves_and_ends_with_0_on_sigterm(
    model_path: pathlib.Path, sockets: pathlib.Path, signals: int
) -> None:
    address = free_address()
    async with engine(model_path, sockets) as fake:
        config = ServiceConfig(
            listen=(address,), engine=(fake.address,), shutdown_grace_s=1.0 if signals == 1 else 600.0
        )
        with service_process(config.model_dump_json()) as process:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                spec = generation_pb2.GenerationSpec(text="hello")
                await until_serving(stub, process)
                assert psutil.Process(process.pid).memory_info().rss < 200 << 20
                fake.running.clear()
                call = stub.Generate(inference_pb2.GenerateRequest(spec=spec))
                await call.read()
                process.send_signal(signal.SIGTERM)
                if signals == 2:
                    # Two signals at once would be one.
                    await _until_not_serving(channel)
                    process.send_signal(signal.SIGTERM)
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await asyncio.wait_for(events_of(call), 60)
                assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
            assert await asyncio.to_thread(process.wait, 60) == 0
            assert process.stderr is not None
            log = process.stderr.read()
            assert "Traceback" not in log and "hello" not in log


async def test_handshakes_that_fail_are_no_lines_of_the_log(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    address, files = free_address(), CertificateFolder.make(tmp_path)
    async with engine(model_path, sockets) as fake:
        config = ServiceConfig(listen=(address,), engine=(fake.address,), shutdown_grace_s=1.0, **files.settings())
        with service_process(config.model_dump_json()) as process:
            async with grpc.aio.secure_channel(address, files.channel_credentials()) as channel:
                await until_serving(inference_pb2_grpc.InferenceServiceStub(channel), process)
            host, _, port = address.rpartition(":")
            for _ in range(3):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40))
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 60)
                writer.close()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
            assert process.stderr is not None
            assert "ssl" not in process.stderr.read()


async def _until_not_serving(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(120):
        while (
            await health.Check(health_pb2.HealthCheckRequest())
        ).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.02)


@functools.cache
def _warm_service() -> WarmPython:
    """A Python that has imported the service, and forks for each that is refused."""
    imports = ["headrace_service.main", "headrace_service.server"]
    return WarmPython(imports, ENVIRONMENT | {"GRPC_ENABLE_FORK_SUPPORT": "0"})


def refusal(config: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(config)
        file.flush()
        (ended,) = _warm_service().run([("headrace_service", ["--config-json", file.name])], 240.0)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("headrace service: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_taken_address_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refusal(ServiceConfig(listen=(address,), engine=("unix:/nowhere",)).model_dump_json())


def test_a_taken_address_for_probes_is_named_without_a_traceback(tmp_path: pathlib.Path) -> None:
    """In a process of its own: one that was forked ends before gRPC's objects do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        probe = f"127.0.0.1:{taken.getsockname()[1]}"
        config = ServiceConfig(listen=("127.0.0.1:0",), engine=("unix:/nowhere",), probe=probe)
        (tmp_path / "config.json").write_text(config.model_dump_json())
        command = [sys.executable, "-m", "headrace_service", "--config-json", tmp_path / "config.json"]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert f"headrace service: cannot listen on {probe} for probes" in ended.stderr


def test_a_unix_address_without_a_folder_hears_of_the_folder(tmp_path: pathlib.Path) -> None:
    address = f"unix:{tmp_path}/missing/s"
    said = refusal(ServiceConfig(listen=(address,), engine=("unix:/nowhere",)).model_dump_json())
    assert address in said and "folder is missing" in said


@pytest.mark.parametrize(
    ("change", "named"),
    [({"max_message_bytes": -1}, "max_message_bytes"), ({"listens": []}, "listens"), ({"listen": []}, "listen")],
)
def test_a_configuration_that_makes_no_sense_is_named(change: dict[str, object], named: str) -> None:
    values = {"listen": ["127.0.0.1:0"], "engine": ["unix:/nowhere"], **change}
    assert named in refusal(json.dumps(values))


@pytest.mark.parametrize(
    ("module", "why"), [("no.such", "No module named 'no'"), ("json", "no attribute 'models'"), (".json", "package")]
)
def test_a_module_that_brings_no_models_is_named(module: str, why: str) -> None:
    config = ServiceConfig(listen=("127.0.0.1:0",), engine=("unix:/nowhere",), conformance_models=module)
    said = refusal(config.model_dump_json())
    assert f"conformance_models: {module}: " in said and why in said


async def test_a_model_folder_that_cannot_be_served_is_named(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with engine(model_path, sockets) as fake:
        config = ServiceConfig(listen=("127.0.0.1:0",), engine=(fake.address,), model_folder=tmp_path / "missing")
        assert "missing" in await asyncio.to_thread(refusal, config.model_dump_json())
