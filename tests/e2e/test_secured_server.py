"""`headrace serve` in an installation that others reach.

It has certificates and keys by our own commands, several services, and quotas over all of them.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from tests.support.rpc import CALL_TIMEOUT_S, details, greedy, read
from tests.support.running_server import RunningServer, environment, refused, running_server

from headrace.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.timeout(900)


def headrace(*arguments: str | pathlib.Path) -> str:
    """Runs a command as people do; returns its standard output."""
    command = [sys.executable, "-m", "headrace", *map(str, arguments)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


class Installation:
    """Files that a first installation makes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.certs, self.keys_file = folder / "certs", folder / "keys.json"
        headrace("certs", "init", self.certs)
        headrace("certs", "client", self.certs, "app")
        self.key = headrace("keys", "new", "app", "--keys-file", self.keys_file)
        self.bounded = headrace(
            "keys", "new", "bounded", "--keys-file", self.keys_file,
            "--requests-per-minute", "4", "--tokens-per-minute", "100000"
        )  # fmt: skip

    def options(self) -> list[str]:
        named = {
            "--tls-cert": self.certs / "server.pem",
            "--tls-key": self.certs / "server.key",
            "--tls-client-ca": self.certs / "ca.pem",
            "--keys-file": self.keys_file,
            "--credentials-reload-s": "0.2",
        }
        return [str(part) for option in named.items() for part in option]

    @contextmanager
    def connected(self, server: RunningServer) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
        """A stub on a connection of its own."""
        credentials = grpc.ssl_channel_credentials(
            *((self.certs / name).read_bytes() for name in ("ca.pem", "app.key", "app.pem"))
        )
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(server.address, credentials, options) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("installation"))


@pytest.fixture(scope="module")
def server(installation: Installation) -> Iterator[RunningServer]:
    with running_server("--services", "2", "--health-needs-key", *installation.options()) as running:
        yield running


def generate(stub: inference_pb2_grpc.InferenceServiceStub, key: str, tokens: int = 4) -> str:
    request = inference_pb2.GenerateRequest(spec=greedy("The river", tokens))
    stream = stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=CALL_TIMEOUT_S)
    return read(stream).texts[0]


def test_a_client_with_certificate_and_key_is_served(installation: Installation, server: RunningServer) -> None:
    with installation.connected(server) as stub:
        assert generate(stub, installation.key)
        with pytest.raises(grpc.RpcError) as refusal:
            generate(stub, "hr-wrong")
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_without_certificate_or_tls_there_is_no_connection(installation: Installation, server: RunningServer) -> None:
    trusting = grpc.ssl_channel_credentials((installation.certs / "ca.pem").read_bytes())
    for channel in (grpc.secure_channel(server.address, trusting), grpc.insecure_channel(server.address)):
        with channel, pytest.raises(grpc.RpcError) as failure:
            generate(inference_pb2_grpc.InferenceServiceStub(channel), installation.key)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_a_quota_holds_over_all_services(installation: Installation, server: RunningServer) -> None:
    """Connections spread over the services; the books are the engine's."""
    outcomes = []
    for _ in range(10):
        with installation.connected(server) as stub:
            try:
                generate(stub, installation.bounded)
                outcomes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                outcomes.append(error.code())  # type: ignore[attr-defined]
                assert "RetryInfo" in details(error.trailing_metadata())  # type: ignore[attr-defined]
    assert outcomes.count(grpc.StatusCode.OK) == 4
    assert outcomes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 6
    with installation.connected(server) as stub:
        assert generate(stub, installation.key)


def test_a_revoked_key_is_refused_by_every_service(installation: Installation, server: RunningServer) -> None:
    key = headrace("keys", "new", "leaver", "--keys-file", installation.keys_file)
    _until(lambda: _all_services(installation, server, key, grpc.StatusCode.OK))
    headrace("keys", "revoke", "leaver", "--keys-file", installation.keys_file)
    _until(lambda: _all_services(installation, server, key, grpc.StatusCode.UNAUTHENTICATED))


def _all_services(installation: Installation, server: RunningServer, key: str, expected: grpc.StatusCode) -> bool:
    """Whether ten new connections, spread over the services by the kernel, get one answer."""
    for _ in range(10):
        with installation.connected(server) as stub:
            try:
                stub.ListModels(
                    inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {key}"),), timeout=60
                )
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
        if code is not expected:
            return False
    return True


def _until(condition: object, timeout_s: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_our_own_client_and_bench_get_in_by_the_same_options(installation: Installation, server: RunningServer) -> None:
    folder = installation.certs
    files = ["--ca", folder / "ca.pem", "--client-certificate", folder / "app.pem", "--client-key", folder / "app.key"]
    options = ["--server", server.address, "--api-key", installation.key, *files]
    assert headrace("generate", "The river", "--max-tokens", "4", *options)
    sizes = ["--requests", "2", "--warm-up", "0", "--prompt-tokens", "8", "--output-tokens", "4"]
    measured = headrace("bench", "--json", *sizes, *options)
    assert '"completed": 2' in measured and installation.key not in measured


def test_keys_stand_in_no_line_of_the_log(installation: Installation, server: RunningServer) -> None:
    wrong = "hr-wrong-and-to-be-looked-for"
    with installation.connected(server) as stub:
        generate(stub, installation.key)
        with pytest.raises(grpc.RpcError):
            generate(stub, wrong)
    _until(lambda: "call.refused" in "".join(server.lines))
    log = "".join(server.lines)
    assert wrong not in log
    assert installation.key not in log and installation.bounded not in log


@pytest.mark.parametrize(
    ("lacking", "named"),
    [(("--tls-cert", "--tls-key", "--tls-client-ca"), "tls_cert"), (("--keys-file",), "keys_file")],
)
def test_a_server_that_others_reach_does_not_start_without_tls_and_keys(
    installation: Installation, lacking: tuple[str, ...], named: str
) -> None:
    options = installation.options()
    for name in lacking:
        del options[options.index(name) : options.index(name) + 2]
    ended, _ = refused(*options, listen="0.0.0.0:0")
    assert ended.returncode == 2
    assert named in ended.stderr and "--insecure" in ended.stderr


def test_a_broken_key_file_ends_the_start_with_its_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    ended, _ = refused("--keys-file", str(path))
    assert ended.returncode == 2
    assert "broken.json" in ended.stderr
