"""A service and a backend on different machines know each other by certificates.

The certificates may change while both run.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from tests.support.ports import free_address
from tests.support.rpc import connected, greedy, read
from tests.support.running_server import DEMO, environment, run_command

from headrace.v1 import inference_pb2
from headrace_credentials.client_tls import ClientTlsFiles, channel_credentials
from headrace_credentials.files import CredentialError
from headrace_service.auth import certificates

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Certificates of one CA, and of another that calls itself the same."""
    for name in ("ours", "theirs"):
        ca = certificates.new_ca("CA", 2)
        made = {
            "ca": ca,
            "backend": certificates.new_server(ca, ("127.0.0.1",), 2),
            "service": certificates.new_client(ca, "service", 2),
        }
        (tmp_path / name).mkdir()
        for part, identity in made.items():
            put(tmp_path / name / part, identity)
    return tmp_path


def put(path: pathlib.Path, identity: certificates.Identity) -> None:
    for suffix, data in ((".key", identity.key_pem()), (".pem", identity.certificate_pem())):
        new = path.with_name(f"{path.name}{suffix}.new")
        new.write_bytes(data)
        new.chmod(0o600)
        os.replace(new, path.with_name(path.name + suffix))


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A `headrace` command that runs until the end of the block."""
    command = [sys.executable, "-m", "headrace_supervisor", *map(str, arguments), "--log-format", "json"]
    running = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()


def backend_options(folder: pathlib.Path, address: str) -> list[object]:
    options = ["--model", DEMO / "draft", "--listen", address, "--device", "cpu", "--worker-threads", "1"]
    return [
        *options, "--tls-cert", folder / "backend.pem", "--tls-key", folder / "backend.key",
        "--tls-client-ca", folder / "ca.pem",
    ]  # fmt: skip


def service_options(ca: pathlib.Path, own: pathlib.Path, engine: str, address: str) -> list[object]:
    options = ["--listen", address, "--engine", engine, "--shutdown-grace-s", "0"]
    return [
        *options, "--engine-tls-ca", ca / "ca.pem", "--engine-tls-cert", own / "service.pem",
        "--engine-tls-key", own / "service.key",
    ]  # fmt: skip


def answer(address: str, timeout_s: float = 120.0) -> str:
    """The text of a short generation, once there is one."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with connected(address) as stub:
                request = inference_pb2.GenerateRequest(spec=greedy("The river", 4))
                return read(stub.Generate(request, timeout=60)).texts[0]
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.slow  # tests/service/engines/test_troubled_engines.py has certificates too.
def test_services_of_the_ca_are_served_others_are_not_and_certificates_may_change(folder: pathlib.Path) -> None:
    engine, good, strange, misled = (free_address() for _ in range(4))
    ours, theirs = folder / "ours", folder / "theirs"
    with (
        process("backend", *backend_options(ours, engine)),
        process("service", *service_options(ours, ours, engine, good)),
        # One shows a certificate of another CA, one trusts another CA.
        process("service", *service_options(ours, theirs, engine, strange)),
        process("service", *service_options(theirs, ours, engine, misled)),
    ):
        text = answer(good)
        for address in (strange, misled):
            with connected(address) as stub, pytest.raises(grpc.RpcError) as refused:
                stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60, wait_for_ready=True)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        # Plaintext meets a closed door, not a backend.
        with grpc.insecure_channel(engine) as plain, pytest.raises(grpc.RpcError):
            plain.unary_unary("/headrace_engine.v1.EngineService/Connect")(b"", timeout=10)
        # Both sides go over to the other CA: the backend while it runs, a service when it connects
        # next.
        for part in ("ca.pem", "backend.pem", "backend.key", "service.pem", "service.key"):
            os.replace(theirs / part, ours / part)
        renewed = free_address()
        with process("service", *service_options(ours, ours, engine, renewed)):
            assert answer(renewed) == text
        # The connection from before lives on.
        assert answer(good, timeout_s=0.0) == text


def test_settings_that_do_not_go_together_are_refused(folder: pathlib.Path) -> None:
    ours = folder / "ours"
    backend = backend_options(ours, "127.0.0.1:0")
    service = service_options(ours, ours, "127.0.0.1:1", "127.0.0.1:0")
    for arguments, said in (
        (["backend", *backend[:-2]], "tls_client_ca"),
        (["backend", *backend, "--listen", f"unix:{folder}/x/e.sock"], "speaks no TLS"),
        (["service", *service[:-2]], "engine_tls_key"),
        (["service", *service_options(ours, ours, "unix:/x", "127.0.0.1:0")], "speak no TLS"),
        (["service", *service, "--engine-tls-ca", ours / "service.key"], "service.key"),
    ):
        ended = run_command(*arguments)
        assert ended.returncode == 2, (said, ended.stderr)
        assert said in ended.stderr and "Traceback" not in ended.stderr


def test_a_clients_files_are_checked_before_they_are_used(folder: pathlib.Path) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    assert channel_credentials(ClientTlsFiles(ours / "ca.pem", ours / "service.pem", ours / "service.key"))
    for files in (
        ClientTlsFiles(ours / "ca.pem", ours / "service.pem", theirs / "service.key"),
        ClientTlsFiles(ours / "ca.key", ours / "service.pem", ours / "service.key"),
        ClientTlsFiles(ours / "nothing", ours / "service.pem", ours / "service.key"),
    ):
        with pytest.raises(CredentialError, match=str(folder)):
            channel_credentials(files)
