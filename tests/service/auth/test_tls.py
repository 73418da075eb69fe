"""TLS and mTLS: which connections come about, and how certificates change at run time."""

from __future__ import annotations

import asyncio
import datetime
import pathlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from tests.service.auth.credentials_case import CertificateFolder, bearer, channel, entry, replace, write_keys
from tests.service.harness import Running, events_of, running_service, text_of

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_credentials.files import CredentialError
from headrace_credentials.server_tls import ServerTls, TlsFiles
from headrace_service.auth import api_keys, certificates

Spec = generation_pb2.GenerationSpec
LOG = structlog.get_logger()


@pytest.fixture
def files(tmp_path: pathlib.Path) -> CertificateFolder:
    return CertificateFolder.make(tmp_path)


async def list_models(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """How a call over a connection of its own ends."""
    async with channel(address, credentials) as connection:
        stub = inference_pb2_grpc.InferenceServiceStub(connection)
        try:
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def presented(address: str) -> x509.Certificate:
    """The certificate that a new connection is shown."""
    pem = await asyncio.to_thread(ssl.get_server_certificate, tuple(address.rsplit(":", 1)))  # type: ignore[arg-type]
    return x509.load_pem_x509_certificate(pem.encode())


async def until_presented(address: str, serial: int) -> None:
    async with asyncio.timeout(120):
        while (await presented(address)).serial_number != serial:
            await asyncio.sleep(0.05)


async def test_a_client_that_trusts_the_ca_is_served_and_others_are_not(
    model_path: pathlib.Path, sockets: pathlib.Path, files: CertificateFolder, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "other").mkdir()
    other = CertificateFolder.make(tmp_path / "other")
    async with running_service(
        model_path, sockets, **files.settings(), channel_credentials=files.channel_credentials()
    ) as running:
        assert await list_models(running.address, files.channel_credentials()) is grpc.StatusCode.OK
        assert await list_models(running.address, other.channel_credentials()) is grpc.StatusCode.UNAVAILABLE
        assert await list_models(running.address, grpc.ssl_channel_credentials()) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_of_another_name_is_not_believed(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    files = CertificateFolder.make(tmp_path, hosts=("elsewhere.example",))
    believed = files.channel_credentials()
    async with running_service(model_path, sockets, **files.settings(), channel_credentials=believed) as running:
        assert await list_models(running.address, believed) is grpc.StatusCode.UNAVAILABLE


async def test_with_mtls_only_clients_of_the_ca_are_served(
    model_path: pathlib.Path, sockets: pathlib.Path, files: CertificateFolder
) -> None:
    ours = certificates.new_client(files.ca, "app", 1)
    strangers = certificates.new_client(certificates.new_ca("test CA", 1), "app", 1)
    a_server = certificates.new_server(files.ca, ("localhost",), 1)
    credentials = files.channel_credentials(ours)
    async with running_service(
        model_path, sockets, **files.settings(mutual=True), channel_credentials=credentials
    ) as running:
        assert await list_models(running.address, files.channel_credentials(ours)) is grpc.StatusCode.OK
        for client in (None, strangers, a_server):
            code = await list_models(running.address, files.channel_credentials(client))
            assert code is grpc.StatusCode.UNAVAILABLE, client


async def test_plaintext_at_a_tls_port_and_tls_at_a_plaintext_port_are_unavailable(
    model_path: pathlib.Path, sockets: pathlib.Path, files: CertificateFolder, running: Running
) -> None:
    (sockets / "tls").mkdir()
    credentials = files.channel_credentials()
    async with running_service(model_path, sockets / "tls", **files.settings(), channel_credentials=credentials) as tls:
        assert await list_models(tls.address, None) is grpc.StatusCode.UNAVAILABLE
        await asyncio.to_thread(_send_rubbish, tls.address)
        assert await list_models(tls.address, credentials) is grpc.StatusCode.OK
    assert await list_models(running.address, credentials) is grpc.StatusCode.UNAVAILABLE
    assert await list_models(running.address, None) is grpc.StatusCode.OK


def _send_rubbish(address: str) -> None:
    host, port = address.rsplit(":", 1)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 300, b"\x00" * 100_000):
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            try:
                connection.sendall(data)
                while connection.recv(4096):
                    pass
            except ConnectionError:
                pass


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2", "TLSv1_3"])
async def test_tls_before_1_2_is_refused(
    model_path: pathlib.Path, sockets: pathlib.Path, files: CertificateFolder, version: str
) -> None:
    context = ssl.create_default_context(cadata=files.ca.certificate_pem().decode())
    context.set_alpn_protocols(["h2"])
    # OpenSSL itself refuses to speak anything so old at its usual security level.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]

    def handshake(address: str) -> str | None:
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=120) as plain:
            with context.wrap_socket(plain, server_hostname=host) as secure:
                return secure.version()

    async with running_service(
        model_path, sockets, **files.settings(), channel_credentials=files.channel_credentials()
    ) as running:
        if version == "TLSv1_1":
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(handshake, running.address)
        else:
            assert (await asyncio.to_thread(handshake, running.address)) == version.replace("_", ".")


