"""The Go client against a real server.

Its own tests run, connections that break, its examples, and its README copied into an empty
project.

The Go tests are in clients/go; this module starts what they need (a server, a proxy that can be
cut, a server with TLS and keys), hands them the addresses, and runs what a reader of the README
would run.

All that needs the toolchain is slow: half a minute of a core that only a change of this client, of
the protos or of what every client sees can make fail.
"""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from tests.clients.balanced_services import balanced_services
from tests.clients.tcp_proxy import TcpProxy, tcp_proxy
from tests.service.model_folder import write_model_folder
from tests.support.running_server import RunningServer, environment, running_server
from tests.support.toolchains import GO, left_out, require

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "go"
MODULE = "github.com/headrace/headrace/clients/go"
EXAMPLES = {
    "generate": "32 tokens)",
    "chat": "\nWithout it every new token would cost a pass over the whole text",
    "stream": "first token after",
    "subscribe_resume": "request ",
    "cancel": "its readers see: cancelled",
    "deadline": "spec.sampling.top_p: ",
    "session": '"2 + 2 =" -> " 4" (',
    "tools": '  weather({"city": "Oslo"})\nThe weather in Oslo is snowy, at -3 degrees.',
    "schema": "{Name:Clara Weber Age:34 City:Lisbon}",
}
TIMEOUT_S = 900


def readme_programs() -> dict[str, str]:
    """The programs of the README, by the example that the paragraph before each names."""
    text = (CLIENT / "README.md").read_text()
    return dict(re.findall(r"`examples/(\w+)`[^\n]*\n(?:[^\n]+\n)*\n```go\n(.*?)```\n", text, re.DOTALL))


