"""The worker as a process over real rings: how it starts, answers, refuses and ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.worker.driver import Entry, admission, execute, make_runner, step

from headrace_backend.device_defaults import long_graph_sizes, mixed_graph_sizes
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.messages import (
    LoadProgress,
    MemoryPlan,
    RecordKind,
    StepRaised,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
    decode_message,
)
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.step.ring import RingReader, RingWriter, create_ring
from headrace_backend.worker.start_up.memory_plan import free_memory_bytes

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
START_S = 180.0


@dataclasses.dataclass
class Worker:
    """A worker process and the engine's ends of its rings."""

    process: subprocess.Popen[bytes]
    plans: RingWriter
    results: RingReader

    def send(self, plan: StepPlan) -> None:
        self.plans.write(RecordKind.STEP_PLAN, plan.encode(), 30.0)

    def result(self) -> StepResult:
        kind, payload = self.read()
        assert kind == RecordKind.STEP_RESULT, decode_message(payload)
        return StepResult.decode(payload)

    def read(self, timeout_s: float = START_S) -> tuple[int, bytes]:
        record = self.results.read(timeout_s)
        assert record is not None, f"nothing came; exit code {self.process.poll()}"
        return record

    def messages(self) -> list[WorkerMessage]:
        """Everything up to readiness or failure."""
        messages: list[WorkerMessage] = []
        while not messages or not isinstance(messages[-1], WorkerReady | WorkerFailed | StepRaised):
            kind, payload = self.read()
            assert kind == RecordKind.MESSAGE
            messages.append(decode_message(payload))
        return messages