async def test_new_connections_get_the_new_certificate_and_open_ones_live_on(
    model_path: pathlib.Path, sockets: pathlib.Path, files: CertificateFolder
) -> None:
    credentials = files.channel_credentials()
    async with running_service(
        model_path, sockets, **files.settings(), credentials_reload_s=0.05, channel_credentials=credentials
    ) as running:
        running.engine.running.clear()
        call = running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x")))
        await call.read()
        # Three in a row: each is taken, not only the first.
        for _ in range(3):
            renewed = certificates.new_server(files.ca, ("127.0.0.1",), 1)
            files.put(renewed)
            await until_presented(running.address, renewed.certificate.serial_number)
            assert await list_models(running.address, credentials) is grpc.StatusCode.OK
        running.engine.running.set()
        assert text_of(await events_of(call))


async def test_a_new_client_ca_holds_for_new_connections(
    model_path: pathlib.Path, sockets: pathlib.Path, files: CertificateFolder
) -> None:
    next_ca = certificates.new_ca("next CA", 1)
    before, after = (certificates.new_client(ca, "app", 1) for ca in (files.ca, next_ca))
    credentials = files.channel_credentials(before)
    async with running_service(
        model_path, sockets, **files.settings(mutual=True), credentials_reload_s=0.05, channel_credentials=credentials
    ) as running:
        await running.stub.ListModels(inference_pb2.ListModelsRequest())
        assert await list_models(running.address, files.channel_credentials(after)) is grpc.StatusCode.UNAVAILABLE
        replace(files.folder / "ca.pem", next_ca.certificate_pem())
        async with asyncio.timeout(120):
            while await list_models(running.address, files.channel_credentials(after)) is not grpc.StatusCode.OK:
                await asyncio.sleep(0.05)
        assert await list_models(running.address, files.channel_credentials(before)) is grpc.StatusCode.UNAVAILABLE
        # The connection from before is still there.
        await running.stub.ListModels(inference_pb2.ListModelsRequest())


def _other(files: CertificateFolder) -> certificates.Identity:
    return certificates.new_server(certificates.new_ca("x", 1), ("127.0.0.1",), 1)


def _of_key(files: CertificateFolder, key: Any) -> certificates.Identity:
    """A certificate of the folder's CA for another kind of key."""
    like = certificates.new_server(files.ca, ("localhost", "127.0.0.1"), 1).certificate
    builder = x509.CertificateBuilder(like.issuer, like.subject, key.public_key(), like.serial_number)
    builder = builder.not_valid_before(like.not_valid_before_utc).not_valid_after(like.not_valid_after_utc)
    for extension in like.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return certificates.Identity(key, builder.sign(files.ca.key, hashes.SHA256()))


# What is done to the files, by name.
_INVALID: dict[str, Callable[[CertificateFolder], Any]] = {
    "no PEM": lambda files: replace(files.certificate, b"not PEM"),
    "half a file": lambda files: replace(files.certificate, files.certificate.read_bytes()[:300]),
    "empty": lambda files: replace(files.certificate, b""),
    "key of another": lambda files: replace(files.key, _other(files).key_pem()),
    "certificate of another": lambda files: replace(files.certificate, _other(files).certificate_pem()),
    "expired": lambda files: files.put(certificates.new_server(files.ca, ("127.0.0.1",), 0)),
    "gone": lambda files: files.certificate.unlink(),
    "key readable by all": lambda files: replace(files.key, files.key.read_bytes() + b"\n", mode=0o644),
    "certificate writable by all": lambda files: replace(files.certificate, files.certificate.read_bytes(), mode=0o666),
    "chain cut off": lambda files: replace(
        files.certificate, files.certificate.read_bytes() + files.ca.certificate_pem()[:300]
    ),
    "key of Ed25519": lambda files: files.put(_of_key(files, ed25519.Ed25519PrivateKey.generate())),
    "key on P-521": lambda files: files.put(_of_key(files, ec.generate_private_key(ec.SECP521R1()))),
    "RSA of 1,024 bits": lambda files: files.put(_of_key(files, rsa.generate_private_key(65537, 1024))),
    "client CA is none": lambda files: replace(files.folder / "ca.pem", b"-----BEGIN"),
}


@pytest.mark.parametrize("name", _INVALID)
def test_files_that_are_invalid_are_logged_once_and_the_certificate_in_force_stays(
    files: CertificateFolder, name: str
) -> None:
    settings = files.settings(mutual=True)
    tls_files = TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_client_ca"])
    tls = ServerTls(tls_files, LOG)
    expires = tls.expires
    _INVALID[name](files)
    with structlog.testing.capture_logs() as lines:
        tls.reload()
        tls.reload()
    assert [line["event"] for line in lines] == ["tls.not_reloaded"]
    assert str(files.folder) in lines[0]["why"]
    assert "PRIVATE KEY" not in str(lines)
    assert tls.expires == expires
    # The same files are no way to begin.
    with pytest.raises(CredentialError):
        ServerTls(tls_files, LOG)
    # A valid pair is taken again.
    replace(files.folder / "ca.pem", files.ca.certificate_pem())
    files.put(certificates.new_server(files.ca, ("localhost",), 5))
    tls.reload()
    assert tls.expires > expires


