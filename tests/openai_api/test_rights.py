"""Who may call OpenAI's HTTP API: keys, permissions, models, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import ssl

import httpx2
import pytest
import uvloop
from tests.openai_api.harness import CHAT, HELLO, Running, running_door
from tests.service.auth.credentials_case import CertificateFolder, entry, replace, write_keys

from headrace_service.auth import certificates
from headrace_service.auth.api_keys import Limits

KEY, READER, OTHER = "hr-key", "hr-reader", "hr-other"


@pytest.fixture
def keys_file(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_keys(
        tmp_path / "keys.json",
        entry(KEY, "app", limits=Limits(requests_per_minute=60, tokens_per_minute=5000)),
        entry(READER, "reader", ("read",)),
        entry(OTHER, "other", models=("another",)),
    )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(response: httpx2.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]


async def test_keys_permissions_and_models_are_those_of_grpc(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with running_door(model_path, sockets, keys_file=keys_file) as running:
        get, post = running.client.get, running.post
        for headers in ({}, bearer("wrong"), {"authorization": KEY}, {"x-api-key": KEY}):
            refused = await post(CHAT, {"messages": HELLO}, **headers)
            assert error_of(refused) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (await get("/v1/models", headers=headers)).status_code == 401
        answer = await post(CHAT, {"messages": HELLO}, **bearer(KEY))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "60"
        assert answer.headers["x-ratelimit-limit-tokens"] == "5000"
        add = running.newest.add
        assert (add.tenant, add.limits.requests_per_minute) == ("app", 60)
        assert error_of(await post(CHAT, {"messages": HELLO}, **bearer(READER))) == (403, "permission_denied")
        assert (await get("/v1/models", headers=bearer(READER))).status_code == 200
        assert (await get("/v1/models", headers=bearer(OTHER))).json()["data"] == []
        for name in ("tiny", "no such model"):
            # Whether there is such a model is not said.
            named = {"model": name, "messages": HELLO}
            assert error_of(await post(CHAT, named, **bearer(OTHER))) == (403, "permission_denied")
        assert (await get("/health")).status_code == 200


async def test_health_asks_for_a_key_where_it_should(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with running_door(model_path, sockets, keys_file=keys_file, health_needs_key=True) as running:
        assert (await running.client.get("/health")).status_code == 401
        assert (await running.client.get("/health", headers=bearer(READER))).status_code == 200


async def test_a_stream_ends_with_its_key(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with running_door(model_path, sockets, keys_file=keys_file, credentials_reload_s=0.05) as running:
        running.engine.running.clear()
        asking = asyncio.create_task(running.post(CHAT, {"messages": HELLO, "stream": True}, **bearer(KEY)))
        await running.until(lambda: running.engine.requests)
        write_keys(keys_file, entry(READER, "reader"))
        assert '"code":"invalid_api_key"' in (await asking).text
        await running.until(lambda: running.engine.aborts)


def trusting(folder: CertificateFolder, client: certificates.Identity | None = None) -> ssl.SSLContext:
    """What a client needs that trusts the folder's CA."""
    context = ssl.create_default_context(cafile=str(folder.folder / "ca.pem"))
    if client is not None:
        replace(folder.folder / "client.key", client.key_pem())
        replace(folder.folder / "client.pem", client.certificate_pem())
        context.load_cert_chain(folder.folder / "client.pem", folder.folder / "client.key")
    return context


def test_handshakes_side_by_side_in_the_loop_that_servers_run(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = CertificateFolder.make(tmp_path)

    async def shake_hands() -> None:
        context = trusting(folder)
        async with running_door(model_path, sockets, client={"verify": context}, **folder.settings()) as running:
            await asyncio.gather(*(asked_anew(running, context) for _ in range(30)))

    uvloop.run(shake_hands())


async def test_handshakes_count_as_connections(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = CertificateFolder.make(tmp_path)
    settings = {**folder.settings(), "max_connections": 2, "handshake_timeout_s": 60.0}
    async with running_door(model_path, sockets, client={"verify": trusting(folder)}, **settings) as running:
        # The harness's own client has one connection, and one says nothing.
        assert (await running.client.get("/health")).status_code == 200
        host, _, port = running.address.rpartition(":")
        _, silent = await asyncio.open_connection(host, int(port))
        reader, beyond = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        for writer in (silent, beyond):
            writer.close()
        (acceptor,) = running.door._http.servers
        await running.until(lambda: not acceptor.num_handshakes)
        await asked_anew(running, trusting(folder))


async def asked_anew(running: Running, context: ssl.SSLContext) -> bytes:
    """The server's certificate, on a connection of its own that is answered."""
    host, _, port = running.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = await reader.readuntil(b"\r\n")
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    return certificate


async def test_tls_follows_its_files_and_asks_clients_for_certificates(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = CertificateFolder.make(tmp_path)
    context = trusting(folder, certificates.new_client(folder.ca, "app", 2))
    settings = {**folder.settings(mutual=True), "credentials_reload_s": 0.05}
    async with running_door(model_path, sockets, client={"verify": context}, **settings) as running:
        assert (await running.post(CHAT, {"messages": HELLO})).status_code == 200
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await asked_anew(running, trusting(folder))
        before = await asked_anew(running, context)
        folder.put(certificates.new_server(folder.ca, ("localhost", "127.0.0.1"), 2))
        while await asked_anew(running, context) == before:
            await asyncio.sleep(0.02)
        # A new CA: its clients come in, the old one's do not.
        newer = CertificateFolder.make(tmp_path)
        context = trusting(newer, certificates.new_client(newer.ca, "app", 2))
        async with asyncio.timeout(240):
            while True:
                try:
                    await asked_anew(running, context)
                    break
                except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
                    await asyncio.sleep(0.02)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
async def test_no_session_outlives_the_client_ca_that_it_began_under(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path, version: ssl.TLSVersion
) -> None:
    folder = CertificateFolder.make(tmp_path)
    context = trusting(folder, certificates.new_client(folder.ca, "app", 2))
    context.maximum_version = version
    settings = {**folder.settings(mutual=True), "credentials_reload_s": 0.05}
    async with running_door(model_path, sockets, client={"verify": context}, **settings) as running:
        session, _ = await asyncio.to_thread(resumed, running.address, context, None)
        assert (await asyncio.to_thread(resumed, running.address, context, session))[1]
        replace(folder.folder / "ca.pem", certificates.new_ca("next", 2).certificate_pem())
        async with asyncio.timeout(240):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                while True:
                    await asyncio.to_thread(resumed, running.address, context, session)
                    await asyncio.sleep(0.02)


def resumed(
    address: str, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[ssl.SSLSession | None, bool | None]:
    """The session of a new connection that is answered, and whether it goes on from another one."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=120) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as secure,
    ):
        secure.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        if not secure.recv(4096):
            raise ConnectionError
        return secure.session, secure.session_reused
