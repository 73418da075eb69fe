"""`headrace health` says what a health check needs.

It returns 0 from what works, 1 and one line from what does not.
"""

from __future__ import annotations

import concurrent.futures
import functools
import http.server
import pathlib
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health as health_servicer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.service.auth.credentials_case import CertificateFolder, replace
from tests.support.processes import wait_until
from tests.support.running_server import RunningServer, environment, running_server
from tests.support.warm_python import Ended, WarmPython

from headrace_service.auth import certificates

# A busy machine may take seconds for a healthy answer.
PATIENT = ("--timeout-s", "60")


@functools.cache
def _warm_command() -> WarmPython:
    return WarmPython(["headrace.cli", "headrace_supervisor.health_command"], environment())


def health(*arguments: object) -> Ended:
    """Runs `headrace health` until it has ended."""
    (ended,) = _warm_command().run([("headrace", ["health", *map(str, arguments)])], 600.0)
    return ended


def refusal(result: Ended) -> str:
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.strip().splitlines()
    return line


def said_not_to_serve(server: RunningServer) -> bool:
    """By a service that answers."""
    answer = health(server.address, *PATIENT)
    return answer.returncode == 1 and "NOT_SERVING" in refusal(answer)


def engine_address(server: RunningServer) -> str:
    connections = server.backend().net_connections("unix")
    (path,) = {connection.laddr for connection in connections if str(connection.laddr).endswith(".sock")}
    return f"unix:{path}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--device", "cpu", "--num-blocks", "64") as found:
        yield found


@pytest.mark.timeout(900)
def test_a_service_and_a_backend_that_serve_are_well(shared_server: RunningServer) -> None:
    assert health(shared_server.address, *PATIENT).returncode == 0
    backend = health("--engine", engine_address(shared_server), *PATIENT)
    assert backend.returncode == 0, backend.stderr


# Above, what works is well; tests/supervisor/test_hang_watch finds what hangs.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_backend_that_hangs_is_not_well_and_neither_is_its_service(server: RunningServer) -> None:
    """A process that lives and does nothing is what a look at processes would miss."""
    address, backend = engine_address(server), server.backend()
    backend.suspend()
    try:
        assert "within 1 s" in refusal(health("--engine", address, "--timeout-s", "1"))
        wait_until(lambda: said_not_to_serve(server), 120, "the service says that nothing computes")
    finally:
        backend.resume()
    wait_until(lambda: health(server.address, *PATIENT).returncode == 0, 120, "well again")


def test_nobody_there_is_not_well(tmp_path: pathlib.Path) -> None:
    assert "UNAVAILABLE" in refusal(health("127.0.0.1:1"))
    assert "within 0.3 s" in refusal(health("--engine", f"unix:{tmp_path}/none.sock", "--timeout-s", "0.3"))
    assert "no answer" in refusal(health("http://127.0.0.1:1/metrics"))


def test_with_tls_the_authority_is_enough_unless_a_certificate_is_asked_for(tmp_path: pathlib.Path) -> None:
    files = CertificateFolder.make(tmp_path)
    app = certificates.new_client(files.ca, "app", 2)
    replace(tmp_path / "app.pem", app.certificate_pem())
    replace(tmp_path / "app.key", app.key_pem())
    authority = ("--ca", tmp_path / "ca.pem")
    pair = ("--certificate", tmp_path / "app.pem", "--key", tmp_path / "app.key")
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    serving = health_servicer.HealthServicer()
    serving.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    own = [(files.key.read_bytes(), files.certificate.read_bytes())]
    ports = [
        server.add_secure_port("127.0.0.1:0", credentials)
        for credentials in (
            grpc.ssl_server_credentials(own),
            grpc.ssl_server_credentials(own, files.ca.certificate_pem(), require_client_auth=True),
        )
    ]
    server.start()
    try:
        plain, mutual = (f"127.0.0.1:{port}" for port in ports)
        assert "UNAVAILABLE" in refusal(health(plain, *PATIENT))
        assert health(plain, *authority, *PATIENT).returncode == 0
        assert "UNAVAILABLE" in refusal(health(mutual, *authority, *PATIENT))
        assert health(mutual, *authority, *pair, *PATIENT).returncode == 0
    finally:
        server.stop(None).wait()


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_http_is_well_with_200_alone() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as there:
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        try:
            base = f"http://127.0.0.1:{there.server_port}"
            assert health(f"{base}/metrics").returncode == 0
            assert "503" in refusal(health(f"{base}/other"))
        finally:
            there.shutdown()
            thread.join()


def test_half_of_a_certificate_is_a_mistake_of_the_command_line(tmp_path: pathlib.Path) -> None:
    for half in ("--certificate", "--key"):
        result = health("127.0.0.1:1", "--ca", tmp_path / "ca.pem", half, tmp_path / "file")
        assert result.returncode == 2 and "--certificate and --key" in result.stderr
    pair = ("--certificate", tmp_path / "app.pem", "--key", tmp_path / "app.key")
    result = health("127.0.0.1:1", *pair)
    assert result.returncode == 2 and "--ca" in result.stderr
    result = health("http://127.0.0.1:1", "--engine")
    assert result.returncode == 2 and "http" in result.stderr


def test_a_certificate_that_cannot_be_read_is_said(tmp_path: pathlib.Path) -> None:
    files = [f"--{name}={tmp_path / name}" for name in ("ca", "certificate", "key")]
    assert "No such file" in refusal(health("--engine", "127.0.0.1:1", *files))
