"""Failed calls on the command line: one sentence on stderr, with what to do, and an exit code."""

from __future__ import annotations

import os
import pathlib
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from tests.clients.canned_service import CannedServer
from tests.clients.secured_server import Certificates, secured_server
from tests.clients.tcp_proxy import TcpProxy

from headrace import InvalidRequest, Violation
from headrace.cli import main
from headrace.cli.failures import CallFacts, sentence
from headrace.cli.options import FIELD_NAMES

ROOT = pathlib.Path(__file__).resolve().parents[3]


def fails(*arguments: str, code: int = 1, stdin: str | bytes | None = None) -> str:
    """Runs a command that must fail with this exit code.

    Returns the last line on stderr, which is the only one but for those that click puts before a
    wrong usage.
    """
    result = CliRunner().invoke(main, list(arguments), input=stdin)
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert code == 2 or len(lines) == 1, result.stderr
    return lines[-1]


def shell(server: CannedServer, script: str) -> subprocess.CompletedProcess[str]:
    """Runs `script` with the real command as $HEADRACE."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "clients/python"),
        "HEADRACE_SERVER": server.address,
        "HEADRACE": f"{sys.executable} -m headrace",
    }
    command = ["bash", "-c", script]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240, check=False)


def test_a_deadline_names_its_option_and_the_way_out(server: CannedServer) -> None:
    result = CliRunner().invoke(main, ["generate", "endless", "--timeout", "0.3", "--server", server.address])
    assert result.exit_code == 1
    assert result.stdout == "" or result.stdout.endswith("\n"), "the sentence begins a line of its own"
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "error: DEADLINE_EXCEEDED: --timeout 0.3 passed before the answer was complete; give more, or end it with what"
        " there is by --time-limit"
    )


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:9", "no server listens on 127.0.0.1:9; start one with headrace serve, or"),
        ("[::1]:9", "no server listens on [::1]:9; start one with headrace serve, or"),
        ("unix:/nowhere/at all", "no server listens on unix:/nowhere/at all; start one with headrace serve, or"),
        ("localhost:port", "localhost:port is no address of a server; --server takes HOST:PORT or unix:/PATH"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "hello"), ("subscribe", "id"), ("models",), ("chat",)])
def test_no_server_at_the_address(command: tuple[str, ...], address: str, says: str) -> None:
    assert f"error: UNAVAILABLE: {says}" in fails(*command, "--server", address, stdin="")


def test_a_trace_of_no_server() -> None:
    assert "no server listens on 127.0.0.1:9; start one" in fails("trace", "0" * 32, "--server", "127.0.0.1:9")


def test_a_url_is_no_address() -> None:
    assert "takes HOST:PORT, without http://" in fails("models", "--server", "http://127.0.0.1:9", code=2)


def test_tls_against_plaintext_and_the_reverse(server: CannedServer, certificates: Certificates) -> None:
    ca = str(certificates.ca.certificate)
    assert "does not speak TLS; leave out --tls" in fails("models", "--server", server.address, "--ca", ca)
    with secured_server(certificates) as secured:
        address = secured.address
        assert "one that speaks TLS does that: --tls" in fails("models", "--server", address)
        other = str(certificates.other_ca.certificate)
        assert "no trusted authority vouches" in fails("models", "--server", address, "--ca", other)
        wrong_name = fails("models", "--server", address, "--ca", ca, "--server-name", "other.test")
        assert "is for another name; if the server is the right one, --server-name" in wrong_name
        assert "give a key with HEADRACE_API_KEY" in fails("models", "--server", address, "--ca", ca)
    with secured_server(certificates, mutual=True) as mutual:
        said = fails("models", "--server", mutual.address, "--ca", ca)
        assert "one that wants a client certificate does that: --client-certificate" in said


def test_what_speaks_another_protocol_is_said_to() -> None:
    class Http1(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Http1) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        said = fails("models", "--server", f"127.0.0.1:{other.server_address[1]}")
        other.shutdown()
    assert "does not speak gRPC; look at the port of --server" in said


def test_a_connection_that_breaks_names_what_outlasts_it(server: CannedServer) -> None:
    proxy = TcpProxy(server.address)

    def cut_when_it_runs() -> None:
        while not server.seen.requests:
            time.sleep(0.01)
        proxy.cut()

    threading.Thread(target=cut_when_it_runs, daemon=True).start()
    result = CliRunner().invoke(main, ["generate", "endless", "--server", proxy.address])
    proxy.close()
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "the connection to the server broke" in line and "headrace submit and subscribe outlast this" in line


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (("generate", ""), None, "the prompt is empty"),
        (("submit", ""), None, "the prompt is empty"),
        (("generate",), "", "the prompt is empty: nothing came on standard input"),
        (("generate", "-"), b"caf\xff", "standard input is no UTF-8 text: see byte 3"),
        (("generate", "hello", "--timeout", "0"), None, "'0' is not a number of seconds above 0"),
        (("generate", "hello", "--timeout", "nan"), None, "'nan' is not a number of seconds above 0"),
        (("generate", "hello", "--ca", "/nowhere.pem"), None, "/nowhere.pem: No such file or directory"),
        (("generate", "hello", "--api-key", "k", "--server", "example.org:1"), None, "give --tls or --ca, or"),
    ],
)
def test_what_no_server_needs_to_be_asked_for(arguments: tuple[str, ...], stdin: str | bytes | None, says: str) -> None:
    assert says in fails(*arguments, stdin=stdin, code=2)


def test_several_broken_rules_are_one_sentence_in_the_options_words() -> None:
    rules = (
        Violation("spec.sampling.temperature", "must be at most 100"),
        Violation("spec.stop.strings[1]", "must not be empty"),
        Violation("spec.text", "has\x1b[2J too\nmany bytes"),
    )
    said = sentence(InvalidRequest("refused", violations=rules), CallFacts(names=FIELD_NAMES))
    assert said == (
        "--temperature must be at most 100; --stop must not be empty; the prompt: has\ufffd[2J too many bytes"
    )


def test_a_reader_that_leaves_ends_the_command_quietly_and_the_generation(server: CannedServer) -> None:
    result = shell(server, "$HEADRACE generate endless | head -c 6; exit ${PIPESTATUS[0]}")
    assert (result.returncode, result.stdout, result.stderr) == (141, "w0 w1 ", "")
    assert server.seen.cancelled.wait(120)
    assert shell(server, "$HEADRACE models | true; exit ${PIPESTATUS[0]}").returncode in (0, 141)


def test_a_full_disk_and_closed_files_are_one_sentence(server: CannedServer) -> None:
    full = shell(server, "$HEADRACE generate hello > /dev/full")
    assert (full.returncode, full.stderr) == (1, "error: No space left on device\n")
    closed = shell(server, "$HEADRACE generate - <&-")
    assert (closed.returncode, closed.stderr.splitlines()[-1]) == (
        2,
        "error: standard input is closed; see headrace generate --help",
    )
