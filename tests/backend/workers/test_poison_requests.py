"""A request that breaks every step that it is in ends alone.

It makes steps raise or hang, or ends the worker; requests beside it lose no token.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from google.rpc import code_pb2
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    Subscription,
    connected,
    idle,
    running_backend,
    settled,
    until,
)
from tests.backend.fake_worker import POISON, POISON_PROMPT, expected_tokens
from tests.support.running_server import DEMO

from headrace_protos.engine.v1 import engine_pb2
from headrace_request.sampling import Sampling

INNOCENTS = 32
TOKENS = 150
# Many times what a step takes; found by it are hangs alone.
WATCHDOG_S = 8.0
# What becomes of a worker, and how many of them a poisonous prompt costs: one whose step raised
# begins anew itself.
LOST_WORKERS = {"raise": 0, "fail": 2, "hang": 2, "exit": 2, "crash": 2}
# Each way in which a worker is lost is in test_worker_faults; here one of them will do.
WAYS = ["raise", "exit", *(pytest.param(poison, marks=pytest.mark.slow) for poison in ("fail", "hang", "crash"))]


async def start_innocents(client: EngineClient, count: int) -> list[tuple[list[int], Subscription]]:
    """Requests that run, each with a token at least."""
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(count)]
    innocents = [(prompt, await client.add(prompt, TOKENS)) for prompt in prompts]
    await until(lambda: all(request.tokens for _, request in innocents))
    return innocents


async def check_ended(backend: BackendProcess, poisonous: Subscription, num_found: int) -> None:
    await settled(poisonous)
    [end] = poisonous.ends.values()
    assert end.reason == engine_pb2.OUTPUT_END_REASON_ERROR
    assert end.error.code == code_pb2.INTERNAL
    assert "the second time on this one alone" in end.error.message
    assert not poisonous.tokens
    assert len(backend.log_lines("request ended that made steps fail")) == num_found


@pytest.mark.parametrize("poison", WAYS)
async def test_a_poisonous_request_among_others_ends_alone(
    model: pathlib.Path, tmp_path: pathlib.Path, poison: str
) -> None:
    watchdog_s = WATCHDOG_S if poison == "hang" else 120.0
    async with (
        running_backend(
            tmp_path, model, "--step-ms", "5", "--poison", poison, watchdog_s=watchdog_s, max_num_seqs=INNOCENTS + 1
        ) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        innocents = await start_innocents(client, INNOCENTS)
        await check_ended(backend, await client.add([5, POISON, 6], 10), num_found=1)
        for prompt, request in innocents:
            assert (await settled(request)).tokens == expected_tokens(prompt, TOKENS)
            assert request.resumed == 1
        assert len(backend.log_lines("worker lost")) == LOST_WORKERS[poison]
        await idle(client)


@pytest.mark.parametrize("poison", ["raise", "crash"])
async def test_a_poisonous_request_with_nobody_beside_it_ends(
    model: pathlib.Path, tmp_path: pathlib.Path, poison: str
) -> None:
    async with (
        running_backend(tmp_path, model, "--poison", poison, watchdog_s=120.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        await check_ended(backend, await client.add([5, POISON, 6], 10), num_found=1)
        assert len(backend.log_lines("worker lost")) == LOST_WORKERS[poison]
        assert (await settled(await client.add([5, 6, 7], 9))).tokens == expected_tokens([5, 6, 7], 9)


async def answers(client: EngineClient) -> list[list[int]]:
    """The real worker's answers to some prompts, asked for one after the other.

    Beside each other they may be rounded differently.
    """
    return [(await settled(await client.add([10 + i, 20 + i, 30 + i], 60))).tokens for i in range(4)]


async def check_real_worker(
    model: pathlib.Path, tmp_path: pathlib.Path, poison: str, num_lost: int, **engine: Any
) -> None:
    options = {"worker": "poisoned_worker.py", "watchdog_s": 120.0, **engine}
    async with (
        running_backend(tmp_path, model, poison, **options) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        undisturbed = await answers(client)
        [worker] = backend.worker_pids()
        # Penalties take what a worker must not lose count of, beside the poison and after it.
        penalized = {"sampling": Sampling(temperature=0.0, repetition_penalty=1.2)}
        beside = await client.add([9, 8, 7], 600, **penalized)
        await until(lambda: len(beside.tokens) > 5)
        await check_ended(backend, await client.add(POISON_PROMPT, 10, **penalized), num_found=1)
        assert len((await settled(beside)).tokens) == 600
        assert len(backend.log_lines("worker lost")) == num_lost
        assert (backend.worker_pids() == [worker]) == (num_lost == 0)
        assert await answers(client) == undisturbed
        assert (await client.load()).late_work == 0
        await idle(client)
        backend.log_path.write_text(backend.log.replace("Traceback", "expected"))


# What the backend does is tried with fake workers in the tests above, and what a real one does
# whose step raised in tests/worker/test_worker_process: here both together.
@pytest.mark.slow
@pytest.mark.parametrize(("poison", "num_lost"), [("raise", 0), ("memory", 2), ("exit", 2)])
async def test_the_real_worker_is_kept_where_a_step_raised_and_answers_as_before(
    model: pathlib.Path, tmp_path: pathlib.Path, poison: str, num_lost: int
) -> None:
    await check_real_worker(model, tmp_path, poison, num_lost, device="cpu", worker_threads=1)


# Out of bounds of everything: an error that the device's context keeps, so that the worker's own
# small step fails too, or a device that never answers again, which the watchdog finds.
@pytest.mark.gpu
@pytest.mark.parametrize(("poison", "num_lost"), [("raise", 0), ("illegal", 2)])
async def test_a_worker_on_a_gpu_is_kept_unless_its_device_is_lost_to_it(
    tmp_path: pathlib.Path, poison: str, num_lost: int
) -> None:
    small = {
        "max_num_seqs": 16,
        "graph_sizes": "1,2,4,8",
        "max_num_batched_tokens": 1024,
        "num_blocks": 256,
    }
    shared = {"device": "cuda", "dtype": "bf16", "load": "folder", "watchdog_s": 12.0}
    await check_real_worker(DEMO, tmp_path, poison, num_lost, **shared, **small)


# One at a time, above.
@pytest.mark.slow
@pytest.mark.parametrize("poison", ["exit", "raise", "fail"])
async def test_more_poisonous_requests_than_deaths_at_which_a_backend_gives_up(
    model: pathlib.Path, tmp_path: pathlib.Path, poison: str
) -> None:
    arguments = ("--step-ms", "10", "--poison", poison)
    async with (
        running_backend(tmp_path, model, *arguments, watchdog_s=120.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        innocents = await start_innocents(client, 8)
        for number in range(1, 5):
            await check_ended(backend, await client.add([5, POISON, 6], 10), number)
        for prompt, request in innocents:
            assert (await settled(request)).tokens == expected_tokens(prompt, TOKENS)


async def test_a_worker_whose_steps_raise_again_and_again_is_replaced(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    fail_file = tmp_path / "fail"
    arguments = ("--step-ms", "10", "--fail-file", str(fail_file), "--fails-by", "raise")
    async with (
        running_backend(tmp_path, model, *arguments, watchdog_s=120.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        innocents = await start_innocents(client, 4)
        for number in (1, 2):
            # Not while somebody is on trial after the last one, who would be blamed.
            await until(lambda number=number: all(request.resumed == number - 1 for _, request in innocents))
            sizes = [len(request.tokens) for _, request in innocents]
            await until(lambda sizes=sizes: all(len(r.tokens) > s for s, (_, r) in zip(sizes, innocents, strict=True)))
            fail_file.touch()
            await until(lambda number=number: len(backend.log_lines("step failed")) == number)
        for prompt, request in innocents:
            assert (await settled(request)).tokens == expected_tokens(prompt, TOKENS)
        [lost] = backend.log_lines("worker lost")
        assert lost["reason"] == "worker 0: forward pass raised"


async def test_a_step_longer_than_the_watchdog_waits_is_no_hang_while_it_makes_progress(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    arguments = ("--parts", "30", "--part-ms", "300")
    async with (
        running_backend(tmp_path, model, *arguments, watchdog_s=4.0) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        request = await settled(await client.add([5, 6, 7], 1))
        assert request.tokens == expected_tokens([5, 6, 7], 1)
        assert request.resumed == 0
        assert backend.log_lines("worker lost") == []
