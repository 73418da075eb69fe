"""Limits of connections: how many, how long they may take to begin, how often they may ping."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import ssl
import time

import grpc
from tests.service.auth.credentials_case import CertificateFolder, channel
from tests.service.harness import events_of, running_service, text_of

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

LIST = inference_pb2.ListModelsRequest()


async def lists(connection: grpc.aio.Channel) -> grpc.StatusCode:
    try:
        await inference_pb2_grpc.InferenceServiceStub(connection).ListModels(LIST, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_connections_beyond_the_limit_are_closed_and_those_within_live(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, max_connections=3) as running, contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(channel(running.address)) for _ in range(3)]
        for connection in held:
            assert await lists(connection) is grpc.StatusCode.OK
        async with channel(running.address) as beyond:
            assert await lists(beyond) is grpc.StatusCode.UNAVAILABLE
        assert [await lists(connection) for connection in held] == [grpc.StatusCode.OK] * 3
        await held[0].close()
        async with asyncio.timeout(120), channel(running.address) as after:
            while await lists(after) is not grpc.StatusCode.OK:
                await asyncio.sleep(0.05)


async def test_connections_that_never_speak_are_closed(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    files = CertificateFolder.make(tmp_path)
    for settings in ({}, files.settings()):
        (sockets / str(len(settings))).mkdir()
        async with running_service(
            model_path, sockets / str(len(settings)), handshake_timeout_s=1.0, **settings
        ) as running:
            began = time.monotonic()
            await asyncio.gather(*(asyncio.to_thread(_until_closed, running.address) for _ in range(8)))
            assert time.monotonic() - began < 60


def _until_closed(address: str) -> None:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=120) as silent:
        with contextlib.suppress(ConnectionError):
            while silent.recv(4096):
                pass


async def test_a_client_that_starts_tls_and_stops_is_closed(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    files = CertificateFolder.make(tmp_path)
    credentials = files.channel_credentials()

    def half_a_handshake(address: str) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = ssl.create_default_context(cadata=files.ca.certificate_pem().decode()).wrap_bio(
            incoming, outgoing, server_hostname="localhost"
        )
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        hello = outgoing.read()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(hello[: len(hello) // 2])
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass

    async with running_service(
        model_path, sockets, handshake_timeout_s=5.0, **files.settings(), channel_credentials=credentials
    ) as running:
        await asyncio.to_thread(half_a_handshake, running.address)
        assert await lists(running.channel) is grpc.StatusCode.OK


async def test_an_old_connection_is_made_anew_and_its_streams_go_on(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, max_connection_age_s=0.3) as running:
        running.engine.running.clear()
        spec = generation_pb2.GenerationSpec(text="x")
        call = running.stub.Generate(inference_pb2.GenerateRequest(spec=spec))
        await call.read()
        await asyncio.sleep(1.0)
        assert await lists(running.channel) is grpc.StatusCode.OK
        running.engine.running.set()
        assert text_of(await events_of(call))


async def test_connections_without_calls_are_closed_and_those_with_one_go_on(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    begins = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000000000040100000000")

    def idles(address: str) -> bytes:
        host, port = address.rsplit(":", 1)
        said = b""
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(begins)
            with contextlib.suppress(ConnectionError):
                while received := connection.recv(4096):
                    said += received
        return said

    async with running_service(model_path, sockets, max_connection_idle_s=1.0) as running:
        running.engine.running.clear()
        spec = generation_pb2.GenerationSpec(text="x")
        call = running.stub.Generate(inference_pb2.GenerateRequest(spec=spec))
        await call.read()
        assert b"connection idle" in await asyncio.to_thread(idles, running.address)
        running.engine.running.set()
        assert text_of(await events_of(call))


async def test_a_client_that_pings_too_often_is_sent_away(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    ping = bytes.fromhex("000008060000000000") + bytes(8)

    def pings(address: str) -> bytes:
        host, port = address.rsplit(":", 1)
        said = b""
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(preface)
            # Read as it comes: a connection that is reset loses what was not read yet.
            connection.settimeout(0.05)
            with contextlib.suppress(ConnectionError):
                for _ in range(200):
                    connection.sendall(ping)
                    with contextlib.suppress(TimeoutError):
                        said += connection.recv(4096)
        return said

    async with running_service(model_path, sockets) as running:
        assert b"too_many_pings" in await asyncio.to_thread(pings, running.address)
        assert await lists(running.channel) is grpc.StatusCode.OK
