"""Keys and TLS in both clients.

They say what goes over which connection, who trusts whom, and what is refused before anything is
sent.
"""

from __future__ import annotations

import pathlib

import grpc
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st
from tests.clients.canned_service import REQUEST_ID, CannedServer, answer
from tests.clients.secured_server import API_KEY, Certificates, secured_server

import headrace
from headrace import AdminClient, AsyncAdminClient, AsyncClient, Client, RetryPolicy, Tls
from headrace.cli import main
from headrace.security import is_local

ONCE = RetryPolicy(max_attempts=1)


def test_every_call_carries_the_key_over_tls(certificates: Certificates) -> None:
    tls = Tls(ca=certificates.ca.certificate)
    with secured_server(certificates) as server:
        with Client(server.address, api_key=API_KEY, tls=tls) as client:
            assert client.complete("hello").text == answer(2)
            assert client.generate("hello", max_tokens=2).result().text == answer(2)
            assert client.subscribe(REQUEST_ID).result().text == answer(12)
            with client.session() as session:
                assert session.submit("hello", max_tokens=2).result().text == answer(2)
        with AdminClient(server.address, api_key=API_KEY, tls=tls) as admin:
            assert len(admin.list_repository()) == 3
        assert {seen["authorization"] for seen in server.seen.metadata} == {f"Bearer {API_KEY}"}


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", "# Főtanúsítvány\n".encode()], ids=["byte order mark", "comment"])
def test_other_letters_in_the_file_of_authorities_do_no_harm(
    certificates: Certificates, tmp_path: pathlib.Path, before: bytes
) -> None:
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(before + pathlib.Path(certificates.ca.certificate).read_bytes())
    with (
        secured_server(certificates) as server,
        Client(server.address, api_key=API_KEY, tls=Tls(ca=authorities)) as client,
    ):
        assert client.complete("hello").text == answer(2)


async def test_async_calls_carry_the_key_over_tls(certificates: Certificates) -> None:
    tls = Tls(ca=certificates.ca.certificate)
    with secured_server(certificates) as server:
        async with AsyncClient(server.address, api_key=API_KEY, tls=tls) as client:
            assert (await client.complete("hello")).text == answer(2)
            async with client.session() as session:
                assert (await session.submit("hello", max_tokens=2).result()).text == answer(2)
        async with AsyncAdminClient(server.address, api_key=API_KEY, tls=tls) as admin:
            assert (await admin.drain()).running_sequences == 3


def test_no_key_and_a_wrong_key_are_unauthenticated(certificates: Certificates) -> None:
    with secured_server(certificates) as server:
        for key in (None, "wrong"):
            with Client(server.address, api_key=key, tls=Tls(ca=certificates.ca.certificate)) as client:
                for call in (
                    client.load,
                    client.generate("hello").result,
                    lambda c=client: c.session().submit("x").result(),
                ):
                    with pytest.raises(headrace.Unauthenticated, match="an API key is needed") as caught:
                        call()
                    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
                    assert not isinstance(caught.value, headrace.PermissionDenied)


def test_a_key_goes_to_this_machine_without_tls_and_to_no_other(server: CannedServer) -> None:
    with Client(server.address, api_key="k") as client:
        client.load()
    assert server.seen.metadata[0]["authorization"] == "Bearer k"
    for kind in (Client, AsyncClient, AdminClient, AsyncAdminClient):
        with pytest.raises(ValueError, match="in the clear") as caught:
            kind("llm.example.com:443", api_key="very-secret")
        assert "very-secret" not in str(caught.value)
    Client("llm.example.com:443", api_key="k", allow_plaintext_key=True).close()
    Client("llm.example.com:443", api_key="k", tls=True).close()
    Client("llm.example.com:443").close()


LOCAL = [
    "127.0.0.1:50051",
    "127.8.9.1:1",
    "localhost:1",
    "LOCALHOST:1",
    "localhost",
    "[::1]:50051",
    "[::1]",
    "unix:/run/x.sock",
    "unix:///run/x.sock",
    "unix-abstract:x",
    "dns:///localhost:1",
    "dns:127.0.0.1:1",
    "ipv4:127.0.0.1:1,127.0.0.2:1",
    "ipv6:[::1]:1",
]
ELSEWHERE = [
    "127.example.com:1",
    "127.0.0.1.example.com:1",
    "localhost.example.com:1",
    "10.0.0.1:1",
    "0.0.0.0:1",
    "[::]:1",
    "example.com",
    "dns://127.0.0.1/example.com:1",
    "ipv4:127.0.0.1:1,10.0.0.1:1",
    "dns:///example.com:1",
    "",
    "xds:///localhost",
    "passthrough:///127.0.0.1:1",
    "[::1",
    "[::1].example.com:1",
    "[::1]example.com",
    "user@127.0.0.1:1",
    "127.1:1",
]


def test_only_loopback_and_sockets_are_this_machine() -> None:
    assert [address for address in LOCAL if not is_local(address)] == []
    assert [address for address in ELSEWHERE if is_local(address)] == []


@given(st.text("0127.localhstunix-:[]", max_size=30))
def test_no_name_is_taken_for_this_machine(name: str) -> None:
    assert is_local(f"{name}.com:443") == name.startswith("unix:")


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "a\r\nx: y", "schlüssel", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must be"):
        Client(api_key=key)


