"""Services and engines are killed, and of what was submitted nothing is missing or there twice."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
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
        self._folder, self._stack = folder, stack
        engines = [f"unix:{folder}/engine-{index}.sock" for index in range(2)]
        self.logs = [folder / f"backend-{index}.log" for index in range(2)]
        self.backends = [self._backend(log, engine) for log, engine in zip(self.logs, engines, strict=True)]
        self.addresses = [free_address(), free_address()]
        named = [text for engine in engines for text in ("--engine", engine)]
        self.services: list[subprocess.Popen[str]] = [
            stack.enter_context(command(folder / f"service-{index}.log", "service", "--listen", address, *named))
            for index, address in enumerate(self.addresses)
        ]
        for index in range(2):
            wait_until(lambda index=index: self.num_connections(index) == 2, 240, "both engines")

    def _backend(self, log: pathlib.Path, address: str) -> subprocess.Popen[str]:
        options = (*WORKER, "--dtype", "fp32", "--num-blocks", "512", "--log-level", "debug")
        return self._stack.enter_context(command(log, "backend", str(DEMO), "--listen", address, *options))

    def num_connections(self, service: int) -> int:
        """Connections to engines that a service has opened so far."""
        return (self._folder / f"service-{service}.log").read_text().count("engine.connected")

    def restart(self, index: int) -> None:
        """Starts a killed engine again, and waits until both services reach it."""
        self.backends[index].wait()
        before = [self.num_connections(service) for service in range(2)]
        log, address = self._folder / f"backend-{index}-again.log", f"unix:{self._folder}/engine-{index}.sock"
        self.backends[index] = self._backend(log, address)
        for service, number in enumerate(before):
            wait_until(
                lambda service=service, number=number: self.num_connections(service) > number, 240, "the engine again"
            )

    def submit(self, prompt: list[int]) -> str:
        with connected(self.addresses[0]) as stub:
            request = inference_pb2.SubmitRequest(spec=greedy(prompt, TOKENS))
            return stub.Submit(request, timeout=CALL_TIMEOUT_S, wait_for_ready=True).request_id

    def submit_key(self, service: int, key: str) -> inference_pb2.SubmitResponse:
        """Submits with a key, again and again while an engine does not say whether it has that.

        On a busy machine the one that is left may not answer in time, and callers are asked to come
        again.
        """
        request = inference_pb2.SubmitRequest(spec=greedy(PROMPTS[0], TOKENS), idempotency_key=key)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        with connected(self.addresses[service]) as stub:
            while True:
                try:
                    response: inference_pb2.SubmitResponse = stub.Submit(
                        request, timeout=CALL_TIMEOUT_S, wait_for_ready=True
                    )
                    return response
                except grpc.RpcError as error:
                    is_late = time.monotonic() > deadline
                    if is_late or error.code() is not grpc.StatusCode.UNAVAILABLE or "try again" not in error.details():
                        raise
                    time.sleep(0.2)

    def read(self, service: int, request_id: str) -> list[int]:
        found = Transcript()
        with connected(self.addresses[service]) as stub:
            for response in stub.Subscribe(
                inference_pb2.SubscribeRequest(request_id=request_id), timeout=CALL_TIMEOUT_S
            ):
                found.take(response.event)
        return found.tokens

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


def test_a_key_has_one_request_though_its_engine_was_away(pool: Pool, shared_server: RunningServer) -> None:
    victim = pool.engine_of(pool.submit_key(0, "key 0").request_id)
    pool.backends[victim].kill()
    keys = [f"new {index}" for index in range(12)]
    with ThreadPoolExecutor(len(keys)) as callers:
        made = list(callers.map(pool.submit_key, (0, 1) * 6, keys))
    # About half of the keys belong to the engine that is away.
    assert not any(response.existing for response in made)
    assert all(pool.engine_of(response.request_id) != victim for response in made)
    pool.restart(victim)
    for key, first in zip(keys, made, strict=True):
        for service in (1, 0):
            again = pool.submit_key(service, key)
            assert (again.existing, again.request_id) == (True, first.request_id)
    # New keys of the engine that is back begin there again.
    later = [pool.submit_key(0, f"later {index}").request_id for index in range(12)]
    again_log = pool.logs[victim].with_name(f"backend-{victim}-again.log")
    assert any(request_id in again_log.read_text() for request_id in later)
    assert not any(response.request_id in again_log.read_text() for response in made)
    expected = generate(shared_server.address, greedy(PROMPTS[0], TOKENS)).tokens
    for service, response in enumerate(made[:2]):
        assert pool.read(service, response.request_id) == expected
