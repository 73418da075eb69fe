"""Models that come and go over fake processes.

States, order, failures, and what the control socket answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import random
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.support.processes import alive

from headrace_protos.control.v1 import control_pb2, control_pb2_grpc
from headrace_protos.engine.v1 import engine_pb2
from headrace_supervisor import refusals
from headrace_supervisor.control_server import ControlServer
from headrace_supervisor.models.backend_table import BackendTable, Probe
from headrace_supervisor.models.memory_sums import Claim
from headrace_supervisor.models.model_launches import Launch
from headrace_supervisor.processes.managed_process import ProcessGaveUp, ProcessSpec, RestartRule
from headrace_supervisor.refusals import Refused

GIB = 1 << 30
RUNS = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nwhile True: time.sleep(0.02)"
DIES = "import sys; sys.exit(1)"
UNLOADED, LOADING, READY, UNLOADING, FAILED = (
    control_pb2.BACKEND_STATE_UNLOADED,
    control_pb2.BACKEND_STATE_LOADING,
    control_pb2.BACKEND_STATE_READY,
    control_pb2.BACKEND_STATE_UNLOADING,
    control_pb2.BACKEND_STATE_FAILED,
)


class Fakes:
    """Launches of scripts, by model name, and a probe that answers what the test says."""

    default = "a"

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.scripts = {"a": RUNS, "b": RUNS}
        self.launched: list[str] = []
        # Backends of each model.
        self.replicas = 1
        # Holds up the next check; taken by it.
        self.held: threading.Event | None = None
        self.release = lambda: None
        self.serving = asyncio.Event()
        self.serving.set()
        self.idle = asyncio.Event()
        self.idle.set()
        # What is expected of every model, and where it then really runs.
        self.expected = Claim("", "cpu", 0)
        self.device = "cpu"

    def names(self) -> tuple[str, ...]:
        return tuple(self.scripts)

    def check(self, name: str, memory_bytes: int = 0) -> tuple[Claim, ...]:
        if self.held is not None:
            holding, self.held = self.held, None
            self.release = holding.set
            assert holding.wait(30)
        if name not in self.scripts:
            raise refusals.not_found(f"model {name} is unknown")
        return (self.expected._replace(name=name, budget_bytes=memory_bytes),) * self.replicas

    def prepare(self, name: str, memory_bytes: int, replica: int) -> Launch:
        self.launched.append(name)
        index = len(self.launched)
        # The command ends with the script's own arguments; the process notes its id.
        note = (
            f"import os\nwith open({str(self.folder / 'noting')!r} + str(os.getpid()), 'w') as file: "
            "file.write(str(os.getpid()))\n"
            f"os.replace(file.name, {str(self.folder / f'pid-{index}')!r})\n"
        )
        spec = ProcessSpec(name, (sys.executable, "-c", note + self.scripts[name]))
        claim = self.check(name, memory_bytes)[replica]
        return Launch(spec, f"unix:{index}", claim, self.folder / f"refusal-{index}")

    def pids(self) -> list[int]:
        return [int(text) for path in self.folder.glob("pid-*") if (text := path.read_text())]

    async def until_serving(self, address: str) -> engine_pb2.EngineModel:
        await self.serving.wait()
        while not (self.folder / f"pid-{address.removeprefix('unix:')}").exists():
            await asyncio.sleep(0.01)
        return engine_pb2.EngineModel(device=self.device)

    async def until_idle(self, address: str) -> None:
        await self.idle.wait()


@pytest.fixture
def fakes(tmp_path: pathlib.Path) -> Fakes:
    return Fakes(tmp_path)


@pytest_asyncio.fixture
async def table(fakes: Fakes) -> AsyncIterator[BackendTable]:
    made = BackendTable(
        fakes,
        RestartRule(0.01, 3, 0),
        ends_server=lambda name: name == "essential",
        probe=Probe(fakes.until_serving, fakes.until_idle),
        machine_bytes=8 * GIB,
    )
    yield made
    await made.stop_all(asyncio.Event())
    made.fatal.cancelled() or (made.fatal.done() and made.fatal.exception())
    assert alive(fakes.pids()) == []


def state_of(table: BackendTable, name: str) -> Any:
    return {model.name: model.state for model in table.state().models}[name]


async def until(table: BackendTable, name: str, state: Any) -> None:
    async with asyncio.timeout(120):
        async for reported in table.states():
            if {model.name: model.state for model in reported.models}.get(name) == state:
                return


async def until_started(table: BackendTable, name: str) -> None:
    """Waits for the first backend of a model that loads."""
    async with asyncio.timeout(120):
        async for reported in table.states():
            if any(model.engine_address for model in reported.models if model.name == name):
                assert state_of(table, name) == LOADING
                return


async def test_a_model_is_loaded_watched_and_unloaded(table: BackendTable, fakes: Fakes) -> None:
    fakes.serving.clear()
    loading = asyncio.create_task(table.load("a", GIB))
    await until_started(table, "a")
    assert table.state().models[0].engine_address == "unix:1" and table.state().models[0].memory_bytes == GIB
    fakes.serving.set()
    model, existing = await loading
    assert (model.state, existing) == (READY, False)
    assert (await table.load("a"))[1]
    fakes.idle.clear()
    unloading = asyncio.create_task(table.unload("a", 60))
    await until(table, "a", UNLOADING)
    assert alive(fakes.pids()) and table.state().models[0].engine_address
    with pytest.raises(Refused) as refused:
        await table.load("a")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    fakes.idle.set()
    await unloading
    assert state_of(table, "a") == UNLOADED and not table.state().models[0].engine_address
    assert alive(fakes.pids()) == []


async def test_the_grace_bounds_the_wait_for_requests(table: BackendTable, fakes: Fakes) -> None:
    await table.load("a")
    fakes.idle.clear()
    await asyncio.wait_for(table.unload("a", 0.1), 30)
    assert state_of(table, "a") == UNLOADED


async def test_callers_at_the_same_time_share_a_load(table: BackendTable, fakes: Fakes) -> None:
    await asyncio.gather(*(table.load("a") for _ in range(5)), table.load("b"))
    assert sorted(fakes.launched) == ["a", "b"]


async def test_a_caller_whose_check_takes_long_finds_the_model_loaded(table: BackendTable, fakes: Fakes) -> None:
    fakes.held = threading.Event()
    slow = asyncio.create_task(table.load("a"))
    while fakes.held is not None:
        await asyncio.sleep(0.01)
    await table.load("a")
    fakes.release()
    model, _ = await slow
    assert model.state == READY and fakes.launched == ["a"]


async def test_a_load_goes_on_when_its_caller_leaves(table: BackendTable, fakes: Fakes) -> None:
    fakes.serving.clear()
    caller = asyncio.create_task(table.load("a"))
    await until_started(table, "a")
    caller.cancel()
    fakes.serving.set()
    await until(table, "a", READY)


async def test_a_model_may_be_unloaded_while_it_loads(table: BackendTable, fakes: Fakes) -> None:
    fakes.serving.clear()
    loading = asyncio.create_task(table.load("a"))
    await until_started(table, "a")
    await table.unload("a", 60)
    with pytest.raises(Refused, match="unloaded while it loaded"):
        await loading
    assert state_of(table, "a") == UNLOADED
    fakes.serving.set()
    await table.load("a")


async def test_a_model_whose_process_dies_fails_alone(table: BackendTable, fakes: Fakes) -> None:
    fakes.serving.clear()
    fakes.scripts["b"] = DIES
    with pytest.raises(Refused, match="ended 3 times") as refused:
        await table.load("b")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert state_of(table, "b") == FAILED and not table.fatal.done()
    assert "ended 3 times" in next(m.reason for m in table.state().models if m.name == "b")
    fakes.scripts["b"] = RUNS
    fakes.serving.set()
    await table.load("b")
    assert state_of(table, "b") == READY


@pytest.mark.parametrize(
    ("does_not_fit", "code"),
    [(True, grpc.StatusCode.RESOURCE_EXHAUSTED), (False, grpc.StatusCode.FAILED_PRECONDITION)],
)
async def test_a_backends_own_reason_is_what_callers_hear(
    table: BackendTable, fakes: Fakes, does_not_fit: bool, code: grpc.StatusCode
) -> None:
    said = json.dumps({"reason": "1 + 1 = 3", "does_not_fit": does_not_fit})
    fakes.serving.clear()
    fakes.scripts["b"] = f"import sys; open({str(fakes.folder / 'refusal-1')!r}, 'w').write({said!r}); sys.exit(2)"
    with pytest.raises(Refused, match=r"1 \+ 1 = 3") as refused:
        await table.load("b")
    assert refused.value.code is code


async def test_an_essential_model_takes_the_server_with_it(table: BackendTable, fakes: Fakes) -> None:
    fakes.serving.clear()
    fakes.scripts["essential"] = DIES
    with pytest.raises(Refused):
        await table.load("essential")
    assert isinstance(table.fatal.exception(), ProcessGaveUp)


async def test_a_model_that_is_refused_after_it_served_is_failed(table: BackendTable, fakes: Fakes) -> None:
    # Serves at its first start; a second one is refused.
    once = fakes.folder / "once"
    fakes.scripts["b"] = (
        f"import os, sys\nif os.path.exists({str(once)!r}): sys.exit(2)\nopen({str(once)!r}, 'w').close()\n{RUNS}"
    )
    await table.load("b")
    async with asyncio.timeout(120):
        while not once.exists():
            await asyncio.sleep(0.01)
    os.kill(fakes.pids()[0], 9)
    await until(table, "b", FAILED)
    assert not table.fatal.done()


async def test_the_sum_of_budgets_is_bounded_by_the_machine(table: BackendTable, fakes: Fakes) -> None:
    await table.load("a", 5 * GIB)
    with pytest.raises(Refused, match="b 4.00 GiB \\+ a 5.00 GiB = 9.00 GiB") as refused:
        await table.load("b", 4 * GIB)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert state_of(table, "b") == UNLOADED and fakes.launched == ["a"]
    await table.unload("a", 0)
    await table.load("b", 8 * GIB)


async def test_ranks_that_turn_out_to_share_a_cpu_leave_the_gpus_to_others(table: BackendTable, fakes: Fakes) -> None:
    fakes.expected, fakes.device = Claim("", "cuda:0", 0, ranks=2), "cpu x2"
    await table.load("a", GIB)
    # Without a budget, on a GPU that the first model was expected on.
    fakes.expected, fakes.device = Claim("", "cuda:1", 0), "cuda:1"
    await table.load("b")
    assert state_of(table, "b") == READY


async def test_replicas_load_one_after_the_other_and_end_together(table: BackendTable, fakes: Fakes) -> None:
    fakes.replicas = 3
    fakes.serving.clear()
    loading = asyncio.create_task(table.load("a", GIB))
    await until_started(table, "a")
    # The first measures its device's free memory before the second takes any.
    assert fakes.launched == ["a"]
    fakes.serving.set()
    model, _ = await loading
    assert (model.engine_address, list(model.replica_addresses)) == ("unix:1", ["unix:2", "unix:3"])
    assert model.state == READY and model.memory_bytes == GIB and len(alive(fakes.pids())) == 3
    fakes.idle.clear()
    unloading = asyncio.create_task(table.unload("a", 60))
    await until(table, "a", UNLOADING)
    assert len(table.state().models[0].replica_addresses) == 2
    fakes.idle.set()
    await unloading
    assert alive(fakes.pids()) == [] and not table.state().models[0].replica_addresses


async def test_each_replica_claims_its_memory(table: BackendTable, fakes: Fakes) -> None:
    fakes.replicas = 3
    with pytest.raises(Refused, match="a 3.00 GiB \\+ a 3.00 GiB \\+ a 3.00 GiB = 9.00 GiB"):
        await table.load("a", 3 * GIB)
    assert not fakes.launched and state_of(table, "a") == UNLOADED


async def test_a_model_may_be_unloaded_while_a_replica_loads(table: BackendTable, fakes: Fakes) -> None:
    fakes.replicas = 2
    loading = asyncio.create_task(table.load("a"))
    async with asyncio.timeout(120):
        while len(fakes.launched) < 2:
            await asyncio.sleep(0)
    await table.unload("a", 60)
    with contextlib.suppress(Refused):
        await loading
    assert state_of(table, "a") == UNLOADED and alive(fakes.pids()) == []


async def test_a_replica_that_can_not_start_ends_the_others(table: BackendTable, fakes: Fakes) -> None:
    fakes.replicas = 2
    first = fakes.folder / "first"
    fakes.scripts["b"] = (
        f"import os, sys\nif os.path.exists({str(first)!r}): sys.exit(2)\nopen({str(first)!r}, 'w').close()\n{RUNS}"
    )

    async def until_first(address: str) -> engine_pb2.EngineModel:
        while address != "unix:1" or not first.exists():
            await asyncio.sleep(0.01)
        return engine_pb2.EngineModel(device="cpu")

    table._probe = Probe(until_first, fakes.until_idle)
    with pytest.raises(Refused, match="model b, replica 1 on cpu: b refused to start"):
        await table.load("b")
    assert state_of(table, "b") == FAILED and alive(fakes.pids()) == [] and not table.fatal.done()


@pytest.mark.parametrize("name", ["b", "essential"])
async def test_a_replica_that_is_refused_after_it_served_leaves_the_others(
    table: BackendTable, fakes: Fakes, name: str
) -> None:
    # Serve at their first starts; no further one is let through.
    fakes.replicas = 2
    starts = fakes.folder / "starts"
    starts.mkdir()
    fakes.scripts[name] = (
        f"import os, sys, tempfile\nif len(os.listdir({str(starts)!r})) == 2: sys.exit(2)\n"
        f"tempfile.mkstemp(dir={str(starts)!r})\n{RUNS}"
    )
    await table.load(name)
    async with asyncio.timeout(120):
        while len(list(starts.iterdir())) < 2:
            await asyncio.sleep(0.01)
    entry = table._entries[name]
    first, second = (int((fakes.folder / f"pid-{index}").read_text()) for index in (1, 2))
    os.kill(second, 9)
    await asyncio.wait([entry.backends[1].life])
    assert state_of(table, name) == READY and not table.fatal.done() and alive([first]) == [first]
    # The last one takes the model with it.
    os.kill(first, 9)
    if name == "essential":
        await asyncio.wait([table.fatal])
        assert isinstance(table.fatal.exception(), ProcessGaveUp)
    else:
        await until(table, name, FAILED)


async def test_ranks_keep_their_gpus_when_the_first_has_reported_its_own(table: BackendTable, fakes: Fakes) -> None:
    fakes.expected, fakes.device = Claim("", "cuda:0", 0, ranks=2), "cuda:0 x2"
    await table.load("a", GIB)
    fakes.expected = Claim("", "cuda:1", 0)
    with pytest.raises(Refused, match="models that share cuda:1 need a memory budget each, and b has none"):
        await table.load("b")


@pytest.mark.parametrize(("seed", "replicas"), [(0, 1), (1, 1), (2, 2), (3, 3)])
async def test_random_requests_at_the_same_time_keep_the_books_straight(
    table: BackendTable, fakes: Fakes, seed: int, replicas: int
) -> None:
    rng = random.Random(seed)
    fakes.replicas = replicas
    for name in ("c", "d"):
        fakes.scripts[name] = RUNS
    fakes.scripts["dies"] = DIES
    table._take_names(fakes.names())

    async def operator() -> None:
        for _ in range(6):
            name = rng.choice(["a", "b", "c", "d", "dies"])
            with contextlib.suppress(Refused, TimeoutError):
                async with asyncio.timeout(rng.choice([0.05, 5.0])):
                    if rng.random() < 0.6:
                        await table.load(name, rng.choice([1, 2, 5]) * GIB)
                    else:
                        await table.unload(name, rng.choice([0.0, 0.1]))
            running = [model for model in table.state().models if model.state in (LOADING, READY, UNLOADING)]
            claimed = sum(model.memory_bytes * (1 + len(model.replica_addresses)) for model in running)
            assert claimed <= 8 * GIB
            if pids := alive(fakes.pids()):
                if rng.random() < 0.2:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(pids), 9)

    await asyncio.gather(*(operator() for _ in range(6)))
    async with asyncio.timeout(120):
        while any(entry.loading or entry.unloading for entry in table._entries.values()):
            await asyncio.sleep(0.02)
    for name in [model.name for model in table.state().models if model.state == READY]:
        await table.unload(name, 0.0)
    assert all(model.state in (UNLOADED, FAILED) for model in table.state().models)
    assert alive(fakes.pids()) == [] and not table.fatal.done()


async def test_a_model_whose_folder_goes_while_it_loads_is_not_lost(table: BackendTable, fakes: Fakes) -> None:
    fakes.serving.clear()
    first = asyncio.create_task(table.load("a"))
    await until(table, "a", LOADING)
    # Waits for its turn while its folder disappears.
    second = asyncio.create_task(table.load("b"))
    await asyncio.sleep(0.1)
    del fakes.scripts["b"]
    table._take_names(fakes.names())
    fakes.serving.set()
    await first
    with pytest.raises(Refused, match="b is unknown"):
        await second
    table._take_names(fakes.names())
    assert [model.name for model in table.state().models] == ["a"]


@pytest.mark.parametrize("name", ["nobody", "b"])
async def test_what_is_not_loaded_can_not_be_unloaded(table: BackendTable, name: str) -> None:
    with pytest.raises(Refused) as refused:
        await table.unload(name, 0)
    assert refused.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_name_that_is_refused_appears_nowhere(table: BackendTable) -> None:
    with pytest.raises(Refused):
        await table.load("nobody")
    assert [model.name for model in table.state().models] == ["a", "b"]


@pytest.fixture
def short_folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield pathlib.Path(folder)


@pytest_asyncio.fixture
async def control(
    table: BackendTable, short_folder: pathlib.Path
) -> AsyncIterator[control_pb2_grpc.ControlServiceStub]:
    server = ControlServer(table)
    await server.start(f"unix:{short_folder}/control.sock")
    async with grpc.aio.insecure_channel(f"unix:{short_folder}/control.sock") as channel:
        yield control_pb2_grpc.ControlServiceStub(channel)
    await server.stop()


async def test_watchers_hear_the_state_at_once_and_every_change(
    control: control_pb2_grpc.ControlServiceStub, table: BackendTable, fakes: Fakes
) -> None:
    watches = [control.Watch(control_pb2.WatchRequest(service_name=f"service-{i}")) for i in range(3)]
    for watch in watches:
        first = await watch.read()
        assert (first.default_model, first.draining, len(first.models)) == ("a", False, 2)
    await control.SetDraining(control_pb2.SetDrainingRequest(draining=True))
    for watch in watches:
        assert (await watch.read()).draining
    loaded = await control.LoadModel(control_pb2.LoadModelRequest(name="a", memory_bytes=GIB))
    assert loaded.model.state == READY and not loaded.existing
    for watch in watches:
        reported = control_pb2.ServerState()
        while not any(model.state == READY for model in reported.models):
            reported = await watch.read()
        watch.cancel()
    await control.UnloadModel(control_pb2.UnloadModelRequest(name="a"))
    assert state_of(table, "a") == UNLOADED


@pytest.mark.parametrize(
    ("method", "request_message", "code"),
    [
        ("LoadModel", control_pb2.LoadModelRequest(name="x"), grpc.StatusCode.NOT_FOUND),
        ("UnloadModel", control_pb2.UnloadModelRequest(name="x"), grpc.StatusCode.NOT_FOUND),
        ("UnloadModel", control_pb2.UnloadModelRequest(name="x", grace_ns=1 << 63), grpc.StatusCode.INVALID_ARGUMENT),
        ("LoadModel", control_pb2.LoadModelRequest(name="a", memory_bytes=1 << 63), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_refusals_keep_their_codes(
    control: control_pb2_grpc.ControlServiceStub, method: str, request_message: Any, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await getattr(control, method)(request_message)
    assert error.value.code() is code


@contextlib.asynccontextmanager
async def table_of_first(fakes: Fakes, *names: str) -> AsyncIterator[BackendTable]:
    """A table that is to load these models at start, and nothing else that `table` has."""
    made = BackendTable(
        fakes,
        RestartRule(0.01, 3, 0),
        ends_server=lambda name: False,
        first=names,
        probe=Probe(fakes.until_serving, fakes.until_idle),
        machine_bytes=8 * GIB,
    )
    try:
        yield made
    finally:
        await made.stop_all(asyncio.Event())


async def test_the_server_starts_until_all_its_first_models_serve(fakes: Fakes) -> None:
    fakes.serving.clear()
    async with table_of_first(fakes, "a", "b") as table:
        # What a service that connects before anything else hears.
        assert table.state().starting
        loading = asyncio.create_task(table.load_first())
        await until_started(table, "a")
        # The second one waits for the first, and is no unknown name meanwhile.
        assert [(m.state, m.engine_address) for m in table.state().models] == [(LOADING, "unix:1"), (LOADING, "")]
        fakes.serving.set()
        async for reported in table.states():
            ready = all(model.state == READY for model in reported.models)
            assert reported.starting or ready
            if not reported.starting:
                break
        await loading


async def test_a_first_model_that_can_not_load_leaves_the_server_starting(fakes: Fakes) -> None:
    fakes.scripts["b"] = DIES
    probe = fakes.until_serving

    async def until_a(address: str) -> engine_pb2.EngineModel:
        return await (probe(address) if address == "unix:1" else asyncio.Event().wait())  # type: ignore[return-value]

    fakes.until_serving = until_a  # type: ignore[method-assign]
    async with table_of_first(fakes, "a", "b") as table:
        with pytest.raises(Refused, match="model b: b ended 3 times"):
            await table.load_first()
        assert table.state().starting and state_of(table, "a") == READY and state_of(table, "b") == FAILED


async def test_the_server_starts_without_a_model_that_an_operator_unloads(fakes: Fakes) -> None:
    fakes.serving.clear()
    async with table_of_first(fakes, "a", "b") as table:
        loading = asyncio.create_task(table.load_first())
        await until_started(table, "a")
        await table.unload("b", 0)
        fakes.serving.set()
        await loading
        assert not table.state().starting
        assert state_of(table, "a") == READY and state_of(table, "b") == UNLOADED


async def test_a_load_that_waits_for_its_turn_may_be_unloaded_and_asked_for_again(
    table: BackendTable, fakes: Fakes
) -> None:
    fakes.serving.clear()
    first = asyncio.create_task(table.load("a"))
    await until(table, "a", LOADING)
    waiting = asyncio.create_task(table.load("b"))
    await until(table, "b", LOADING)
    await table.unload("b", 0)
    assert state_of(table, "b") == UNLOADED
    again = asyncio.create_task(table.load("b"))
    await until(table, "b", LOADING)
    fakes.serving.set()
    await first
    with pytest.raises(Refused, match="unloaded while it loaded"):
        await waiting
    await again
    assert state_of(table, "b") == READY and fakes.launched == ["a", "b"]


async def test_a_load_that_is_refused_leaves_the_model_as_it_was(table: BackendTable, fakes: Fakes) -> None:
    fakes.serving.clear()
    fakes.scripts["b"] = DIES
    with pytest.raises(Refused):
        await table.load("b")
    reason = {model.name: model.reason for model in table.state().models}["b"]
    fakes.serving.set()
    await table.load("a", 7 * GIB)
    with pytest.raises(Refused, match="9.00 GiB"):
        await table.load("b", 2 * GIB)
    assert state_of(table, "b") == FAILED
    assert {model.name: model.reason for model in table.state().models}["b"] == reason != ""
