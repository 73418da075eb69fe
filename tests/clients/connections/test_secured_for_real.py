"""Clients and command line against a real server with TLS and keys.

Certificates and keys are made by `headrace certs` and `headrace keys`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner
from tests.support.running_server import running_server

import headrace
from headrace import AdminClient, AsyncClient, Client, Tls
from headrace.cli import main
from headrace_service.auth.certs_command import certs
from headrace_service.auth.keys_command import keys


@dataclass(frozen=True)
class Secured:
    """A server, and the files of its callers.

    One key may do everything, another may only read.
    """

    address: str
    folder: pathlib.Path
    operator_key: str
    reader_key: str

    @property
    def tls(self) -> Tls:
        """What a caller of this server needs."""
        return Tls(ca=self.folder / "ca.pem", certificate=self.folder / "caller.pem", key=self.folder / "caller.key")


def _run(command: click.Command, *arguments: str) -> str:
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


# A real server with keys and certificates is in tests/e2e/test_secured_server, clients with both
# speak to canned answers in test_security.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    certificates, keys_file = folder / "certs", str(folder / "keys.json")
    _run(certs, "init", str(certificates))
    _run(certs, "client", str(certificates), "caller")
    everything = ("--allow", "generate", "--allow", "read", "--allow", "admin")
    operator = _run(keys, "new", "operator", "--keys-file", keys_file, *everything)
    reader = _run(keys, "new", "reader", "--keys-file", keys_file, "--allow", "read")
    files = {"--tls-cert": "server.pem", "--tls-key": "server.key", "--tls-client-ca": "ca.pem"}
    flags = [part for flag, name in files.items() for part in (flag, str(certificates / name))]
    with running_server("--num-blocks", "512", "--keys-file", keys_file, *flags) as server:
        yield Secured(server.address, certificates, operator, reader)


async def test_a_caller_with_certificate_and_key_is_served(secured: Secured) -> None:
    with Client(secured.address, tls=secured.tls, api_key=secured.operator_key, channels=2) as client:
        whole = client.complete("Once upon a time", max_tokens=8, temperature=0)
        assert (
            client.subscribe(client.submit("Once upon a time", max_tokens=8, temperature=0)).result().text == whole.text
        )
        with client.session() as session:
            assert session.submit("Once upon a time", max_tokens=8, temperature=0).result().text == whole.text
    async with AsyncClient(secured.address, tls=secured.tls, api_key=secured.operator_key) as other:
        assert (await other.complete("Once upon a time", max_tokens=8, temperature=0)).text == whole.text


def test_without_a_known_key_nothing_is_allowed_and_with_a_readers_only_reading(secured: Secured) -> None:
    for key in (None, "hr-unknown"):
        with Client(secured.address, tls=secured.tls, api_key=key) as client, pytest.raises(headrace.Unauthenticated):
            client.load()
    with Client(secured.address, tls=secured.tls, api_key=secured.reader_key) as client:
        assert client.load().model == "demo"
        with pytest.raises(headrace.PermissionDenied):
            client.complete("hello", max_tokens=1)
        with pytest.raises(headrace.PermissionDenied), client.session() as session:
            session.submit("hello", max_tokens=1).result()
    with AdminClient(secured.address, tls=secured.tls, api_key=secured.reader_key) as admin:
        with pytest.raises(headrace.PermissionDenied):
            admin.drain()


def test_an_operator_drains_resumes_and_looks(secured: Secured) -> None:
    with AdminClient(secured.address, tls=secured.tls, api_key=secured.operator_key) as admin:
        assert [(row.name, row.state) for row in admin.list_repository()] == [("demo", headrace.ModelState.READY)]
        assert admin.load_model("demo").existing
        plan = admin.memory_plan()
        assert plan is not None and plan.kv_cache_bytes > 0
        admin.drain()
        try:
            with Client(secured.address, tls=secured.tls, api_key=secured.operator_key) as client:
                assert client.load().draining
                with pytest.raises(headrace.Unavailable):
                    client.generate("hello", max_tokens=1).result()
        finally:
            admin.resume()


def test_the_command_line_reaches_it_by_variables(secured: Secured) -> None:
    variables = {
        "HEADRACE_SERVER": secured.address,
        "HEADRACE_API_KEY": secured.operator_key,
        "HEADRACE_CA": str(secured.folder / "ca.pem"),
        "HEADRACE_CLIENT_CERTIFICATE": str(secured.folder / "caller.pem"),
        "HEADRACE_CLIENT_KEY": str(secured.folder / "caller.key"),
    }
    for command in (["generate", "Once upon a time", "--max-tokens", "4"], ["admin", "models"]):
        done = CliRunner().invoke(main, command, env=variables)
        assert done.exit_code == 0 and done.stdout.strip(), done.output
    refused = CliRunner().invoke(main, ["admin", "drain"], env=variables | {"HEADRACE_API_KEY": secured.reader_key})
    assert refused.exit_code == 1 and "PERMISSION_DENIED" in refused.stderr


def test_a_caller_without_tls_learns_how_a_server_with_it_is_reached(secured: Secured) -> None:
    done = CliRunner().invoke(main, ["models", "--server", secured.address])
    assert done.exit_code == 1 and "one that speaks TLS does that: --tls, or --ca" in done.stderr
