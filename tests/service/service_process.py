"""A service as a process of its own, beside a fake engine in the test's process."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
from tests.service.fake_engine import FakeEngine
from tests.service.harness import engine_model

from headrace.v1 import inference_pb2, inference_pb2_grpc

_ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        str(_ROOT / part) for part in ("service", "backend", "both_sides", "protos/python", "clients/python")
    ),
}


@contextmanager
def service_process(config: str) -> Iterator[subprocess.Popen[str]]:
    """Starts one with a configuration as JSON, and kills it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace_service", "--config-json", "-"],
        env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(config)
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@asynccontextmanager
async def engine(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[FakeEngine]:
    """A fake engine on a Unix socket."""
    fake = FakeEngine(engine_model(model_path), lambda add, index: [200] * 8)
    await fake.start(f"unix:{sockets}/engine.sock")
    yield fake
    await fake.stop()


async def until_serving(
    stub: inference_pb2_grpc.InferenceServiceStub,
    process: subprocess.Popen[str],
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    """Waits until the service lists its models."""
    async with asyncio.timeout(120):
        while True:
            assert process.poll() is None
            try:
                await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata, wait_for_ready=True)
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