def test_that_files_are_valid_again_is_logged_and_their_next_fault_too(files: CertificateFolder) -> None:
    tls = ServerTls(TlsFiles(files.certificate, files.key, None), LOG)
    valid = files.certificate.read_bytes()
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            for content in (b"", valid):
                replace(files.certificate, content)
                tls.reload()
                tls.reload()
    assert [line["event"] for line in lines] == ["tls.not_reloaded", "tls.reloaded"] * 2


def test_a_certificate_that_expires_in_force_is_logged_once(
    files: CertificateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ServerTls(TlsFiles(files.certificate, files.key, None), LOG)
    at = expires = tls.expires

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return at

    with structlog.testing.capture_logs() as lines:
        with monkeypatch.context() as patched:
            patched.setattr(datetime, "datetime", Clock)
            for after in (-1, 0, 1, 2):
                at = expires + datetime.timedelta(seconds=after)
                tls.reload()
                assert [line["event"] for line in lines] == ["tls.not_reloaded"] * (after >= 0)
        assert "has expired" in lines[0]["why"]
        files.put(certificates.new_server(files.ca, ("localhost",), 5))
        tls.reload()
    assert lines[-1]["event"] == "tls.reloaded"


# What editors and hands leave of a file that holds the right certificates.
_LEFT: dict[str, Callable[[bytes], bytes]] = {
    "byte order mark": lambda pem: b"\xef\xbb\xbf" + pem,
    "spaces before lines": lambda pem: b"  " + pem.replace(b"\n-----BEGIN", b"\n  -----BEGIN"),
    "CR LF": lambda pem: pem.replace(b"\n", b"\r\n"),
    "CR alone": lambda pem: pem.replace(b"\n", b"\r"),
    "no line between certificates": lambda pem: pem.replace(b"\n-----BEGIN", b"-----BEGIN").strip(),
    "a comment": lambda pem: "# Autorität\n".encode() + pem,
}


@pytest.mark.parametrize("name", _LEFT)
async def test_what_editors_leave_in_a_file_is_served(files: CertificateFolder, name: str) -> None:
    ours = certificates.new_client(files.ca, "app", 1)
    chain = files.certificate.read_bytes() + files.ca.certificate_pem()
    replace(files.certificate, _LEFT[name](chain))
    replace(files.key, _LEFT[name](files.key.read_bytes()))
    client_ca = replace(files.folder / "clients.pem", _LEFT[name](files.ca.certificate_pem()))
    tls = ServerTls(TlsFiles(files.certificate, files.key, client_ca), LOG)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", tls.port_credentials())
    await server.start()
    try:
        # There is no such method, as a service says whose certificate was believed.
        assert await list_models(f"127.0.0.1:{port}", files.channel_credentials(ours)) is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)
    # OpenSSL was given the chain, too.
    assert tls.ssl_context().get_ca_certs()


async def test_what_openssl_made_is_served_as_well(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A CA, an RSA key and a certificate by other hands than ours."""
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=server",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile names",
    ):
        (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True, timeout=600)
    (tmp_path / "server.key").chmod(0o600)
    credentials = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    async with running_service(
        model_path,
        sockets,
        tls_cert=tmp_path / "server.pem",
        tls_key=tmp_path / "server.key",
        channel_credentials=credentials,
    ) as running:
        assert await list_models(running.address, credentials) is grpc.StatusCode.OK


async def test_mtls_and_keys_go_together(
    model_path: pathlib.Path, sockets: pathlib.Path, files: CertificateFolder
) -> None:
    key = api_keys.new_key()
    keys_file = write_keys(files.folder / "keys.json", entry(key, "app"))
    credentials = files.channel_credentials(certificates.new_client(files.ca, "machine", 1))
    settings = {**files.settings(mutual=True), "keys_file": keys_file}
    async with running_service(model_path, sockets, **settings, channel_credentials=credentials) as running:
        assert await list_models(running.address, credentials) is grpc.StatusCode.UNAUTHENTICATED
        await running.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(key))


def test_a_slow_disk_holds_up_no_handshake(files: CertificateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetcher of grpc gets what lies ready, even while a reload is reading."""
    settings = files.settings()
    tls = ServerTls(TlsFiles(settings["tls_cert"], settings["tls_key"], None), LOG)
    asked: list[Any] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda first, newer, **_: asked.append(newer))
    tls.port_credentials()
    tls.port_credentials()
    go_on = threading.Event()
    read = pathlib.Path.open
    monkeypatch.setattr(pathlib.Path, "open", lambda path, mode: (go_on.wait(30), read(path, mode))[1])
    reloading = threading.Thread(target=tls.reload)
    reloading.start()
    assert [newer() for newer in asked] == [None, None]
    go_on.set()
    reloading.join(120)
    monkeypatch.setattr(pathlib.Path, "open", read)
    files.put(certificates.new_server(files.ca, ("localhost",), 9))
    tls.reload()
    # Each port hears of it, once.
    assert all(newer() is not None for newer in asked)
    assert [newer() for newer in asked] == [None, None]
