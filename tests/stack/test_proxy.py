"""The stack's front door for real: Envoy as it is shipped, behind floods."""

from __future__ import annotations

import asyncio
import os
import pathlib
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.service.auth.credentials_case import bearer
from tests.service.fake_engine import FakeEngine
from tests.service.harness import events_of, ids_of
from tests.service.model_folder import write_model_folder
from tests.service.service_process import engine, service_process, until_serving
from tests.support.compose_files import DEPLOY
from tests.support.http2_floods import BLOCKS, FRAMES, Flood, FloodingPeer
from tests.support.peak_memory import MIB, PeakMemory
from tests.support.ports import free_address
from tests.support.real_envoy import Proxy, running_proxy
from tests.support.running_server import environment

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_service.config import ServiceConfig
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import Metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")
# The fake engine's answer to everything.
NUM_TOKENS = 8
# Long before, Envoy ends a header block.
SENT = 64 * MIB


@dataclass(frozen=True)
class Front:
    """What runs, and what a caller has."""

    credentials: pathlib.Path
    proxy: Proxy
    service: str
    service_pid: int
    engine: FakeEngine
    stub: inference_pb2_grpc.InferenceServiceStub
    channel: grpc.aio.Channel

    @property
    def key(self) -> str:
        return (self.credentials / "caller" / "first.key").read_text().strip()

    def tls(self) -> ssl.SSLContext:
        """Returns the credentials of a peer that trusts the caller's CA."""
        context = ssl.create_default_context(cafile=str(self.credentials / "caller" / "ca.pem"))
        context.set_alpn_protocols(["h2"])
        return context

    def generate(
        self, tokens: int = NUM_TOKENS, timeout: float | None = None, **fields: object
    ) -> grpc.aio.UnaryStreamCall:
        """Calls Generate with the caller's key."""
        stop = generation_pb2.StopConditions(max_tokens=tokens)
        spec = generation_pb2.GenerationSpec(text="hello", stop=stop, **fields)
        request = inference_pb2.GenerateRequest(spec=spec)
        return self.stub.Generate(request, metadata=bearer(self.key), timeout=timeout)