Starter = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts workers; ends them after the test."""
    workers: list[Worker] = []

    def start_worker(model: pathlib.Path, **config: object) -> Worker:
        plans, results = create_ring(1 << 20, 1), create_ring(1 << 20, 1)
        values = {"model": str(model), "device": "cpu", "worker_threads": 1, "kv_memory": 1 << 20, **config}
        descriptors = (plans.memory, *plans.data_events, plans.space_event)
        result_descriptors = (results.memory, *results.data_events, results.space_event)
        arguments = ["--config-json", json.dumps(values), "--plan-ring", ",".join(map(str, (*descriptors, 0)))]
        arguments += ["--result-ring", ",".join(map(str, result_descriptors)), "--rank", "0"]
        arguments += ["--parent-pid", str(os.getpid())]
        command = [sys.executable, "-m", "headrace_backend.worker", *arguments]
        process = subprocess.Popen(command, pass_fds=(*descriptors, *result_descriptors), env=ENVIRONMENT)
        reader = RingReader(results.memory, results.data_events[0], results.space_event, 0)
        workers.append(Worker(process, RingWriter(plans), reader))
        plans.close()
        results.close()
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        worker.plans.close()
        worker.results.close()


def is_later_progress(message: object) -> bool:
    """Whether it reports a phase behind the first."""
    return isinstance(message, LoadProgress) and message.phase != "torch"


def first_step(prompt: list[int], step_id: int = 1) -> StepPlan:
    return step([Entry(0, 0, prompt, (0,))], [admission(0)], {0: [3, 1, 2, 4]}, step_id=step_id)


def test_a_worker_starts_answers_every_plan_in_order_and_ends(
    start: Starter, llama_path: pathlib.Path, llama: CausalLM
) -> None:
    worker = start(llama_path)
    *imports, plan, ready = [message for message in worker.messages() if not is_later_progress(message)]
    assert isinstance(plan, MemoryPlan) and isinstance(ready, WorkerReady)
    assert imports == [LoadProgress("torch", 0, 1, ""), LoadProgress("torch", 1, 1, "")]
    # 2 layers, keys and values, 2 heads of 8 in fp32, 16 tokens.
    assert plan.kv_block_bytes == 2 * 2 * 2 * 8 * 4 * 16
    assert plan.num_blocks == ready.num_blocks == (1 << 20) // plan.kv_block_bytes
    assert plan.weight_bytes == 4 * ready.parameter_count
    phases = ready.phases_s
    assert {"process", "folder", "imports", "device", "weights", "cache", "warm_up", "other"} <= phases.keys()
    assert min(phases.values()) >= 0 and phases["process"] > 0
    # Planned ahead: none of the results was read.
    # Row 0 and block 0 served the warm-up before.
    plans = [
        step([Entry(0, 0, [5, 6, 7], (0,))], [admission(0)], {0: [0, 1]}),
        step([Entry(0, 3, None)], step_id=2),
        step([Entry(0, 4, [9], (0,), 2)], step_id=3),
    ]
    for step_plan in plans:
        worker.send(step_plan)
    results = [worker.result() for _ in plans]
    assert [result.step_id for result in results] == [1, 2, 3]
    runner = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)
    expected = [execute(runner, step_plan).tokens.tolist() for step_plan in plans]
    assert [result.tokens.tolist() for result in results] == expected
    assert [len(tokens) for tokens in expected] == [1, 0, 1]
    assert all(0 < result.started_at_ns < result.finished_at_ns for result in results)
    worker.send(step([], released=(0,), step_id=4))
    worker.plans.write(RecordKind.SHUTDOWN, b"", 1.0)
    assert worker.result().step_id == 4
    assert worker.process.wait(240) == 0


def test_dummy_weights_need_a_config_and_nothing_else_and_a_step_that_raises_is_reported_by_its_number(
    start: Starter, llama_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """One worker for both: after the step it goes on."""
    shutil.copy(llama_path / "config.json", tmp_path)
    worker = start(tmp_path, load="dummy", seed=3)
    *progress, ready = worker.messages()
    [plan] = [message for message in progress if isinstance(message, MemoryPlan)]
    assert isinstance(ready, WorkerReady)
    assert any(isinstance(step, LoadProgress) and step.phase == "dummy weights" for step in progress)
    # Nothing was read, and nothing measured: a CPU's plan is final.
    assert ready.load_gb_s == 0 and ready.memory == plan and not plan.is_measured
    assert ready.captured_mixed_sizes == ()
    # Ctrl-C is the supervisor's business.
    worker.process.send_signal(signal.SIGINT)
    worker.send(first_step([5]))
    result = worker.result()
    assert result.step_id == 1 and result.ok.tolist() == [1]
    # A token that does not exist: the engine never plans one.
    worker.send(step([Entry(0, 1, [10**6], (0,), 1)], step_id=2))
    raised = worker.messages()[-1]
    assert isinstance(raised, StepRaised)
    assert raised.step_id == 2
    assert "\n" not in raised.reason
    # It goes on, with an empty batch.
    worker.send(first_step([5], step_id=3))
    worker.plans.write(RecordKind.RESET, b"", 1.0)
    worker.send(first_step([5]))
    worker.plans.write(RecordKind.SHUTDOWN, b"", 1.0)
    assert worker.result().step_id == 1
    assert worker.process.wait(240) == 0


@pytest.mark.gpu
@pytest.mark.whole_card
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_plan_is_measured_and_leaves_the_cache_nearly_all_while_steps_run_ahead(
    start: Starter, llama_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """One worker for all that needs a card alone: it compiles its kernels, the others wait."""
    # Not the card's: processes of other tests have contexts there.
    free_bytes = free_memory_bytes(torch.device("cuda", 0))
    worker = start(llama_path, device="auto", kv_memory=0, dtype="bf16", kernel_cache=str(tmp_path / "kernels"))
    messages = worker.messages()
    estimate, final = (message for message in messages if isinstance(message, MemoryPlan))
    ready = messages[-1]
    assert isinstance(ready, WorkerReady), ready
    assert final.device == ready.device == "cuda:0"
    assert not estimate.is_measured and final.is_measured and ready.memory == final
    assert {"weights", "profile", "cache", "warm_up", "graphs"} <= ready.phases_s.keys() and ready.load_gb_s > 0
    left = free_bytes - final.weight_bytes - final.graph_bytes - final.activation_bytes
    assert final.kv_cache_bytes / left >= 0.95, final
    assert 0 < final.graph_bytes and 0 < final.activation_bytes < estimate.device_bytes // 10
    assert any((tmp_path / "kernels").iterdir()), "no kernel was kept"
    kept = ready.captured_mixed_sizes
    assert kept and list(kept) == sorted(set(kept) & {*mixed_graph_sizes(kept[-1]), *long_graph_sizes(8192)})
    # Steps still run beside a cache that takes the card.
    worker.send(first_step([5, 6, 7]))
    for step_id in range(2, 40):
        worker.send(step([Entry(0, step_id + 1, None, (0,), step_id - 1)], step_id=step_id))
    results = [worker.result() for _ in range(1, 40)]
    assert [result.step_id for result in results] == list(range(1, 40))
    assert all(result.ok.all() for result in results)
    worker.plans.write(RecordKind.SHUTDOWN, b"", 1.0)
    assert worker.process.wait(240) == 0


SLOW = pytest.mark.slow


# A server says how its model was quantized in tests/e2e/test_quantized_server.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "bits"), [pytest.param("off", 0.0, marks=SLOW), ("int8", 8.8), pytest.param("int4", 15.5, marks=SLOW)]
)
def test_a_worker_says_how_it_quantized_and_what_that_takes(
    start: Starter, llama_path: pathlib.Path, quantize: str, bits: float
) -> None:
    worker = start(llama_path, quantize=quantize, quantize_group=32 if quantize == "int4" else 128)
    *earlier, ready = worker.messages()
    plan = next(message for message in earlier if isinstance(message, MemoryPlan))
    assert isinstance(ready, WorkerReady)
    # Rows of 32 and 64 inputs are filled up to 128 in 4 bits.
    embedding_and_norms, layers = 2 * 97 * 32 + 5 * 32, 2 * (32 * 64 + 32 * 32 + 3 * 32 * 64)
    assert embedding_and_norms + layers == ready.parameter_count
    if quantize == "off":
        assert ready.quantization is None and plan.weight_bytes == 4 * ready.parameter_count
    else:
        assert ready.quantization is not None and ready.quantization.scheme == quantize
        assert ready.quantization.bits_per_weight == pytest.approx(bits, abs=0.5)
        assert plan.weight_bytes == 4 * embedding_and_norms + ready.quantization.bits_per_weight * layers / 8
        assert 0 < ready.quantization.mean_relative_error <= ready.quantization.worst_relative_error < 0.12
        assert ready.quantization.worst_tensor.startswith("model.layers.")
    worker.plans.write(RecordKind.SHUTDOWN, b"", 1.0)
    assert worker.process.wait(240) == 0


# A server says how its model was quantized in tests/e2e/test_quantized_server.
@pytest.mark.slow
def test_a_worker_says_how_it_quantized_the_output_layer(start: Starter, llama_path: pathlib.Path) -> None:
    worker = start(llama_path, quantize_head="fp8")
    *earlier, ready = worker.messages()
    plan = next(message for message in earlier if isinstance(message, MemoryPlan))
    assert isinstance(ready, WorkerReady)
    report = ready.quantization
    assert report is not None and (report.scheme, report.head_scheme) == ("", "fp8")
    # A byte a number and four a token, instead of four a number.
    assert report.head_bits_per_weight == 9 and 0 < report.head_relative_error < 0.04
    assert plan.weight_bytes == 4 * ready.parameter_count - 97 * (4 * 32 - 36)
    worker.plans.write(RecordKind.SHUTDOWN, b"", 1.0)
    assert worker.process.wait(240) == 0


@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_an_invalid_folder_is_refused_soon(
    start: Starter, llama_path: pathlib.Path, tmp_path: pathlib.Path, fault: str
) -> None:
    folder = tmp_path / "broken"
    if fault == "truncated":
        folder.mkdir()
        for file in llama_path.iterdir():
            data = file.read_bytes()
            (folder / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    started = time.monotonic()
    worker = start(folder)
    failed = worker.messages()[-1]
    assert isinstance(failed, WorkerFailed) and failed.invalid_model
    assert ("safetensors" if fault == "truncated" else "broken") in failed.reason
    assert worker.process.wait(240) == 2
    # Below 5 s on a quiet machine.
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_blocks": 1 << 40}, r"KV cache .* MiB .*num_blocks is 1099511627776"),
        ({"block_size": 17}, "block_size"),
        # Refused where block_size is; each worker takes 2 s to say so.
        pytest.param({"kv_dtype": "fp4"}, "kv_dtype", marks=pytest.mark.slow),
        # Only the model's layers say so; the backend refuses it before, in test_start_refused.
        pytest.param(
            {"quantize": "int4"},
            "quantize_group is 128, .* the 32 inputs of .*q_proj.weight; quantize_group 32 works",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    start: Starter, llama_path: pathlib.Path, config: dict[str, object], reason: str
) -> None:
    worker = start(llama_path, **config)
    failed = worker.messages()[-1]
    assert isinstance(failed, WorkerFailed) and failed.invalid_model
    assert re.search(reason, failed.reason), failed.reason
    assert worker.process.wait(240) == 2


# Starts a worker with the given arguments, says its id, waits to be killed.
PARENT = """
import os, subprocess, sys, time
descriptors = [int(x) for argument in sys.argv[2:5:2] for x in argument.split(",")]
arguments = [*sys.argv[5:], *sys.argv[1:5], "--parent-pid", str(os.getpid())]
command = [sys.executable, "-m", "headrace_backend.worker", *arguments]
child = subprocess.Popen(command, pass_fds=descriptors[:3] + descriptors[4:])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["during the start", "when ready"])
def test_a_worker_dies_with_its_parent(llama_path: pathlib.Path, when: str) -> None:
    plans, results = create_ring(1 << 20, 1), create_ring(1 << 20, 1)
    passed = (plans.memory, *plans.data_events, plans.space_event)
    result_descriptors = (results.memory, *results.data_events, results.space_event)
    config = json.dumps({"model": str(llama_path), "device": "cpu", "worker_threads": 1, "kv_memory": 1 << 20})
    rings = ["--plan-ring", ",".join(map(str, (*passed, 0))), "--result-ring", ",".join(map(str, result_descriptors))]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *rings, "--config-json", config],
        pass_fds=(*passed, *result_descriptors),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    reader = RingReader(results.memory, results.data_events[0], results.space_event, 0)
    record = reader.read(START_S)
    while when == "when ready" and not isinstance(decode_message(record[1]), WorkerReady):  # type: ignore[index]
        record = reader.read(START_S)
    parent.kill()
    parent.wait()
    poll = select.poll()
    poll.register(child, select.POLLIN)
    assert poll.poll(30_000), "the worker outlived its parent"
    os.close(child)


