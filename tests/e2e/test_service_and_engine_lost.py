"""A service and an engine are killed at once, and no token of what was submitted is missing."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.e2e.test_hosts import PROMPTS, WORKER, command
from tests.support.ports import free_address
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy
from tests.support.running_server import DEMO, RunningServer

from headrace.v1 import inference_pb2

# Guardians of fake engines are lost in tests/service/engines/test_guardian.py, every day.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = 240


class Pool:
    """Two engines and two services, each a process of its own."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
        engines = [f"unix:{folder}/engine-{index}.sock" for index in range(2)]
        options = (*WORKER, "--dtype", "fp32", "--num-blocks", "512", "--log-level", "debug")
        self.logs = [folder / f"backend-{index}.log" for index in range(2)]
        self.backends = [
            stack.enter_context(command(log, "backend", str(DEMO), "--listen", engine, *options))
            for log, engine in zip(self.logs, engines, strict=True)
        ]
        self.addresses = [free_address(), free_address()]
        named = [text for engine in engines for text in ("--engine", engine)]
        self.services: list[subprocess.Popen[str]] = [
            stack.enter_context(command(folder / f"service-{index}.log", "service", "--listen", address, *named))
            for index, address in enumerate(self.addresses)
        ]
        for index in range(2):
            wait_until(lambda index=index: self._knows_both(folder / f"service-{index}.log"), 240, "both engines")

    @staticmethod
    def _knows_both(log: pathlib.Path) -> bool:
        return log.read_text().count("engine.connected") == 2

    def submit(self, prompt: list[int]) -> str:
        with connected(self.addresses[0]) as stub:
            request = inference_pb2.SubmitRequest(spec=greedy(prompt, TOKENS))
            return stub.Submit(request, timeout=CALL_TIMEOUT_S, wait_for_ready=True).request_id

    def engine_of(self, request_id: str) -> int:
        """Which engine was asked for a request first."""
        return next(index for index, log in enumerate(self.logs) if request_id in log.read_text())


@pytest.fixture
def pool(tmp_path: pathlib.Path) -> Iterator[Pool]:
    tmp_path.chmod(0o700)
    with contextlib.ExitStack() as stack:
        yield Pool(tmp_path, stack)


def test_submitted_answers_outlive_both(pool: Pool, shared_server: RunningServer) -> None:
    ids = [pool.submit(prompt) for prompt in PROMPTS]
    victim = pool.engine_of(ids[0])

    def read(request_id: str) -> Transcript:
        """Reads at the other service, and kills both once the first answer has begun."""
        found = Transcript()
        with connected(pool.addresses[1]) as stub:
            for response in stub.Subscribe(
                inference_pb2.SubscribeRequest(request_id=request_id), timeout=CALL_TIMEOUT_S
            ):
                found.take(response.event)
                if request_id == ids[0] and pool.services[0].poll() is None and found.tokens:
                    pool.services[0].kill()
                    pool.backends[victim].kill()
                    pool.services[0].wait()
        return found

    with ThreadPoolExecutor(len(ids)) as readers:
        found = list(readers.map(read, ids))
    for prompt, transcript in zip(PROMPTS, found, strict=True):
        assert transcript.tokens == generate(shared_server.address, greedy(prompt, TOKENS)).tokens
    assert any(event.HasField("resumed") for event in found[0].events)
    # Whoever comes later reads the same at the service that is left.
    with connected(pool.addresses[1]) as stub:
        later = Transcript()
        for response in stub.Subscribe(inference_pb2.SubscribeRequest(request_id=ids[0]), timeout=CALL_TIMEOUT_S):
            later.take(response.event)
    assert later.tokens == found[0].tokens
