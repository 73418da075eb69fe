"""Ranks as real processes.

They draw what one would, only rank 0 answers, and whichever is lost is named and takes the others
along.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import resource
import signal
import socket
import sys

import psutil
import pytest
import safetensors.torch
import torch
from tests.models.checkpoints import write_checkpoint
from tests.parallel.rank_group import Ranks, ranks
from tests.support.model_builds import load_model
from tests.worker.driver import Entry, admission, execute, make_runner, step

from headrace_backend.server.workers.worker_group import WorkersLost
from headrace_backend.step.messages import WorkerReady
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.scheme import Scheme
from headrace_model_folder import ModelFolder

FAKE_WORKER = (sys.executable, str(pathlib.Path(__file__).parents[1] / "backend" / "fake_worker.py"))
PROMPT = [17 * index % 89 + 3 for index in range(30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("ranks") / "llama"
    write_checkpoint(path, "llama-biases")
    return path


def plans(count: int) -> list[StepPlan]:
    """A prompt and the tokens after it, planned ahead.

    No result needs to be read before the next step is sent.
    """
    option = admission(0, temperature=0.7, seed=5, num_logprobs=2)
    first = step([Entry(0, 0, PROMPT, (0,))], [option], {0: list(range(16))})
    return [first] + [step([Entry(0, len(PROMPT) + i, None, (0,), i + 1)], step_id=i + 2) for i in range(count - 1)]


def tokens_of_one(model: pathlib.Path, steps: list[StepPlan], quantize: str = "off") -> list[list[int]]:
    folder, scheme = ModelFolder.open(model), Scheme.named(quantize, 0)
    about = (folder, folder.config, torch.float32, torch.device("cpu"), "folder", 0, lambda *_: None)
    one = load_model(*about, scheme=scheme)  # type: ignore[arg-type]
    runner = make_runner(one, one.num_layers, one.num_kv_heads, one.head_dim)
    return [execute(runner, plan).tokens.tolist() for plan in steps]


async def stepping(group: Ranks) -> asyncio.Task[None]:
    """Has the group compute one step after the other, until it is lost."""

    async def run() -> None:
        while True:
            await group.answered([plans(1)[0]])

    await group.answered(plans(2))
    return asyncio.create_task(run())


async def wait_equally_ready(group: Ranks, tp: int) -> None:
    """Waits until all ranks are ready, with as many blocks each."""
    ready = await group.group.wait_ready()
    assert len(ready) == tp and all(isinstance(message, WorkerReady) for message in ready)
    assert len({message.num_blocks for message in ready}) == 1


# Two ranks do so in the test of strangers.
@pytest.mark.slow
async def test_four_ranks_answer_with_the_tokens_of_one_and_all_end_when_asked_to(model: pathlib.Path) -> None:
    async with ranks(model, 4) as group:
        await wait_equally_ready(group, 4)
        steps = plans(6)
        found = await group.answered(steps)
        assert await group.end() == [0] * 4
    assert [result.tokens.tolist() for result in found] == tokens_of_one(model, steps)
    assert [result.step_id for result in found] == list(range(1, 7))


# Ranks in threads do so for every format in test_shared_folders and test_sharded_models.
@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
async def test_ranks_that_quantize_answer_with_the_tokens_of_one(model: pathlib.Path, quantize: str) -> None:
    async with ranks(model, 2, quantize=quantize) as group:
        await group.group.wait_ready()
        steps = plans(12)
        found = await group.answered(steps)
    assert [result.tokens.tolist() for result in found] == tokens_of_one(model, steps, quantize)


# That a rank's end is the others' is tried of killed ones below.
@pytest.mark.slow
async def test_a_rank_that_refuses_its_part_while_others_wait_for_it_ends_the_start(tmp_path: pathlib.Path) -> None:
    """In the pass over layers with scales of whole rows, where ranks meet.

    The one whose columns are finite is a follower.
    """
    write_checkpoint(tmp_path, "llama")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors[name][5, -1] = torch.nan
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    async with ranks(tmp_path, 2, quantize="int8") as group:
        with pytest.raises(WorkersLost) as lost:
            await group.group.wait_ready()
    assert lost.value.invalid_model
    assert str(lost.value) == f"worker 1: model.safetensors: tensor '{name}' holds a value that is not finite"


async def test_ranks_answer_with_the_tokens_of_one_whatever_strangers_send_and_all_end_when_asked_to(
    model: pathlib.Path,
) -> None:
    """They listen to this machine only."""
    steps = plans(6)
    expected = tokens_of_one(model, steps)
    async with ranks(model, 2) as group:
        await wait_equally_ready(group, 2)
        found = [psutil.Process(pid).net_connections("inet") for pid in group.processes]
        sockets = [connection for connections in found for connection in connections]
        listening = [connection.laddr for connection in sockets if connection.status == psutil.CONN_LISTEN]
        assert len(listening) == 2 and {connection.laddr.ip for connection in sockets} == {"127.0.0.1"}
        with contextlib.ExitStack() as strangers:
            for address in listening:
                stranger = strangers.enter_context(socket.create_connection(address))
                stranger.sendall(os.urandom(4096))
                # And one that says nothing, one that stops in the middle of a word.
                socket.create_connection(address).close()
                with socket.create_connection(address) as half:
                    half.sendall(bytes(3))
            found = await group.answered(steps)
        assert await group.end() == [0, 0]
    assert [result.tokens.tolist() for result in found] == expected
    assert [result.step_id for result in found] == list(range(1, 7))


# A rank that is lost while others wait for it is tried without processes below, real ones that
# answer and end above.
@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_a_killed_rank_is_named_and_takes_the_others_along(model: pathlib.Path, victim: int) -> None:
    async with ranks(model, 2) as group:
        await group.group.wait_ready()
        load = await stepping(group)
        os.kill(group.processes[victim], signal.SIGKILL)
        lost = await group.loss()
        assert str(lost).startswith(f"worker {victim} ended with signal 9, ")
        assert lost.failed_step_id == 0
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


# A rank that is killed or stopped is named in the tests beside it.
@pytest.mark.slow
async def test_a_rank_out_of_memory_is_named(model: pathlib.Path) -> None:
    async with ranks(model, 2) as group:
        await group.group.wait_ready()
        await group.answered(plans(2))
        process = psutil.Process(group.processes[1])
        process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms // 2,) * 2)
        # Larger than anything computed before, so that memory is asked for.
        long = step(
            [Entry(row, 0, PROMPT * 8, (row,)) for row in range(8)],
            [admission(row, num_logprobs=2) for row in range(8)],
            {row: list(range(16)) for row in range(8)},
            step_id=9,
        )
        # As many as the ring takes.
        for _ in range(40):
            if not group.group.send_plan(long.encode()):
                break
        lost = await group.loss()
        assert str(lost).startswith("worker 1") and "another rank" not in str(lost)


# A worker that hangs is replaced in tests/faults/test_processes_die; ranks, in test_lost_ranks.
@pytest.mark.slow
async def test_a_stopped_rank_is_who_the_others_wait_for(model: pathlib.Path) -> None:
    async with ranks(model, 2) as group:
        await group.group.wait_ready()
        await group.answered(plans(2))
        os.kill(group.processes[1], signal.SIGSTOP)
        await group.until(lambda: psutil.Process(group.processes[1]).status() == psutil.STATUS_STOPPED)
        assert group.group.send_plan(plans(1)[0].encode())
        await group.until(lambda: "worker 0" in group.group.late_ranks())
        said = group.group.late_ranks()
        assert said.startswith(": the others wait for rank 1: worker 0 (process ")
        assert f"worker 1 (process {group.processes[1]}, stopped) at step 2" in said
        # The watchdog has it write its stacks, which wakes it up: the step is computed after all,
        # and nothing of the group is broken.
        await group.group.dump_stacks()
        await group.until(lambda: len(group.results) == 3)


async def test_a_start_that_does_not_go_on_tells_where_each_rank_is(model: pathlib.Path) -> None:
    command = (*FAKE_WORKER, "--silent-rank", "1")
    async with ranks(model, 2, command=command, start_timeout_s=0.2) as group:
        # Both have said all that they will: the plan and the weights, and rank 0 that it waits.
        await group.until(lambda: group.group.num_records == 5)
        with pytest.raises(WorkersLost) as lost:
            await group.group.wait_ready()
    said = str(lost.value)
    assert said.startswith("no start-up progress for 0.2 s: worker 0 (process ") and lost.value.hung
    assert "is in 'ranks', 1 of 2 ranks; worker 1 (process " in said and said.endswith("is in 'weights', 3 of 40 MiB")


async def test_a_rank_that_is_lost_while_others_wait_for_it_ends_the_start(model: pathlib.Path) -> None:
    async with ranks(model, 2) as group:
        os.kill(group.processes[1], signal.SIGKILL)
        with pytest.raises(WorkersLost, match="worker 1 ended with signal 9"):
            await group.group.wait_ready()