def test_options_that_contradict_each_other_are_refused(certificates: Certificates) -> None:
    with pytest.raises(ValueError, match="not both"):
        Client(api_key="k", metadata=[("Authorization", "Bearer x")])
    with pytest.raises(ValueError, match="not both"):
        Client(tls=True, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(ValueError, match="belong together"):
        Tls(certificate=certificates.caller.certificate)
    with pytest.raises(TypeError, match="api_kee"):
        Client(api_kee="k")  # type: ignore[call-arg]


def test_files_that_are_none_are_refused_by_name(certificates: Certificates, tmp_path: pathlib.Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no certificate")
    encrypted = tmp_path / "encrypted.key"
    key = serialization.load_pem_private_key(certificates.caller.key.read_bytes(), password=None)
    lock = serialization.BestAvailableEncryption(b"a passphrase")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    encrypted.write_bytes(key.private_bytes(pem, pkcs8, lock))
    caller, other = certificates.caller, certificates.server
    with pytest.raises(FileNotFoundError):
        Client(tls=Tls(ca=tmp_path / "missing.pem"))
    with pytest.raises(FileNotFoundError):
        Client(tls=Tls(certificate=caller.certificate, key=tmp_path / "missing.key"))
    for ca in (text, certificates.ca.key):
        with pytest.raises(ValueError, match=ca.name):
            Client(tls=Tls(ca=ca))
    for certificate, key in ((caller.certificate, other.key), (caller.certificate, encrypted), (text, caller.key)):
        with pytest.raises(ValueError, match="no certificate and its unencrypted key"):
            Client(tls=Tls(certificate=certificate, key=key))


def test_the_server_must_prove_its_name_to_an_authority_that_is_trusted(certificates: Certificates) -> None:
    with secured_server(certificates, with_key=False) as server:
        for tls in (
            Tls(ca=certificates.other_ca.certificate),
            Tls(ca=certificates.ca.certificate, server_name="other.test"),
            True,
        ):
            with Client(server.address, tls=tls, retry=ONCE) as client, pytest.raises(headrace.Unavailable):
                client.load(timeout=120)
        with Client(server.address, tls=Tls(ca=certificates.ca.certificate, server_name="headrace.test")) as client:
            client.load()
        with Client(server.address, retry=ONCE) as client, pytest.raises(headrace.Unavailable):
            client.load(timeout=120)


def test_the_system_s_authorities_are_trusted(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that SSL_CERT_FILE names holds the authorities.

    It is how an administrator names them; the file that comes with gRPC would not know this one.
    """
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca.certificate))
    with secured_server(certificates) as server, Client(server.address, tls=True, api_key=API_KEY) as client:
        client.load()


async def test_a_server_that_asks_for_certificates_gets_one(certificates: Certificates) -> None:
    ca, caller = certificates.ca.certificate, certificates.caller
    with secured_server(certificates, mutual=True, with_key=False) as server:
        with Client(server.address, tls=Tls(ca=ca), retry=ONCE) as client, pytest.raises(headrace.Unavailable):
            client.load(timeout=120)
        tls = Tls(ca=ca, certificate=caller.certificate, key=caller.key)
        with Client(server.address, tls=tls) as client:
            client.load()
        async with AsyncClient(server.address, tls=tls) as other:
            await other.load()


def test_no_message_shows_a_key(server: CannedServer) -> None:
    with Client(server.address, api_key="very-secret") as client:
        assert "very-secret" not in repr(client) + repr(client._endpoint)
        with pytest.raises(headrace.NotFound) as caught:
            client.get_model("other")
        assert "very-secret" not in f"{caught.value!r} {caught.value}"


def test_the_command_line_takes_key_and_files_from_options_and_variables(certificates: Certificates) -> None:
    caller = certificates.caller
    files = {
        "HEADRACE_CA": certificates.ca.certificate,
        "HEADRACE_CLIENT_CERTIFICATE": caller.certificate,
        "HEADRACE_CLIENT_KEY": caller.key,
        "HEADRACE_SERVER_NAME": "headrace.test",
    }
    variables = {name: str(value) for name, value in files.items()}
    options = [
        part
        for name, value in variables.items()
        for part in ("--" + name.removeprefix("HEADRACE_").lower().replace("_", "-"), value)
    ]
    with secured_server(certificates, mutual=True) as server:
        common = {"HEADRACE_SERVER": server.address}
        runner = CliRunner()
        by_variables = runner.invoke(main, ["load"], env=common | variables | {"HEADRACE_API_KEY": API_KEY})
        assert by_variables.exit_code == 0, by_variables.output
        by_options = runner.invoke(main, ["load", *options, "--api-key", API_KEY], env=common)
        assert by_options.exit_code == 0, by_options.output
        refused = runner.invoke(main, ["load", *options], env=common)
        assert refused.exit_code == 1 and "UNAUTHENTICATED" in refused.stderr and "HEADRACE_API_KEY" in refused.stderr
        strange = runner.invoke(main, ["load", "--ca", str(certificates.other_ca.certificate)], env=common)
        assert strange.exit_code == 1 and "--ca" in strange.stderr


def test_a_command_line_with_a_key_for_the_open_network_is_wrong_usage(certificates: Certificates) -> None:
    key = ["--api-key", "very-secret", "--server", "llm.example.com:443"]
    for arguments in (key, ["--client-key", str(certificates.caller.key)], ["--ca", "missing.pem"]):
        result = CliRunner().invoke(main, ["load", *arguments])
        assert result.exit_code == 2
        assert "very-secret" not in result.output and "Traceback" not in result.output
