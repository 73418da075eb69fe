"""Several services with keys and TLS, each with an engine of its own, behind a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import grpc
from tests.service.auth.credentials_case import bearer
from tests.service.harness import Running, running_service
from tests.support.compose_files import DEPLOY
from tests.support.real_envoy import running_proxy
from tests.support.running_server import environment

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class Front:
    """What runs, and a caller's way to it through Envoy."""

    services: Sequence[Running]
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...]

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    def generate(self, tokens: int = 8, metadata: tuple[tuple[str, str], ...] = (), **fields: object) -> object:
        """Calls Generate through Envoy."""
        stop = generation_pb2.StopConditions(max_tokens=tokens)
        spec = generation_pb2.GenerationSpec(text="hello", stop=stop, token_ids_only=True, **fields)  # type: ignore[arg-type]
        return self.stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=(*self.metadata, *metadata))

    @property
    def answered(self) -> list[int]:
        """How many generations each service's engine was asked for."""
        return [len(service.engine.requests) for service in self.services]


def first_start(folder: pathlib.Path) -> None:
    """Makes, or hands out again, what the stack's containers mount."""
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    command = ["sh", str(DEPLOY / "first-start"), str(folder)]
    done = subprocess.run(command, env={**environment(), "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def credentials_in(folder: pathlib.Path) -> pathlib.Path:
    """Returns a folder of credentials, laid out as the stack's containers mount them."""
    credentials = folder / "credentials"
    for name in ("authority", "service", "backend", "proxy", "caller"):
        (credentials / name).mkdir(parents=True)
    first_start(credentials)
    return credentials


@contextlib.asynccontextmanager
async def several_services(
    model_path: pathlib.Path, shipped: str, others: Mapping[str, Sequence[str]], **config: object
) -> AsyncIterator[Front]:
    """Starts two services and an Envoy before them.

    Args:
        model_path: what the engines say that they serve.
        shipped: Envoy's configuration in deploy/envoy.
        others: addresses of clusters other than `services`.
        config: of the services.
    """
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "keys_file": "keys.json"}
    async with contextlib.AsyncExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-")))
        credentials = credentials_in(folder)
        settings = {name: credentials / "service" / file for name, file in files.items()}
        services = []
        for number in range(2):
            (folder / str(number)).mkdir()
            running = running_service(model_path, folder / str(number), **settings, **config)
            services.append(await stack.enter_async_context(running))
        behind = {"services": [service.address for service in services], **others}
        # Envoy asks for the services' health before it is ready, and this loop has to answer.
        started = running_proxy(folder, behind, credentials / "proxy", shipped)
        proxy = await asyncio.to_thread(stack.enter_context, started)
        trust = grpc.ssl_channel_credentials((credentials / "caller" / "ca.pem").read_bytes())
        channel = await stack.enter_async_context(grpc.aio.secure_channel(proxy.address, trust))
        key = (credentials / "caller" / "first.key").read_text().strip()
        yield Front(services, channel, bearer(key))
