"""An engine over two hosts with real workers gives the answers of one rank, whatever is lost.

The hosts are processes on loopback, which know each other by certificates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from tests.support.ports import free_address
from tests.support.processes import alive, wait_until
from tests.support.rpc import connected, generate, greedy
from tests.support.running_server import DEMO, RunningServer, environment

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.auth import certificates

# Fake workers answer over two hosts in tests/backend/hosts, every day.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [[20 + index, 30, 40 + index, *range(100, 110 + 7 * index)] for index in range(4)]
TOKENS = 40
WORKER = ("--device", "cpu", "--worker-threads", "1")


def write_identities(folder: pathlib.Path) -> pathlib.Path:
    """Certificates of the engine and of whoever asks it: a service, and another host."""
    ca = certificates.new_ca("CA", 2)
    made = {
        "ca": ca,
        "engine": certificates.new_server(ca, ("127.0.0.1",), 2),
        "service": certificates.new_client(ca, "service", 2),
        "host": certificates.new_client(ca, "host", 2),
    }
    for name, identity in made.items():
        for suffix, data in (("key", identity.key_pem()), ("pem", identity.certificate_pem())):
            path = folder / f"{name}.{suffix}"
            path.write_bytes(data)
            path.chmod(0o600)
    return folder


def shown(folder: pathlib.Path, name: str) -> list[str]:
    """Options by which a client of the engine shows its certificate."""
    options = {"ca": "ca.pem", "cert": f"{name}.pem", "key": f"{name}.key"}
    return [text for option, file in options.items() for text in (f"--engine-tls-{option}", str(folder / file))]


@contextlib.contextmanager
def command(log: pathlib.Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `headrace` command that runs until the end of the block; its log is a file."""
    with log.open("a") as output:
        line = [sys.executable, "-m", "headrace_supervisor", *arguments]
        running = subprocess.Popen(line, env=environment(), stderr=output, text=True)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(60)
        finally:
            running.kill()
            running.wait()


@dataclasses.dataclass
class Hosts:
    """An engine over two hosts, and a service before it."""

    folder: pathlib.Path
    engine: str
    service: str
    backend: subprocess.Popen[str]

    @property
    def log(self) -> str:
        return (self.folder / "backend.log").read_text()

    def agent(self) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        shows = shown(self.folder, "host")
        return command(self.folder / "agent.log", "ranks", str(DEMO), "--join", self.engine, *WORKER, *shows)

    def num_ready(self) -> int:
        return self.log.count(" workers ready ")

    def wait_ready(self, times: int) -> None:
        wait_until(lambda: self.num_ready() >= times, 240, "workers that are ready")


@pytest.fixture(scope="module", params=[("--pp", "2"), ("--tp", "2")], ids=["pp", "tp"])
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = write_identities(tmp_path_factory.mktemp("hosts"))
    engine, service = free_address(), free_address()
    tls = ["--tls-cert", str(folder / "engine.pem"), "--tls-key", str(folder / "engine.key")]
    tls += ["--tls-client-ca", str(folder / "ca.pem")]
    ranks = [*request.param, "--hosts", "2", "--dtype", "fp32", "--num-blocks", "256", "--max-worker-restarts", "50"]
    with (
        command(folder / "backend.log", "backend", str(DEMO), "--listen", engine, *WORKER, *tls, *ranks) as backend,
        command(folder / "service.log", "service", "--listen", service, "--engine", engine, *shown(folder, "service")),
    ):
        yield Hosts(folder, engine, service, backend)


@pytest.fixture(scope="module")
def agent(hosts: Hosts) -> Iterator[subprocess.Popen[str]]:
    with hosts.agent() as running:
        hosts.wait_ready(1)
        yield running


def worker_of(process: subprocess.Popen[str]) -> int:
    [worker] = psutil.Process(process.pid).children()
    return worker.pid


def test_answers_are_those_of_one_rank(
    hosts: Hosts, agent: subprocess.Popen[str], shared_server: RunningServer
) -> None:
    with connected(hosts.service) as stub:
        wait_until(lambda: stub.GetModel(inference_pb2.GetModelRequest()).model.device == "cpu x2", 60, "two ranks")
    for prompt in PROMPTS:
        found, expected = (
            generate(address, greedy(prompt, TOKENS)) for address in (hosts.service, shared_server.address)
        )
        assert found.tokens == expected.tokens and found.tokens[0]


def test_outputs_that_ranks_of_two_hosts_deal_out_are_those_of_one_rank(
    hosts: Hosts, agent: subprocess.Popen[str], shared_server: RunningServer
) -> None:
    """Three rows, which two ranks do not divide, drawn at random and with penalties."""
    spec = greedy(PROMPTS[0], TOKENS, n=3)
    spec.sampling.MergeFrom(generation_pb2.SamplingParameters(temperature=0.9, top_p=0.9, presence_penalty=0.5, seed=3))
    found, expected = (generate(address, spec) for address in (hosts.service, shared_server.address))
    assert found.tokens == expected.tokens and len({tuple(tokens) for tokens in found.tokens.values()}) == 3


@pytest.mark.parametrize("victim", ["worker", "agent's worker"])
def test_a_worker_that_is_killed_on_either_host(
    hosts: Hosts, agent: subprocess.Popen[str], shared_server: RunningServer, victim: str
) -> None:
    ready = hosts.num_ready()
    process, rank = (hosts.backend, 0) if victim == "worker" else (agent, 1)
    old = [worker_of(hosts.backend), worker_of(agent)]
    os.kill(worker_of(process), signal.SIGKILL)
    hosts.wait_ready(ready + 1)
    assert f"worker {rank} ended with signal 9" in hosts.log
    assert not alive(old)
    prompt = greedy(PROMPTS[1], TOKENS)
    assert generate(hosts.service, prompt).tokens == generate(shared_server.address, prompt).tokens


def test_an_agent_that_is_killed_and_started_again(
    hosts: Hosts, agent: subprocess.Popen[str], shared_server: RunningServer
) -> None:
    ready = hosts.num_ready()
    old = [worker_of(hosts.backend), worker_of(agent)]
    agent.kill()
    wait_until(lambda: "its connection ended" in hosts.log, 60, "the loss of the host")
    with hosts.agent():
        hosts.wait_ready(ready + 1)
        assert not alive(old)
        prompt = greedy(PROMPTS[2], TOKENS)
        assert generate(hosts.service, prompt).tokens == generate(shared_server.address, prompt).tokens