# A worker that comes to itself when its parent has died: it says that it is there, in a file, and
# becomes a worker then.
LATE_WORKER = """
import os, pathlib, sys, time
parent = os.getppid()
pathlib.Path(sys.argv[1]).touch()
while os.getppid() == parent:
    time.sleep(0.01)
os.execv(sys.executable, [sys.executable, "-m", "headrace_backend.worker", *sys.argv[2:]])
"""
# Starts it as the backend starts workers, and waits to be killed.
BACKEND = """
import asyncio, sys
from headrace_backend.step.ring import create_ring
from headrace_backend.server.workers.early_workers import EarlyWorkers
from headrace_backend.server.workers.worker_process import RankDescriptors, WorkerProcess

async def main():
    command = (sys.executable, "-c", sys.argv[1], sys.argv[2])
    plans, ranks = create_ring(1 << 20, 1), RankDescriptors.create(1)
    about = 0, True, command, sys.argv[3], plans, 1 << 20, lambda rank, records: None, ranks
    worker = WorkerProcess(*about, EarlyWorkers())
    print(worker.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_worker_whose_backend_died_before_it_could_look_ends(
    llama_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = json.dumps({"model": str(llama_path), "device": "cpu", "worker_threads": 1, "kv_memory": 1 << 20})
    is_there = tmp_path / "is_there"
    arguments = [sys.executable, "-c", BACKEND, LATE_WORKER, str(is_there), config]
    backend = subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE)
    assert backend.stdout is not None
    worker = os.pidfd_open(int(backend.stdout.readline()))
    while not is_there.exists():
        time.sleep(0.01)
    backend.kill()
    backend.wait()
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    try:
        assert poll.poll(START_S * 1000), "the worker outlived its backend"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        os.close(worker)
