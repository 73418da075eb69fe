"""The Java client against a real server.

Its own tests run, connections that break, its examples, and its README copied into an empty
project.

The Java tests are in clients/java; this module starts what they need (a server, a proxy that can be
cut, a server with TLS and keys), hands them the addresses, and runs what a reader of the README
would run.

All that needs the toolchain is slow: a minute of a core that only a change of this client, of the
protos or of what every client sees can make fail.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.clients.balanced_services import balanced_services
from tests.clients.java_build import SHORT_LIVED, JavaBuild, java_build, maven
from tests.clients.tcp_proxy import cut_on_connect, tcp_proxy
from tests.service.model_folder import write_model_folder
from tests.support.running_server import RunningServer, environment, running_server

pytestmark = pytest.mark.timeout(1800)

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "java"
EXAMPLES = {
    "Generate": "LENGTH after 32 tokens",
    "Stream": "finished: STOP",
    "Chat": "Why does it help? -> Without it every new token",
    "SubscribeResume": "nothing lost, nothing doubled",
    "Cancel": "its readers see: CANCELLED",
    "Deadline": "DEADLINE after ",
    "Gateway": "2 + 2 = 4 (STOP)",
    "Publisher": " (done)",
    "Tools": '  weather({"city": "Oslo"})\nThe weather in Oslo is snowy, at -3 degrees.',
    "Schema": "Person[name=Clara Weber, age=34, city=Lisbon]",
}
SECURED = "TlsWithKey"


def readme_blocks(language: str) -> list[str]:
    """The README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```\n", (CLIENT / "README.md").read_text(), re.DOTALL)


def readme_programs() -> dict[str, str]:
    """The README's programs by the name of their class."""
    return {re.search(r"public class (\w+)", text)[1]: text for text in readme_blocks("java")}  # type: ignore[index]


def pom(path: pathlib.Path, name: str) -> str | None:
    """The text of an element of a pom.xml, by its path of names."""
    return ElementTree.parse(path).findtext("/".join(f"{{*}}{part}" for part in name.split("/")))


def succeed(command: list[str], folder: pathlib.Path, env: dict[str, str] | None = None) -> str:
    """Runs a command that must succeed; returns its standard output."""
    ended = subprocess.run(
        command, cwd=folder, env=env or dict(os.environ), capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def build() -> JavaBuild:
    return java_build()


@pytest.fixture(scope="module")
def server(build: JavaBuild) -> Iterator[RunningServer]:
    """A server with the demo model.

    It asks for the build first, so that nothing is started where the tests are left out.
    """
    with running_server("--dtype", "fp32", "--device", "cpu", "--num-blocks", "2048") as running:
        yield running


@contextmanager
def secured_server(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """A server as others reach it, made by our own commands.

    Returns the variables that tell the Java tests about it.
    """

    def headrace(*arguments: str) -> str:
        return succeed([sys.executable, "-m", "headrace", *arguments], folder, environment()).strip()

    def new_key(name: str, *options: str) -> str:
        return headrace("keys", "new", name, "--keys-file", "keys.json", *options)

    headrace("certs", "init", "certs")
    headrace("certs", "client", "certs", "app")
    keys = {
        "HEADRACE_TEST_KEY_USER": new_key("user"),
        "HEADRACE_TEST_KEY_BOUNDED": new_key("bounded", "--requests-per-minute", "4"),
        "HEADRACE_TEST_KEY_ADMIN": new_key("admin", "--allow", "admin"),
    }
    certs = folder / "certs"
    files = {"--tls-cert": "server.pem", "--tls-key": "server.key", "--tls-client-ca": "ca.pem"}
    options = [str(part) for option, name in files.items() for part in (option, certs / name)]
    with running_server(
        *options, "--keys-file", str(folder / "keys.json"), "--device", "cpu", "--num-blocks", "256"
    ) as running:
        yield {"HEADRACE_TEST_SECURED": running.address, "HEADRACE_TEST_CERTS": str(certs), **keys}


def test_the_version_is_the_servers() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert pom(CLIENT / "pom.xml", "version") == version
    examples = CLIENT / "examples" / "pom.xml"
    assert pom(examples, "version") == pom(examples, "dependencies/dependency/version") == version
    assert f"<version>{version}</version>" in readme_blocks("xml")[0]


def test_the_readme_shows_every_example() -> None:
    programs = readme_programs()
    files = {path.stem: path.read_text() for path in (CLIENT / "examples/src/main/java").glob("*.java")}
    assert set(files) == {*EXAMPLES, SECURED}
    assert programs == files


@pytest.mark.slow
def test_java_tests_pass_against_a_real_server(build: JavaBuild, server: RunningServer, tmp_path: pathlib.Path) -> None:
    with (
        tcp_proxy(server.address) as proxy,
        cut_on_connect(proxy) as cut,
        secured_server(tmp_path) as secured,
        balanced_services(write_model_folder(tmp_path / "tiny")) as balanced,
    ):
        addresses = {"SERVER": server.address, "PROXY": proxy.address, "CUT": cut, "BALANCED": ",".join(balanced)}
        addresses["SERVICE_CONFIG"] = str(ROOT / "clients" / "service_config.json")
        variables = {f"HEADRACE_TEST_{name}": address for name, address in addresses.items()} | secured
        maven(build.folder, "surefire:test", repository=build.repository, env=variables)
    reports = [ElementTree.parse(path).getroot() for path in (build.folder / "target/surefire-reports").glob("*.xml")]
    cases = {case.get("name") for report in reports for case in report.iter("testcase")}
    assert any(str(name).startswith("aSubscriptionSurvivesCutsWithoutALostOrDoubledToken") for name in cases)
    assert sum(int(report.get("skipped", "0")) for report in reports) == 0


def run_as_documented(folder: pathlib.Path, build: JavaBuild, server: RunningServer) -> str:
    """The README's command in a folder: compiles its programs, and runs one; what that prints."""
    command = re.search(r"^    mvn -q (compile exec:java .*)$", (CLIENT / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    arguments = command[1].replace("127.0.0.1:50051", server.address).split()
    return maven(folder, *arguments, repository=build.repository)


@pytest.fixture(scope="module")
def project(build: JavaBuild, server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An empty Maven project with the README's pom.xml and programs.

    They are compiled by the README's command, which also runs one of them.
    """
    folder = tmp_path_factory.mktemp("project")
    sources = folder / "src" / "main" / "java"
    sources.mkdir(parents=True)
    (folder / "pom.xml").write_text(readme_blocks("xml")[0])
    for name, program in readme_programs().items():
        (sources / f"{name}.java").write_text(program)
    assert EXAMPLES["Generate"] in run_as_documented(folder, build, server)
    return folder


def run_program(build: JavaBuild, project: pathlib.Path, *arguments: str) -> str:
    classes = os.pathsep.join([str(project / "target" / "classes"), build.classpath])
    return succeed(["java", *SHORT_LIVED.split(), "-cp", classes, *arguments], project)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_readmes_programs_run_in_an_empty_project(
    build: JavaBuild, project: pathlib.Path, server: RunningServer, name: str
) -> None:
    assert EXAMPLES[name] in run_program(build, project, name, server.address)


@pytest.mark.slow
def test_the_readmes_command_runs_a_program_of_our_folder_too(build: JavaBuild, server: RunningServer) -> None:
    assert EXAMPLES["Generate"] in run_as_documented(build.folder / "examples", build, server)


@pytest.mark.slow
def test_the_readmes_program_with_a_key_runs_over_tls(
    build: JavaBuild, project: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    headrace = [sys.executable, "-m", "headrace"]
    succeed([*headrace, "certs", "init", "certs"], tmp_path, environment())
    key = succeed([*headrace, "keys", "new", "java", "--keys-file", "keys.json"], tmp_path, environment()).strip()
    certs, keys = tmp_path / "certs", str(tmp_path / "keys.json")
    options = ("--tls-cert", str(certs / "server.pem"), "--tls-key", str(certs / "server.key"), "--keys-file", keys)
    with running_server(*options, "--device", "cpu", "--num-blocks", "256") as secured:
        reported = run_program(build, project, SECURED, secured.address, str(certs / "ca.pem"), key)
    assert "is serving: true" in reported and "without a key: " in reported
