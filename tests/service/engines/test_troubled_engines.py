"""Engines that a service can't trust, and engines that come and go, among good ones."""

from __future__ import annotations

import asyncio
import pathlib
import time
from typing import Any

import grpc
import structlog
from click.testing import CliRunner
from grpc_health.v1 import health_pb2
from tests.service.fake_engine import FakeEngine
from tests.service.many_engines import TOKENS, fake, joined, running
from tests.support.ports import free_address

from headrace.cli.listing import models
from headrace_service.auth.certificates import Identity, new_ca, new_client, new_server

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


def server_credentials(ca: Identity) -> grpc.ServerCredentials:
    """Credentials of an engine on loopback, which wants services of the same authority."""
    own, root = new_server(ca, ("127.0.0.1",), 2), ca.certificate_pem()
    return grpc.ssl_server_credentials([(own.key_pem(), own.certificate_pem())], root, require_client_auth=True)


def client_files(folder: pathlib.Path, ca: Identity) -> dict[str, pathlib.Path]:
    """The settings of a service that shows a certificate of the authority."""
    own = new_client(ca, "service", 2)
    files = {"ca": ca.certificate_pem(), "cert": own.certificate_pem(), "key": own.key_pem()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return {f"engine_tls_{name}": folder / name for name in files}


async def test_an_engine_of_another_authority_is_left_out_and_named(
    model_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    ours, theirs = new_ca("CA", 2), new_ca("CA", 2)
    engines = [fake(model_path) for _ in range(3)]
    for engine, ca in zip(engines, (ours, theirs, ours), strict=True):
        await engine.start(free_address(), server_credentials(ca))
    first, strange, last = engines
    addresses = [engine.address for engine in engines]
    with structlog.testing.capture_logs() as logged:
        async with joined(addresses, **client_files(tmp_path, ours)) as server:
            await server.until_used(2)
            await server.until(lambda: len(server.service.core.models.left_out()) == 1)
            [line] = (await server.model()).engines_left_out
            assert line.startswith(f"{strange.address}: the TLS handshake fails: another authority's certificate")
            # `headrace models` runs apart from the service, as for an operator.
            arguments = ["--server", server.address, "--json"]
            shown = await asyncio.to_thread(CliRunner().invoke, models, arguments)
            assert line in shown.output and shown.exit_code == 0
            assert [await server.status(f"engine/{each}") for each in addresses] == [SERVING, NOT_SERVING, SERVING]
            assert await server.status("") == SERVING
            for prompt in range(3, 20):
                assert await server.read(await server.submit(prompt)) == TOKENS
            assert first.requests and last.requests and not strange.requests
            # It gets a certificate of ours, and is taken in without a restart of the service.
            await strange.stop()
            again = fake(model_path)
            await again.start(strange.address, server_credentials(ours))
            await server.until_used(3)
            assert not (await server.model()).engines_left_out
            await again.stop()
    named = [line["engine"] for line in logged if line["event"] == "engine.left_out"]
    assert named == [strange.address], "once, however often it was asked"
    for engine in (first, last):
        await engine.stop()


async def test_a_key_that_cannot_be_read_is_named_once_and_followed(
    model_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    ca, engine = new_ca("CA", 2), fake(model_path)
    await engine.start(free_address(), server_credentials(ca))
    files = client_files(tmp_path, ca)
    key = files["engine_tls_key"].read_bytes()
    with structlog.testing.capture_logs() as logged:
        async with joined([engine.address], **files) as server:
            await server.until_used(1)
            (model,) = server.service.core.models
            for _ in range(2):
                files["engine_tls_key"].write_bytes(key[:100])
                await engine.stop()
                before = model.connection.num_attempts
                await server.until(lambda attempts=before: model.connection.num_attempts > attempts + 3)
                files["engine_tls_key"].write_bytes(key)
                again = fake(model_path)
                await again.start(engine.address, server_credentials(ca))
                engine = again
                await server.until_used(1)
            await engine.stop()
    named = [line["engine"] for line in logged if line["event"] == "engine.no_credentials"]
    assert named == [engine.address] * 2, "once each time"


class Flapping(FakeEngine):
    """An engine that welcomes every connection and ends it at once, as one does that crashes."""

    def __init__(self, model: Any, script: Any) -> None:
        super().__init__(model, script)
        self.came_s: list[float] = []

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        self.came_s.append(time.monotonic())
        asyncio.get_running_loop().call_later(0.02, self.disconnect)
        await super().Connect(request_iterator, context)


async def test_an_engine_that_flaps_is_asked_ever_more_seldom_and_harms_nobody(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    good, flapping = fake(model_path), fake(model_path, Flapping)
    assert isinstance(flapping, Flapping)
    async with (
        running(good, flapping, sockets=sockets) as addresses,
        joined(addresses, engine_retry_max_s=1.0) as server,
    ):
        await server.until(lambda: len(flapping.came_s) >= 7)
        for prompt in range(3, 20):
            assert await server.read(await server.submit(prompt)) == TOKENS
        pauses = [later - earlier for earlier, later in zip(flapping.came_s, flapping.came_s[1:], strict=False)]
        # Each is drawn from half of its length on: 50 ms, doubled up to a second; a welcome alone
        # makes them no shorter. A busy machine makes pauses longer, never shorter.
        for index, pause in enumerate(pauses):
            assert pause >= 0.5 * min(0.05 * 2**index, 1.0)
        assert await server.status(f"engine/{good.address}") == SERVING
