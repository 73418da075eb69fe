"""An engine whose second rank is another host's: its answers, and every way in which that is lost.

Workers are fake here; real ones over two hosts are in tests/e2e/test_hosts.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    connected,
    idle,
    running_backend,
    settled,
    until,
)
from tests.backend.fake_worker import expected_tokens
from tests.backend.hosts.host_harness import (
    METADATA,
    Agent,
    backend_of_hosts,
    joined,
    network,
    running_agent,
    write_secret,
    write_two_layers,
)
from tests.support.ports import free_address
from tests.support.processes import alive

PROMPT = [10, 20, 30]
SERVING = health_pb2.HealthCheckResponse.SERVING
SLOW = ("--step-ms", "20")
TOKENS = 60


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_two_layers(tmp_path_factory.mktemp("models") / "layers")


async def answer(client: EngineClient, count: int = 12) -> None:
    request = await settled(await client.add(PROMPT, count))
    assert request.tokens == expected_tokens(PROMPT, count), request.refused


def last_reason(client: EngineClient) -> str:
    return client.states[-1][1].reason


# With two stages the other host's rank is the one that reports tokens.
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
async def test_answers_are_those_of_one_host(
    two_layers: pathlib.Path, tmp_path: pathlib.Path, ranks: dict[str, int]
) -> None:
    async with backend_of_hosts(tmp_path, two_layers, **ranks) as (backend, address):
        with running_agent(tmp_path, two_layers, address) as agent:
            async with connected(address, METADATA) as client:
                await client.wait_serving()
                assert client.welcomes[-1].model.device == "cpu x2"
                for request in [await client.add(PROMPT, 12) for _ in range(5)]:
                    assert (await settled(request)).tokens == expected_tokens(PROMPT, 12)
                await idle(client)
            assert len(agent.worker_pids()) == len(backend.worker_pids()) == 1
            backend.process.terminate()
            assert await backend.wait_exit() == 0
            [line] = await until(lambda: agent.log_lines("workers ended"))
            assert line["reason"] == "the backend is ending" and not agent.worker_pids()
    assert backend.log_lines("host joined")[0]["ranks"] == "rank 1"
    assert not backend.log_lines("worker lost")


class Loss:
    """Two hosts with a stream that has begun, and what has to be true after something is lost."""

    def __init__(self, backend: BackendProcess, agent: Agent, client: EngineClient) -> None:
        self.backend, self.agent, self.client = backend, agent, client

    async def of(self, harm: Callable[[], None], said: str) -> None:
        """Does harm while tokens come: the log names it, and the stream goes on without a gap."""
        request = await self.client.add(PROMPT, TOKENS)
        await until(lambda: len(request.tokens) >= 3)
        old = [*self.agent.worker_pids(), *self.backend.worker_pids()]
        assert len(old) == 2
        num_lost = len(self.backend.log_lines("worker lost"))
        harm()
        lost = await until(lambda: self.backend.log_lines("worker lost")[num_lost:])
        assert said in lost[0]["reason"]
        await until(lambda: not alive(old))
        await settled(request)
        assert request.tokens == expected_tokens(PROMPT, TOKENS) and request.resumed
        assert len(self.backend.log_lines("worker lost")) == num_lost + 1
        await idle(self.client)


@pytest.fixture
async def loss(two_layers: pathlib.Path, tmp_path: pathlib.Path) -> AsyncIterator[Loss]:
    async with backend_of_hosts(tmp_path, two_layers, *SLOW, pp=2) as (backend, address):
        with running_agent(tmp_path, two_layers, address, *SLOW) as agent:
            async with connected(address, METADATA) as client:
                await client.wait_serving()
                yield Loss(backend, agent, client)


async def test_a_worker_that_is_killed_on_either_host_is_named_and_the_stream_goes_on(loss: Loss) -> None:
    await loss.of(lambda: os.kill(loss.agent.worker_pids()[0], signal.SIGKILL), "worker 1 ended with signal 9")
    await loss.client.wait_serving()
    await loss.of(lambda: os.kill(loss.backend.worker_pids()[0], signal.SIGKILL), "worker 0 ended with signal 9")
    assert len(loss.agent.log_lines("joined")) == 1, "the agent stays where only workers are lost"


async def test_an_agent_that_is_killed_is_waited_for_and_another_takes_its_ranks(
    two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with backend_of_hosts(tmp_path, two_layers, *SLOW, pp=2) as (backend, address):
        async with connected(address, METADATA) as client:
            with running_agent(tmp_path, two_layers, address, *SLOW) as agent:
                await client.wait_serving()
                request = await client.add(PROMPT, TOKENS)
                await until(lambda: len(request.tokens) >= 3)
                workers = agent.worker_pids()
                agent.process.kill()
                await until(lambda: "is gone" in last_reason(client))
                assert (
                    last_reason(client).startswith("waiting for hosts: rank 1: ") and not client.states[-1][1].serving
                )
                await until(lambda: not alive(workers))
            with running_agent(tmp_path, two_layers, address, *SLOW):
                await settled(request)
    assert request.tokens == expected_tokens(PROMPT, TOKENS) and request.resumed == 1
    assert "rank 1): its connection ended" in backend.log_lines("worker lost")[0]["reason"]


async def test_a_spare_host_waits_and_takes_over(two_layers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with backend_of_hosts(tmp_path, two_layers, pp=2) as (_, address):
        with (
            running_agent(tmp_path, two_layers, address) as first,
            running_agent(tmp_path, two_layers, address) as second,
        ):
            async with connected(address, METADATA) as client:
                await client.wait_serving()
                spare, active = sorted((first, second), key=lambda agent: bool(agent.log_lines("joined")))
                [line] = await until(lambda: spare.log_lines("not joined"))
                assert "RESOURCE_EXHAUSTED: all hosts of this engine have joined: rank 1: " in line["reason"]
                active.process.kill()
                await joined(spare)
                await until(
                    lambda: (
                        len([state for _, state in client.states if state.serving]) and last_reason(client) == "serving"
                    )
                )
                await answer(client)


async def test_a_connection_that_is_cut_is_a_lost_host_and_is_made_anew(
    two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with (
        backend_of_hosts(tmp_path, two_layers, *SLOW, pp=2) as (backend, address),
        network(address) as (cable, end),
    ):
        with running_agent(tmp_path, two_layers, end, *SLOW) as agent:
            async with connected(address, METADATA) as client:
                await client.wait_serving()
                await Loss(backend, agent, client).of(cable.cut, "its connection ended")
            assert len(agent.log_lines("joined")) == 2


# That a connection which is closed is a lost host is shown above.
@pytest.mark.slow
async def test_a_network_that_holds_all_bytes_back_is_noticed_on_both_sides(
    two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with backend_of_hosts(tmp_path, two_layers, *SLOW, pp=2, watchdog_s=60.0) as (backend, address):
        async with network(address) as (cable, end):
            with running_agent(tmp_path, two_layers, end, *SLOW) as agent:
                async with connected(address, METADATA) as client:
                    await client.wait_serving()
                    request = await client.add(PROMPT, TOKENS)
                    await until(lambda: len(request.tokens) >= 3)
                    workers = agent.worker_pids()
                    cable.hold()
                    [lost] = await until(lambda: backend.log_lines("worker lost"))
                    assert "host " in lost["reason"]
                    # The agent notices by itself, without a byte of the backend.
                    await until(lambda: not alive(workers))
                    cable.release()
                    cable.cut()
                    await settled(request)
                    assert request.tokens == expected_tokens(PROMPT, TOKENS)


# A worker that is stopped is one of the watchdog's; here it is named with its host.
@pytest.mark.slow
async def test_a_stopped_worker_of_another_host_is_who_the_others_wait_for(
    two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with backend_of_hosts(tmp_path, two_layers, *SLOW, pp=2, watchdog_s=2.0) as (backend, address):
        with running_agent(tmp_path, two_layers, address, *SLOW) as agent:
            async with connected(address, METADATA) as client:
                await client.wait_serving()
                [worker] = agent.worker_pids()
                await Loss(backend, agent, client).of(
                    lambda: os.kill(worker, signal.SIGSTOP), "the others wait for rank 1: worker 0 (process "
                )
    # The agent ends before the backend, which is a loss too.
    lost = backend.log_lines("worker lost")[0]
    assert f"worker 1 (process {worker} of " in lost["reason"] and "stopped) at step" in lost["reason"]


async def test_workers_of_another_host_end_when_the_backend_is_killed(
    two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with backend_of_hosts(tmp_path, two_layers, pp=2) as (backend, address):
        with running_agent(tmp_path, two_layers, address) as agent:
            await until(agent.worker_pids)
            workers = [*agent.worker_pids(), *backend.worker_pids()]
            backend.process.kill()
            await until(lambda: not alive(workers))
            assert await until(lambda: agent.log_lines("not joined"))
            assert agent.process.poll() is None, "it waits for the backend to come back"


async def test_a_late_host_is_named_in_health_and_log_and_a_missing_one_ends_the_backend(
    two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    settings = {"hosts_timeout_s": 1.0}
    async with backend_of_hosts(tmp_path, two_layers, pp=2, backend=settings) as (backend, address):
        async with connected(address, METADATA) as client:
            await until(lambda: last_reason(client) == "waiting for hosts: rank 1: no host has joined for them")
        assert await backend.wait_exit() == 3
    assert backend.log_lines("waiting for hosts")[0]["missing"] == "rank 1: no host has joined for them"
    [line] = backend.log_lines("giving up")
    assert line["reason"] == "hosts were missing for 1 s: rank 1: no host has joined for them"


async def test_hosts_that_do_not_suit_are_refused_by_name_on_both_sides(
    model: pathlib.Path, two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    wrong = write_secret(tmp_path / "wrong", "another secret of sixteen bytes")
    cases = (
        ({"engine_token_file": str(wrong)}, two_layers, "refuses this host: a valid bearer token is required"),
        ({}, model, "its model is tiny@"),
        ({}, broken, "model folder: "),
    )
    async with backend_of_hosts(tmp_path, two_layers, pp=2) as (backend, address):
        for settings, folder, said in cases:
            with running_agent(tmp_path, folder, address, **settings) as agent:
                assert await agent.wait_exit() == 2
                assert said in agent.log and f"engine at {address}" in agent.log
            # An agent asks again where it saw its stream end and not why.
            reason = said.rpartition("host: ")[2]
            await until(
                lambda reason=reason: any(reason in line["reason"] for line in backend.log_lines("host refused"))
            )
        # It takes one that does suit, all the same.
        async with connected(address, METADATA) as client:
            await until(lambda: "was refused: model folder: " in last_reason(client))
            with running_agent(tmp_path, two_layers, address):
                await client.wait_serving()
                await answer(client)


async def test_a_host_needs_the_draft_model_of_its_engine(
    model: pathlib.Path, two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    draft = tmp_path / "called-otherwise-here"
    shutil.copytree(two_layers, draft)
    drafts = {"speculate": "draft", "draft_model": str(two_layers)}
    async with backend_of_hosts(tmp_path, two_layers, tp=2, **drafts) as (backend, address):
        for other, said in (
            ({}, "its draft_model is not set, and the engine's is layers@"),
            ({"draft_model": str(model)}, "its draft_model is tiny@"),
            ({"draft_model": str(tmp_path / "none")}, "draft_model: "),
        ):
            with running_agent(tmp_path, two_layers, address, **other) as agent:
                assert await agent.wait_exit() == 2
                assert said in agent.log
        with running_agent(tmp_path, two_layers, address, draft_model=str(draft)):
            await until(lambda: backend.log_lines("host joined"))
    async with backend_of_hosts(tmp_path, two_layers, tp=2) as (_, address):
        with running_agent(tmp_path, two_layers, address, draft_model=str(draft)) as agent:
            assert await agent.wait_exit() == 2
            assert "its draft_model is called-otherwise-here@" in agent.log and "engine's is not set" in agent.log


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "gpu"}, "device is 'gpu'; it must be auto, cpu, cuda or cuda:<index>"),
        ({"draft_model": "/nowhere"}, "draft_model: /nowhere: no such folder or file"),
    ],
)
async def test_what_a_host_has_not_is_refused_though_no_engine_answers(
    model: pathlib.Path, tmp_path: pathlib.Path, settings: dict[str, str], said: str
) -> None:
    with running_agent(tmp_path, model, "127.0.0.1:1", **settings) as agent:
        assert await agent.wait_exit() == 2
        assert said in agent.log and "not joined" not in agent.log


async def test_a_model_that_is_not_there_is_refused_though_no_engine_answers(tmp_path: pathlib.Path) -> None:
    with running_agent(tmp_path, tmp_path / "none", "127.0.0.1:1") as agent:
        assert await agent.wait_exit() == 2
        assert f"model: {tmp_path}/none: no such folder or file" in agent.log and "not joined" not in agent.log


async def test_a_probe_says_whether_the_engine_has_the_host(two_layers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    probe = free_address()

    async def status(service: str) -> int:
        async with grpc.aio.insecure_channel(probe) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return int((await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)).status)

    async with asyncio.timeout(120), backend_of_hosts(tmp_path, two_layers, tp=2) as (backend, address):
        with running_agent(tmp_path, two_layers, address, probe=probe) as agent:
            while await status("") != SERVING:
                await asyncio.sleep(0.05)
            assert agent.log_lines("joined")
            backend.process.kill()
            while await status("") == SERVING:
                await asyncio.sleep(0.05)
            assert await status("alive") == SERVING
        with running_agent(tmp_path, two_layers, address, probe="192.0.2.1:5") as agent:
            assert await agent.wait_exit() == 2 and "cannot listen on 192.0.2.1:5 for probes" in agent.log


async def test_an_engine_without_other_hosts_is_none_to_join(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with backend_of_hosts(tmp_path, model, hosts=1) as (_, address):
        with running_agent(tmp_path, model, address) as agent:
            assert await agent.wait_exit() == 2
            assert f"what listens at {address} is no engine with ranks on other hosts (--hosts)" in agent.log


@pytest.mark.parametrize(
    ("settings", "engine", "said"),
    [
        ({"listen": "unix:PRIVATE"}, {}, "hosts is 2, and listen is 'unix:"),
        (
            {"max_message_bytes": 1 << 20},
            {"max_num_seqs": 4096},
            "max_message_bytes is 1048576, and a step plan may have ",
        ),
    ],
    ids=["unix", "message"],
)
async def test_a_backend_that_other_hosts_can_not_serve_does_not_start(
    two_layers: pathlib.Path, tmp_path: pathlib.Path, settings: dict[str, Any], engine: dict[str, Any], said: str
) -> None:
    address = {"listen": free_address(), "token_file": str(write_secret(tmp_path / "secret"))}
    if "listen" in settings:
        settings = {"listen": f"unix:{tmp_path / 'private' / 'engine.sock'}"}
    options: dict[str, Any] = {"device": "cpu", "pp": 2, "hosts": 2, **engine}
    async with running_backend(tmp_path, two_layers, backend={**address, **settings}, **options) as backend:
        assert await backend.wait_exit() == 2
    assert said in backend.log
