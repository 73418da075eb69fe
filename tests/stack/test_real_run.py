"""The stack itself: built, started, asked from this machine, and looked at from outside.

Minutes, so marked slow.

Needs a Docker daemon. Where images can be pulled nothing else; elsewhere STACK_BASE_IMAGE and
STACK_PARTS, as deploy/compose.offline.yml says. The stack runs under a name and on ports of its
own, beside another one, and is removed with its volumes.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.compose_files import ROOT
from tests.support.mixed_load import mixed_load
from tests.support.ports import free_port
from tests.support.processes import wait_until
from tests.support.real_parts import Jaeger
from tests.support.running_server import environment

import headrace
from headrace.trace_context import new_traceparent, trace_id_of

OFFLINE = "STACK_PARTS" in os.environ


def _why_not() -> str:
    if shutil.which("docker") is None:
        return "needs docker"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return f"needs {' '.join(command)} to work: a running daemon, and compose"
    return ""


MISSING = _why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "all is there"),
]


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    files: tuple[str, ...]
    ports: dict[str, int]

    @property
    def environment(self) -> dict[str, str]:
        names = {"COMPOSE_PROJECT_NAME": "headrace-test", "COMPOSE_PROFILES": "cpu"}
        return {**os.environ, **names, **{f"STACK_{name}": str(port) for name, port in self.ports.items()}}

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Output of a docker compose command."""
        files = [part for file in self.files for part in ("-f", file)]
        done = subprocess.run(
            ["docker", "compose", *files, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr[-800:]
        return done.stdout

    def containers(self) -> dict[str, dict[str, Any]]:
        """What Docker says of each container, by service."""
        ids = self.compose("ps", "--all", "--quiet").split()
        inspected = json.loads(subprocess.run(["docker", "inspect", *ids], capture_output=True, check=True).stdout)
        return {container["Config"]["Labels"]["com.docker.compose.service"]: container for container in inspected}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['PORT']}"

    def query(self, expression: str) -> list[Any]:
        """What Prometheus answers."""
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return list(json.load(answer)["data"]["result"])


def _started(*overrides: str, besides: tuple[str, ...] = ()) -> Iterator[Stack]:
    files = ["docker-compose.yml", *(["deploy/compose.offline.yml"] if OFFLINE else []), *overrides]
    ports = {name: free_port() for name in ("PORT", "JAEGER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")}
    stack = Stack(tuple(files), ports)
    stack.compose("down", "--volumes")
    try:
        stack.compose(
            "up",
            "--detach",
            "--build",
            "--wait",
            "--wait-timeout",
            "600",
            "service",
            "telemetry",
            "prometheus",
            "jaeger",
            "collector",
            *besides,
        )
        yield stack
    finally:
        stack.compose("down", "--volumes", check=False)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    yield from _started()


def answer(address: str, tokens: int = 12, **options: Any) -> tuple[headrace.Completion, str]:
    """An answer, and its trace's id."""
    context = new_traceparent()
    with headrace.Client(address, **options) as client:
        stream = client.generate(
            "Once upon a time", traceparent=context, timeout=60, max_tokens=tokens, ignore_eos=True
        )
        return stream.result(), trace_id_of(context)


def test_the_command_line_chats_with_it(stack: Stack) -> None:
    command = [sys.executable, "-m", "headrace", "chat", "--server", stack.address, "--max-tokens", "16"]
    done = subprocess.run(
        command,
        input="What is a KV cache?\n",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_an_answers_trace_is_in_jaeger(stack: Stack) -> None:
    completion, trace_id = answer(stack.address)
    jaeger = Jaeger(f"http://127.0.0.1:{stack.ports['JAEGER_PORT']}")
    spans = wait_until(lambda: jaeger.trace(trace_id), 30, "the trace is in Jaeger")
    assert sum(span.name == "token" for span in spans) == completion.usage.output_tokens == 12
    (inference,) = (span for span in spans if "gen_ai.operation.name" in span.attributes)
    assert inference.attributes["headrace.request.id"] == completion.request_id


def test_prometheus_counts_the_tokens(stack: Stack) -> None:
    reported = sum(sum(found.tokens or ()) for found in mixed_load(stack.address, rounds=1))
    wait_until(
        lambda: (
            sum(float(row["value"][1]) for row in stack.query('headrace_tokens_total{headrace_token_kind="output"}'))
            >= reported
        ),
        60,
        "Prometheus has scraped them",
    )


def test_containers_are_what_the_files_say(stack: Stack) -> None:
    for name, container in stack.containers().items():
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"], name
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert host["Memory"] > 0 and host["NanoCpus"] > 0 and host["PidsLimit"] > 0
        assert container["Config"]["User"].split(":")[0] not in ("", "0", "root")
        for bindings in (host["PortBindings"] or {}).values():
            assert {binding["HostIp"] for binding in bindings} == {"127.0.0.1"}
        assert container["RestartCount"] == 0 and not container["State"]["OOMKilled"]


def test_images_hold_no_more_than_they_need(stack: Stack) -> None:
    probe = (
        "import importlib.util as u, os, shutil; print(os.getuid(), bool(u.find_spec('torch')), shutil.which('gcc'), "
        "shutil.which('cc'), u.find_spec('pytest'))"
    )
    for service, torch in (("service", False), ("telemetry", False), ("backend", True)):
        assert stack.compose("exec", "-T", service, "python", "-c", probe).strip() == f"10001 {torch} None None None"


def test_nobody_in_the_stack_reaches_out(stack: Stack) -> None:
    """Neither a backend, which has no network, nor those with a published port."""
    reach = "import socket; s = socket.socket(); s.settimeout(3); print(s.connect_ex(('192.0.2.1', 443)) or 'reached')"
    for service in ("service", "backend", "telemetry"):
        assert stack.compose("exec", "-T", service, "python", "-c", reach).strip() != "reached"
    interfaces = stack.compose("exec", "-T", "backend", "ls", "/sys/class/net").split()
    assert interfaces == ["lo"]


def test_a_backend_that_dies_comes_back(stack: Stack) -> None:
    """The container's first process is killed from inside.

    The restart policy starts it anew, and the service finds it.
    """
    before = stack.containers()["backend"]["State"]["StartedAt"]
    stack.compose("exec", "-T", "backend", "python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)", check=False)
    wait_until(
        lambda: stack.containers()["backend"]["State"]["StartedAt"] != before, 60, "the backend was started anew"
    )

    def answers() -> bool:
        try:
            return bool(answer(stack.address)[0].text)
        except headrace.HeadraceError:
            return False

    wait_until(answers, 120, "answers again")


def test_telemetry_that_dies_costs_no_answer_and_comes_back(stack: Stack) -> None:
    stack.compose("kill", "telemetry")
    assert answer(stack.address)[0].usage.output_tokens == 12
    stack.compose("start", "telemetry")
    jaeger = Jaeger(f"http://127.0.0.1:{stack.ports['JAEGER_PORT']}")

    def traced() -> bool:
        _, trace_id = answer(stack.address)
        try:
            wait_until(lambda: jaeger.trace(trace_id), 5)
        except AssertionError:
            return False
        return True

    wait_until(traced, 60, "traces again")


@pytest.fixture(scope="module")
def secure() -> Iterator[Stack]:
    yield from _started("deploy/compose.secure.yml", besides=("proxy",))


def test_the_secure_stack_answers_who_has_its_key(secure: Stack, tmp_path: pathlib.Path) -> None:
    secure.compose("cp", "credentials:/run/headrace/credentials/caller", str(tmp_path / "caller"))
    key = (tmp_path / "caller" / "first.key").read_text().strip()
    tls = headrace.Tls(ca=str(tmp_path / "caller" / "ca.pem"))
    assert answer(secure.address, tls=tls, api_key=key)[0].usage.output_tokens == 12
    with pytest.raises(headrace.Unauthenticated):
        answer(secure.address, tls=tls)
    with pytest.raises(headrace.HeadraceError):
        answer(secure.address)
    assert (tmp_path / "caller" / "first.key").stat().st_mode & 0o777 == 0o600
    assert key not in secure.compose("logs"), "Docker keeps logs"
    # What was made on the first start stays: a second one hands the same out.
    secure.compose("restart", "credentials")
    assert answer(secure.address, tls=tls, api_key=key)[0].text


def test_credentials_are_where_they_are_needed_and_nowhere_else(secure: Stack) -> None:
    listed = {
        name: secure.compose("exec", "-T", name, "sh", "-c", "cd /run/headrace/credentials && ls *").split()
        for name in ("service", "backend")
    }
    assert "ca.key" not in listed["service"] + listed["backend"]
    assert "keys.json" in listed["service"] and "keys.json" not in listed["backend"]
    assert "first.key" not in listed["service"] + listed["backend"]