def first_start(folder: pathlib.Path) -> None:
    """Makes, or hands out again, what the stack's containers mount."""
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    command = ["sh", str(DEPLOY / "first-start"), str(folder)]
    done = subprocess.run(command, env={**environment(), "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folder() -> Iterator[pathlib.Path]:
    """A folder whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="hr-") as name:
        yield pathlib.Path(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model_path: pathlib.Path, folder: pathlib.Path) -> AsyncIterator[Front]:
    """Everything, ready for a first call."""
    credentials = folder / "credentials"
    for name in ("authority", "service", "backend", "proxy", "caller"):
        (credentials / name).mkdir(parents=True)
    first_start(credentials)
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "keys_file": "keys.json"}
    address = free_address()
    async with engine(model_path, folder) as fake:
        settings = {name: credentials / "service" / file for name, file in files.items()}
        config = ServiceConfig(listen=(address,), engine=(fake.address,), **settings)  # type: ignore[arg-type]
        with (
            service_process(config.model_dump_json()) as process,
            running_proxy(folder, {"service": [address]}, credentials / "proxy") as proxy,
        ):
            trust = grpc.ssl_channel_credentials((credentials / "caller" / "ca.pem").read_bytes())
            async with grpc.aio.secure_channel(proxy.address, trust) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                found = Front(credentials, proxy, address, process.pid, fake, stub, channel)
                await until_serving(stub, process, bearer(found.key))
                yield found


@pytest.fixture
def front(running: Front) -> Front:
    """One proxy serves all tests.

    Its engine answers as fast as it can, unless a test says otherwise.
    """
    running.engine.running.set()
    running.engine.aborts.clear()
    running.engine.requests.clear()
    return running


async def test_tokens_pass_one_by_one_as_they_are_made(front: Front) -> None:
    front.engine.running.clear()
    call = front.generate(token_ids_only=True)
    await _until(lambda: front.engine.requests)
    for _ in range(NUM_TOKENS):
        front.engine.step()
        # No further token is made before this one is here.
        while not (await call.read()).event.delta.token_ids:
            pass
    await events_of(call)
    assert await call.code() is grpc.StatusCode.OK


async def test_a_pods_front_door_has_metrics_on_the_port_of_calls(front: Front, tmp_path: pathlib.Path) -> None:
    config = TelemetryConfig(telemetry_socket=tmp_path / "unused", metrics_listen="127.0.0.1:0")
    metrics = Metrics(config, ExportCounts())
    behind = {"service": [front.service], "metrics": [f"127.0.0.1:{await metrics.start()}"]}
    with running_proxy(tmp_path, behind, front.credentials / "proxy", "pod.yaml") as pod:
        trust = (front.credentials / "caller" / "ca.pem").read_bytes()
        async with grpc.aio.secure_channel(pod.address, grpc.ssl_channel_credentials(trust)) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(front.key))
        assert b"headrace_telemetry_queued_bytes" in await asyncio.to_thread(_fetched, pod.address, "/metrics", trust)
        # Of the telemetry process's paths only that one, and of HTTP/1.1 nothing else.
        with pytest.raises(urllib.error.HTTPError):
            await asyncio.to_thread(_fetched, pod.address, "/healthz", trust)
    await metrics.close(0)


def _fetched(address: str, path: str, trust: bytes) -> bytes:
    context = ssl.create_default_context(cadata=trust.decode())
    with urllib.request.urlopen(f"https://{address}{path}", timeout=60, context=context) as answer:
        content: bytes = answer.read()
        return content


async def test_many_streams_pass_at_once(front: Front) -> None:
    calls = [front.generate() for _ in range(300)]
    for events in await asyncio.gather(*map(events_of, calls)):
        assert len(ids_of(events)) == NUM_TOKENS


async def test_sessions_pass_both_ways(front: Front) -> None:
    front.engine.running.clear()
    session = front.stub.Session(metadata=bearer(front.key))
    for stream_id in (1, 2):
        stop = generation_pb2.StopConditions(max_tokens=NUM_TOKENS)
        spec = generation_pb2.GenerationSpec(text="hello", stop=stop, token_ids_only=True)
        submit = inference_pb2.SessionSubmit(spec=spec)
        await session.write(inference_pb2.SessionRequest(stream_id=stream_id, submit=submit))
        # Accepted before the next is sent: neither direction waits for the other's end.
        await _until_accepted(session, stream_id)
    front.engine.running.set()
    await session.done_writing()
    tokens = 0
    while (response := await session.read()) is not grpc.aio.EOF:
        tokens += len(response.tokens.token_ids)
    assert tokens == 2 * NUM_TOKENS
    assert await session.code() is grpc.StatusCode.OK


async def _until_accepted(session: grpc.aio.StreamStreamCall, stream_id: int) -> None:
    while True:
        response = await session.read()
        if any(event.event.HasField("accepted") and event.stream_id == stream_id for event in response.events):
            return


async def test_deadlines_and_cancels_reach_the_service(front: Front) -> None:
    front.engine.running.clear()
    late = front.generate(timeout=2)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await events_of(late)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await _until(lambda: len(front.engine.aborts) == 1)
    given_up = front.generate()
    await given_up.read()
    given_up.cancel()
    await _until(lambda: len(front.engine.aborts) == 2)


async def test_refusals_pass_with_their_details(front: Front) -> None:
    for call, code in (
        (front.stub.ListModels(inference_pb2.ListModelsRequest()), grpc.StatusCode.UNAUTHENTICATED),
        (front.generate(tokens=0), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call if code is grpc.StatusCode.UNAUTHENTICATED else await events_of(call)
        assert refused.value.code() is code
    assert "max_tokens" in refused.value.details()
    assert any(key == "grpc-status-details-bin" for key, _ in refused.value.trailing_metadata())


async def test_a_key_that_is_too_long_is_refused_by_the_service(front: Front) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer("x" * (60 << 10)))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_passes_without_a_key(front: Front) -> None:
    health = health_pb2_grpc.HealthStub(front.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
    assert (await health.Watch(health_pb2.HealthCheckRequest()).read()).status == serving


async def test_large_requests_and_answers_pass(front: Front) -> None:
    request = inference_pb2.TokenizeRequest(text="hello " * 250_000)
    answer = await front.stub.Tokenize(request, metadata=bearer(front.key))
    assert len(answer.token_ids) > 250_000


# 20 s, in which Envoy closes connections. Other floods end at the proxy below, and these at a
# service in tests/service/test_floods.
@pytest.mark.slow
async def test_header_blocks_without_end_end_at_the_proxy(front: Front) -> None:
    """Connections of peers that acknowledge no settings.

    gRPC would take 16 MiB of metadata of them.
    """
    service, proxy = PeakMemory(front.service_pid), PeakMemory(front.proxy.pid)
    for name, flood in BLOCKS.items():
        for acknowledges in (True, False):
            sent = await asyncio.to_thread(_flood, front, flood, acknowledges)
            assert sent < SENT, (name, acknowledges)
    small = BLOCKS["small fields"]
    await asyncio.gather(*(asyncio.to_thread(_flood, front, small, False) for _ in range(8)))
    assert len(ids_of(await events_of(front.generate()))) == NUM_TOKENS
    assert service.growth < 8 * MIB and proxy.growth < 32 * MIB, (service.growth, proxy.growth)


async def test_frames_that_no_flow_control_counts_do_not_reach_the_service(front: Front) -> None:
    service, proxy = PeakMemory(front.service_pid), PeakMemory(front.proxy.pid)
    for flood in FRAMES.values():
        await asyncio.to_thread(_flood, front, flood, True)
    assert len(ids_of(await events_of(front.generate()))) == NUM_TOKENS
    assert service.growth < 8 * MIB and proxy.growth < 32 * MIB, (service.growth, proxy.growth)


def _flood(front: Front, flood: Flood, acknowledges: bool) -> int:
    """Bytes that the proxy let come."""
    with FloodingPeer(front.proxy.address, acknowledges=acknowledges, tls=front.tls()) as peer:
        return peer.flood(flood, SENT)


async def test_a_new_certificate_is_shown_without_a_restart(front: Front) -> None:
    before = await asyncio.to_thread(_certificate, front)
    certs = front.credentials / "authority" / "callers"
    command = [sys.executable, "-m", "headrace", "certs", "server", str(certs), "--host", "service", "--replace"]
    await asyncio.to_thread(subprocess.run, command, env=environment(), check=True)
    await asyncio.to_thread(first_start, front.credentials)
    async with asyncio.timeout(240):
        while await asyncio.to_thread(_certificate, front) == before:
            await asyncio.sleep(0.1)
    assert len(ids_of(await events_of(front.generate()))) == NUM_TOKENS


def _certificate(front: Front) -> str:
    host, _, port = front.proxy.address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.01)