def run(command: list[str], folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def succeed(command: list[str], folder: pathlib.Path, **variables: str) -> str:
    """Runs a command that must succeed; returns what it printed."""
    ended = run(command, folder, **variables)
    reported = "\n".join(line for line in ended.stdout.splitlines() if not re.match(r"\s*(=== |--- PASS|\?)", line))
    assert ended.returncode == 0, f"{' '.join(command)}\n{reported[-6000:]}\n{ended.stderr[-6000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def go() -> str:
    """The go program, with the client's modules in reach."""
    program = require(GO)
    # Fetches what is missing, for the programs of the README too; says what it would change on
    # standard output.
    fetched = run([program, "mod", "tidy", "-diff"], CLIENT)
    if fetched.returncode != 0 and not fetched.stdout:
        why = (fetched.stderr.strip() or "it does not say why").splitlines()[-1].strip()
        left_out(GO, f"its modules can't be had: {why}")
    return program


@pytest.fixture(scope="module")
def server(go: str) -> Iterator[RunningServer]:
    """A server with the demo model.

    It asks for go first, so that nothing is started where the tests are left out.
    """
    with running_server("--services", "2", "--dtype", "fp32", "--device", "cpu", "--num-blocks", "2048") as running:
        yield running


@contextmanager
def cut_on_connect(proxy: TcpProxy) -> Iterator[str]:
    """An address where every connection cuts the proxy's, and is closed when that is done."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                asked, _ = listener.accept()
            except OSError:
                return
            with asked:
                proxy.cut()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_the_version_is_the_servers() -> None:
    version = re.search(r'const Version = "(.*)"', (CLIENT / "doc.go").read_text())
    assert version is not None
    assert version[1] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_readme_shows_every_example() -> None:
    programs = readme_programs()
    assert {path.parent.name for path in CLIENT.glob("examples/*/main.go")} == set(programs)
    assert set(programs) == {*EXAMPLES, "tls_key"}
    for name, program in programs.items():
        assert program == (CLIENT / "examples" / name / "main.go").read_text(), name


@pytest.mark.slow
def test_the_code_is_formatted_and_vetted(go: str) -> None:
    gofmt = pathlib.Path(succeed([go, "env", "GOROOT"], CLIENT).strip()) / "bin" / "gofmt"
    assert succeed([str(gofmt), "-l", "."], CLIENT) == ""
    succeed([go, "vet", "./..."], CLIENT)
    assert succeed([go, "mod", "tidy", "-diff"], CLIENT) == ""


def go_test(go: str, names: str, others: str, **variables: str) -> str:
    """Runs the Go tests of `names` without `others`, none of which may be skipped.

    Returns what they print.
    """
    # Vetted by a test of its own: here it would be a second time, with what the client needs.
    command = [go, "test", "-vet=off", "-count=1", "-v", "-run", names, "-skip", others, "./..."]
    reported = succeed(command, CLIENT, **{f"HEADRACE_TEST_{name}": value for name, value in variables.items()})
    assert "--- SKIP" not in reported and "--- PASS" in reported
    return reported


@pytest.mark.slow
def test_go_tests_pass_against_a_real_server(go: str, server: RunningServer) -> None:
    with tcp_proxy(server.address) as proxy, cut_on_connect(proxy) as cut:
        addresses = {"SERVER": server.address, "PROXY": proxy.address, "CUT": cut}
        reported = go_test(go, "Test", "TestSecured|TestBalanced", **addresses)
    passed = set(re.findall(r"^--- PASS: (\w+)", reported, re.MULTILINE))
    assert "TestServerLosesAndDoublesNothingOverBrokenConnections" in passed


@pytest.mark.slow
def test_go_tests_pass_against_several_servers(go: str, tmp_path: pathlib.Path) -> None:
    with balanced_services(write_model_folder(tmp_path / "tiny")) as addresses:
        go_test(go, "TestBalanced", "none", BALANCED=",".join(addresses))


@pytest.fixture(scope="module")
def project(go: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An empty project with the README's programs, made by the README's commands.

    Returns the folder of the built programs.
    """
    folder = tmp_path_factory.mktemp("project")
    for name, program in readme_programs().items():
        (folder / name).mkdir()
        (folder / name / "main.go").write_text(program)
    succeed([go, "mod", "init", "example"], folder)
    succeed([go, "mod", "edit", "-replace", f"{MODULE}={CLIENT}"], folder)
    succeed([go, "mod", "tidy"], folder)
    (folder / "bin").mkdir()
    # Without what debuggers need: a third less of linking.
    succeed([go, "build", "-ldflags=-w", "-o", "bin", "./..."], folder)
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_readmes_programs_run_in_an_empty_project(project: pathlib.Path, server: RunningServer, name: str) -> None:
    assert EXAMPLES[name] in succeed([str(project / name), server.address], project)


@dataclass(frozen=True)
class Secured:
    """A server with TLS and keys.

    Returns where it is, who vouches for it, and two keys; `few` generates once a minute.
    """

    address: str
    ca: str
    key: str
    few: str


@pytest.fixture(scope="module")
def secured(go: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Set up as the documentation says, by `headrace certs` and `headrace keys`."""
    folder = tmp_path_factory.mktemp("secured")
    headrace = [sys.executable, "-m", "headrace"]
    succeed([*headrace, "certs", "init", "certs"], folder, **environment())
    new = [*headrace, "keys", "new", "--keys-file", "keys.json"]
    key = succeed([*new, "go"], folder, **environment()).strip()
    few = succeed([*new, "few", "--requests-per-minute", "1"], folder, **environment()).strip()
    certs = folder / "certs"
    tls = ("--tls-cert", str(certs / "server.pem"), "--tls-key", str(certs / "server.key"))
    keys = ("--keys-file", str(folder / "keys.json"))
    with running_server(*tls, *keys, "--device", "cpu", "--num-blocks", "256") as running:
        yield Secured(running.address, str(certs / "ca.pem"), key, few)


@pytest.mark.slow
def test_go_tests_pass_against_a_server_with_tls_and_keys(go: str, secured: Secured) -> None:
    where = {"TLS_SERVER": secured.address, "CA": secured.ca, "KEY": secured.key, "FEW_KEY": secured.few}
    go_test(go, "TestSecured", "none", **where)


@pytest.mark.slow
def test_the_readmes_program_with_a_key_runs_over_tls(project: pathlib.Path, secured: Secured) -> None:
    program = [str(project / "tls_key"), secured.address, secured.ca]
    assert '"' in succeed(program, project, HEADRACE_API_KEY=secured.key)
    stranger = run(program, project, HEADRACE_API_KEY="hr-unknown")
    assert stranger.returncode == 1 and "does not know this key" in stranger.stderr
