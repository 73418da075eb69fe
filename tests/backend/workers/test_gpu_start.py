"""A start as a GPU's workers report it, through a real backend process.

Every field has a value; each line that an operator is promised appears, and no traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sys
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import structlog
from tests.backend.backend_harness import connected, running_backend, settled, until
from tests.backend.fake_worker import expected_tokens
from tests.support.telemetry_peer import Peer

from headrace_backend.config import EngineConfig
from headrace_backend.server.workers.host_ranks import WorkerLaunch
from headrace_backend.server.workers.start_report import StartReport
from headrace_backend.server.workers.worker_group import WorkerGroup, WorkersLost
from headrace_backend.step.messages import MemoryPlan
from headrace_backend.step.plan import ForwardPlan, SamplePlan, StepPlan
from headrace_facts import facts

PROMPT = [10, 20, 30]
FAKE_WORKER = (sys.executable, str(pathlib.Path(__file__).parents[1] / "fake_worker.py"))


@pytest.mark.parametrize("tp", [1, 2])
async def test_every_line_of_a_gpu_start_is_written(model: pathlib.Path, tmp_path: pathlib.Path, tp: int) -> None:
    peer = Peer(tmp_path / "telemetry.sock")
    await peer.listen()
    telemetry = {"telemetry_socket": str(peer.path)}
    async with (
        running_backend(tmp_path, model, "--gpu", tp=tp, backend=telemetry) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        described = client.welcomes[-1].model
        assert described.device == ("cuda:0" if tp == 1 else "cuda:0 x2")
        assert (described.memory.device_bytes, described.memory.measured) == (80 << 30, True)
        assert (described.quantization.scheme, described.quantization.head_scheme) == ("int4", "int8")
        assert (await settled(await client.add(PROMPT, 20))).tokens == expected_tokens(PROMPT, 20)
        plans = backend.log_lines("memory plan"), backend.log_lines("memory plan, measured")
        for lines in plans:
            assert sorted((line["rank"], line["device"]) for line in lines) == [(n, f"cuda:{n}") for n in range(tp)]
            assert {line["device_memory"] for line in lines} == {"80.0 GiB"}
        assert [line["phase"] for line in backend.log_lines("loading")] == ["ranks", "ranks"]
        [ready] = backend.log_lines("workers ready")
        assert (ready["device"], ready["captured_mixed_sizes"]) == ("cuda:0", [64, 128, 256])
        assert ready["phases_s"]["weights"] == 12.25 and ready["load_gb_s"] == 1.31
        by_rank = {name: [seconds + rank for rank in range(tp)] for name, seconds in ready["phases_s"].items()}
        assert ready.get("phases_s_by_rank") == (by_rank if tp > 1 else None)
        await until(lambda: [fact for fact in peer.taken if isinstance(fact, facts.EngineFacts)])
        [reported] = [fact for fact in peer.taken if isinstance(fact, facts.EngineFacts)]
        assert (reported.device, reported.copy_bytes_per_s) == ("cuda:0", tp * 4.1e12)
        assert len(backend.log_lines("NVIDIA X: its launch rules were not measured")) == tp
    await peer.die()


@contextlib.asynccontextmanager
async def running_group(on_results: Callable[[list[bytes], list[bytes]], None]) -> AsyncIterator[WorkerGroup]:
    config = EngineConfig(model=pathlib.Path("m"), device="cpu", num_blocks=256)
    group = WorkerGroup(WorkerLaunch(config, 256, (*FAKE_WORKER, "--gpu")), on_results)
    try:
        yield group
    finally:
        await group.close(0)


async def test_a_report_that_fails_loses_neither_the_plan_nor_what_came_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(report: StartReport, plan: MemoryPlan) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(StartReport, "on_memory_plan", fail)
    with structlog.testing.capture_logs() as lines:
        async with running_group(lambda payloads, drafts: None) as group:
            [ready] = await group.wait_ready()
    assert ready.device == "cuda:0"
    failed = [line for line in lines if line["event"] == "start report failed"]
    assert [line["log_level"] for line in failed] == ["error", "error"]
    assert all("device_bytes=85899345920" in line["message"] and line["exc_info"] for line in failed)
    assert [line["phase"] for line in lines if "seconds" in line] == ["ranks"]


async def test_records_that_can_not_be_taken_lose_the_group_and_not_in_silence() -> None:
    def fail(payloads: list[bytes], drafts: list[bytes]) -> None:
        raise RuntimeError("planted")

    with structlog.testing.capture_logs() as lines:
        async with running_group(fail) as group:
            await group.wait_ready()
            nothing = np.zeros(0, np.int32)
            assert group.send_plan(StepPlan(1, nothing, [], ForwardPlan(), SamplePlan()).encode())
            await asyncio.wait([group.lost], timeout=240.0)
            with pytest.raises(WorkersLost, match="worker 0: its records could not be taken: RuntimeError"):
                group.lost.result()
    assert [line["rank"] for line in lines if line["event"] == "records of a worker could not be taken"] == [0]
