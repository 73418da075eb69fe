"""Workers die, hang or fail: streams go on without a lost or doubled token.

Where streams can't go on, they end with a hint to come back.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import time

import grpc
import pytest
from tests.backend.backend_harness import (
    EngineClient,
    Subscription,
    connected,
    details,
    error_status,
    running_backend,
    settled,
    until,
)
from tests.backend.fake_worker import expected_tokens, prompt_entry
from tests.support.memory_group import memory_group
from tests.support.processes import alive


async def start_requests(client: EngineClient, max_tokens: int, count: int = 8) -> list[tuple[list[int], Subscription]]:
    """Requests that run, each with a few tokens."""
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(count)]
    requests = [(prompt, await client.add(prompt, max_tokens)) for prompt in prompts]
    await until(lambda: all(len(request.tokens) >= 5 for _, request in requests))
    return requests


async def check_continued(requests: list[tuple[list[int], Subscription]], max_tokens: int, resumed: int) -> None:
    for prompt, request in requests:
        await settled(request)
        assert request.tokens == expected_tokens(prompt, max_tokens)
        assert request.resumed == resumed
        assert request.done is not None and request.done.engine_restart_ns > 0


def states_since(client: EngineClient, moment: float) -> list[tuple[float, bool, str]]:
    return [(at - moment, state.serving, state.reason) for at, state in client.states if at > moment]


async def test_killed_worker_is_replaced_and_streams_go_on(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    # Its death is to be seen, not found by the watchdog.
    async with (
        running_backend(tmp_path, model, "--step-ms", "20", watchdog_s=120.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        requests = await start_requests(client, 200)
        for number in (1, 2):
            [worker] = backend.worker_pids()
            moment = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            await until(lambda moment=moment: any(not serving for _, serving, _ in states_since(client, moment)))
            after_s, _, reason = next(state for state in states_since(client, moment) if not state[1])
            assert after_s < 30.0
            assert reason == "restarting worker"
            await until(lambda n=number: all(request.resumed == n for _, request in requests))
            assert not alive([worker])
        await check_continued(requests, 200, resumed=2)
        assert client.states[-1][1].serving
        load = await client.load()
        assert load.used_blocks == 0
        assert load.free_blocks + load.cached_blocks == load.kv_blocks


async def test_a_prompt_is_reported_once_though_its_worker_is_killed_in_the_middle(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    prompt = [4 + i % 290 for i in range(1500)]
    async with (
        running_backend(tmp_path, model, "--step-ms", "20", watchdog_s=120.0, max_num_batched_tokens=16) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        for _ in range(5):
            request = await client.add(prompt, 5, num_prompt_logprobs=1)
            await until(lambda: request.prompt)  # noqa: B023  # waited for here
            if len(request.prompt) < 1000:
                break
            # Too late to interrupt it.
            await settled(request)
        os.kill(backend.worker_pids()[0], signal.SIGKILL)
        await settled(request)
        # Whoever reads checks that parts come in order and without gaps.
        assert request.prompt == [prompt_entry(token, 1) for token in prompt[1:]]
        assert (request.tokens, request.resumed) == (expected_tokens(prompt, 5), 1)


async def test_worker_killed_between_requests_is_replaced(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with running_backend(tmp_path, model) as backend, connected(backend.address) as client:
        await client.wait_serving()
        [worker] = backend.worker_pids()
        os.kill(worker, signal.SIGKILL)
        # Taken while there is no worker, computed by the next one.
        await until(lambda: not client.states[-1][1].serving)
        request = await settled(await client.add([5, 6, 7], 20))
        assert request.tokens == expected_tokens([5, 6, 7], 20)


async def test_stopped_worker_is_found_by_the_watchdog_and_shows_its_stacks(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with (
        running_backend(tmp_path, model, "--step-ms", "20", watchdog_s=8.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        requests = await start_requests(client, 200)
        [worker] = backend.worker_pids()
        moment = time.monotonic()
        os.kill(worker, signal.SIGSTOP)
        await until(lambda: not alive([worker]))
        # The last result may have come a moment before the signal.
        assert 4.0 < time.monotonic() - moment < 120
        await check_continued(requests, 200, resumed=1)
        assert "no progress in a step for 8 s" in backend.log
        assert "fake_worker.py" in backend.log and "most recent call first" in backend.log


async def test_idle_worker_is_left_alone_by_the_watchdog(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with running_backend(tmp_path, model, watchdog_s=4.0) as backend, connected(backend.address) as client:
        await client.wait_serving()
        await settled(await client.add([5, 6, 7], 5))
        moment = time.monotonic()
        await asyncio.sleep(9.0)
        assert all(serving for _, serving, _ in states_since(client, moment))
        assert backend.log_lines("worker lost") == []


async def test_time_in_which_the_backend_was_stopped_is_no_hang(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with (
        running_backend(tmp_path, model, "--step-ms", "10", watchdog_s=4.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        requests = await start_requests(client, 150)
        os.kill(backend.process.pid, signal.SIGSTOP)
        await asyncio.sleep(9.0)
        os.kill(backend.process.pid, signal.SIGCONT)
        for prompt, request in requests:
            assert (await settled(request)).tokens == expected_tokens(prompt, 150)
        assert backend.log_lines("worker lost") == []


async def test_failing_step_restarts_the_worker(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    fail_file = tmp_path / "fail"
    arguments = ("--step-ms", "20", "--fail-file", str(fail_file))
    async with running_backend(tmp_path, model, *arguments) as backend, connected(backend.address) as client:
        await client.wait_serving()
        requests = await start_requests(client, 200)
        fail_file.touch()
        await check_continued(requests, 200, resumed=1)
        assert "forward pass failed" in backend.log_lines("worker lost")[0]["reason"]


# A killed worker is replaced above; who says why is in tests/supervisor/test_supervisor.
@pytest.mark.slow
async def test_a_worker_that_takes_all_memory_is_replaced_and_the_log_says_why(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    hungry = tmp_path / "hungry"
    arguments = ("--step-ms", "20", "--hungry-file", str(hungry))
    with memory_group(1 << 30) as inside:
        async with (
            running_backend(tmp_path, model, *arguments, inside=inside) as backend,
            connected(backend.address) as client,
        ):
            await client.wait_serving()
            requests = await start_requests(client, 200)
            hungry.touch()
            await check_continued(requests, 200, resumed=1)
            [lost] = backend.log_lines("worker lost")
            assert lost["reason"] == "worker 0 ended with signal 9, the kernel's for want of memory (OOM kill)"


async def test_memory_that_is_not_free_again_yet_is_waited_for(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    no_memory = tmp_path / "no-memory"
    arguments = ("--step-ms", "20", "--no-memory-file", str(no_memory))
    async with running_backend(tmp_path, model, *arguments) as backend, connected(backend.address) as client:
        await client.wait_serving()
        requests = await start_requests(client, 200)
        no_memory.touch()
        os.kill(backend.worker_pids()[0], signal.SIGKILL)
        # The second life is refused its memory, the third has it.
        await check_continued(requests, 200, resumed=1)
        killed, refused = backend.log_lines("worker lost")
        assert "ended with signal 9, " in killed["reason"]
        assert refused["reason"] == "worker 0: weights 2.0 MiB; 1.0 MiB are free"


async def test_after_too_many_deaths_streams_end_with_a_hint(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with running_backend(tmp_path, model, "--step-ms", "5") as backend, connected(backend.address) as client:
        await client.wait_serving()
        requests = await start_requests(client, 2000)
        for number in (1, 2, 3):
            [worker] = await until(lambda: alive(backend.worker_pids()))
            os.kill(worker, signal.SIGKILL)
            await until(lambda number=number: len(backend.log_lines("worker lost")) >= number)
            assert not alive([worker])
        assert await backend.wait_exit() == 3
        for prompt, request in requests:
            await settled(request)
            assert request.done is None
            assert request.tokens == expected_tokens(prompt, len(request.tokens))
        assert client.error is not None and client.error.code() is grpc.StatusCode.UNAVAILABLE
        assert "RetryInfo" in details(error_status(client.error))


@pytest.mark.parametrize("during_load", [False, True])
async def test_workers_die_with_a_killed_backend(
    model: pathlib.Path, tmp_path: pathlib.Path, during_load: bool
) -> None:
    arguments = ("--start-s", "600") if during_load else ()
    async with running_backend(tmp_path, model, *arguments) as backend, connected(backend.address) as client:
        if not during_load:
            await client.wait_serving()
        [worker] = await until(backend.worker_pids)
        # The fake worker's tie to its parent is its first act.
        await until(lambda: "memory plan" in backend.log)
        backend.process.kill()
        await until(lambda: not alive([worker]), timeout_s=120.0)
        await until(lambda: client.error)
        assert client.error is not None and client.error.code() is grpc.StatusCode.UNAVAILABLE
        assert await backend.wait_exit() == -9
    # The stale socket of a killed backend does not keep the next one out.
    async with running_backend(tmp_path, model) as backend, connected(backend.address) as client:
        await client.wait_serving()


async def test_engine_that_fails_ends_the_process_and_not_in_silence(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with running_backend(tmp_path, model, "--step-ms", "5") as backend, connected(backend.address) as client:
        await client.wait_serving()
        requests = await start_requests(client, 2000)
        (tmp_path / "raise").touch()
        assert await backend.wait_exit() == 1
        await until(lambda: client.error)
        assert client.error is not None and client.error.code() is grpc.StatusCode.UNAVAILABLE
        assert "RetryInfo" in details(error_status(client.error))
        assert "planted" not in str(client.error)
        assert all(request.done is None for _, request in requests)
        [failed] = backend.log_lines("engine failed")
        assert "RuntimeError: planted" in failed.pop("exception")
        backend.log_path.write_text(backend.log.replace("Traceback", "expected"))


async def test_engine_that_plans_nothing_is_found(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with (
        running_backend(tmp_path, model, "--step-ms", "5", watchdog_s=2.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        await start_requests(client, 2000)
        (tmp_path / "stuck").touch()
        assert await backend.wait_exit() == 1
        await until(lambda: client.error)
        assert client.error is not None and client.error.code() is grpc.StatusCode.UNAVAILABLE
        assert "planned nothing for 2 s" in backend.log


async def test_sigterm_while_loading_ends_at_once(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments, grace = ("--start-s", "600"), {"drain_grace_s": 600.0}
    async with (
        running_backend(tmp_path, model, *arguments, backend=grace) as backend,
        connected(backend.address) as client,
    ):
        assert client.states[-1][1].reason == "loading"
        backend.process.terminate()
        # The worker would take ten minutes to start, and the grace is 600 s.
        assert await backend.wait_exit() == 0
