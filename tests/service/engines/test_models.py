"""A service of several models: fake engines come and go behind a fake supervisor during calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import pathlib
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog
from google.protobuf import duration_pb2
from tests.service.fake_engine import FakeEngine
from tests.service.fake_supervisor import FakeSupervisor
from tests.service.harness import (
    engine_model,
    events_of,
    ids_of,
    kinds_of,
    quick_start,
    retry_delay_s,
    violations_of,
)

from headrace.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_protos.control.v1 import control_pb2
from headrace_service.config import ServiceConfig
from headrace_service.server import Service
from headrace_service.text import text_loader

READY, LOADING = control_pb2.BACKEND_STATE_READY, control_pb2.BACKEND_STATE_LOADING
UNLOADING, UNLOADED = control_pb2.BACKEND_STATE_UNLOADING, control_pb2.BACKEND_STATE_UNLOADED
FAILED = control_pb2.BACKEND_STATE_FAILED
# What each engine answers everything with.
TOKENS = {"a": [10, 11, 12], "b": [20, 21, 22, 23]}


@dataclasses.dataclass
class Server:
    """A service, its supervisor and two engines."""

    service: Service
    supervisor: FakeSupervisor
    engines: dict[str, FakeEngine]
    stub: Any
    admin: Any

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.01)

    def generate(self, model: str) -> Any:
        return self.stub.Generate(inference_pb2.GenerateRequest(spec=spec(model)))

    async def tokens(self, model: str) -> list[int]:
        return ids_of(await events_of(self.generate(model)))

    async def refusal(self, call: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await (call.read() if hasattr(call, "read") else call)
        return error.value

    async def close_unloaded(self, name: str) -> None:
        """What the supervisor says when a model's backend has ended."""
        self.supervisor.set_model(name, UNLOADED)
        await self.until(lambda: all(model.name != name for model in self.service.core.models))


def spec(model: str) -> generation_pb2.GenerationSpec:
    return generation_pb2.GenerationSpec(text="hello", model=model)


@contextlib.asynccontextmanager
async def several(model_path: pathlib.Path, sockets: pathlib.Path, **config: Any) -> AsyncIterator[Server]:
    with quick_start():
        async with _several(model_path, sockets, **config) as server:
            yield server


@contextlib.asynccontextmanager
async def _several(model_path: pathlib.Path, sockets: pathlib.Path, **config: Any) -> AsyncIterator[Server]:
    engines = {}
    supervisor = FakeSupervisor("a")
    await supervisor.start(f"unix:{sockets}/control.sock")
    for name in TOKENS:
        folder = sockets / name
        shutil.copytree(model_path, folder)
        engines[name] = FakeEngine(engine_model(folder), lambda add, index, name=name: TOKENS[name])
        await engines[name].start(f"unix:{sockets}/{name}.sock")
        supervisor.set_model(name, READY, engines[name].address)
    values = {"listen": ("127.0.0.1:0",), "control": f"unix:{sockets}/control.sock", "shutdown_grace_s": 0.5, **config}
    service = Service(ServiceConfig(**values))
    (address,) = await service.start()
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        server = Server(
            service,
            supervisor,
            engines,
            inference_pb2_grpc.InferenceServiceStub(channel),
            admin_pb2_grpc.AdminServiceStub(channel),
        )
        try:
            await server.until(
                lambda: len(list(service.core.models)) == 2 and all(m.serving for m in service.core.models)
            )
            yield server
        finally:
            await service.stop(0)
            await supervisor.stop()
            for engine in engines.values():
                await engine.stop()


@pytest_asyncio.fixture
async def server(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Server]:
    async with several(model_path, sockets) as running:
        yield running


async def test_a_name_leads_to_its_engine_and_no_name_to_the_default(server: Server) -> None:
    assert [await server.tokens(name) for name in ("a", "b", "")] == [TOKENS["a"], TOKENS["b"], TOKENS["a"]]
    error = await server.refusal(server.generate("c"))
    assert error.code() is grpc.StatusCode.NOT_FOUND and "'c'" in (error.details() or "")
    models = (await server.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [model.name for model in models] == ["a", "b"]
    assert (await server.stub.GetLoad(inference_pb2.GetLoadRequest(model="b"))).model == "b"


async def test_requests_are_found_by_their_ids_at_any_model(server: Server) -> None:
    for name in TOKENS:
        made = await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec(name)))
        subscribed = server.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=made.request_id))
        assert ids_of(await events_of(subscribed)) == TOKENS[name]
        await server.stub.Cancel(inference_pb2.CancelRequest(request_id=made.request_id))
        assert [abort.request_id for abort in server.engines[name].aborts] == [made.request_id]
    stray = made.request_id[:-4] + ("0000" if not made.request_id.endswith("0000") else "1111")
    error = await server.refusal(server.stub.Cancel(inference_pb2.CancelRequest(request_id=stray)))
    assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("page_size", [1, 2, 3, 100])
async def test_pages_go_through_the_requests_of_all_models_once(server: Server, page_size: int) -> None:
    made = []
    for name in ("a", "b", "b", "a", "b"):
        made.append((await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec(name)))).request_id)
    listed, token = [], ""
    while True:
        request = inference_pb2.ListRequestsRequest(page_size=page_size, page_token=token)
        page = await server.stub.ListRequests(request)
        assert len(page.requests) <= page_size
        listed, token = [*listed, *page.requests], page.next_page_token
        if not token:
            break
        # What is made while somebody turns pages is newer than all of them.
        await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec("a")))
    assert sorted(row.request_id for row in listed) == sorted(made)
    assert [row.model for row in listed].count("b") == 3
    only = await server.stub.ListRequests(inference_pb2.ListRequestsRequest(model="b"))
    assert {row.model for row in only.requests} == {"b"}


@pytest.mark.parametrize("token", ["x", "AAAA", "AAAAAAAAAAA=", "ÄÖ", "_" * 32])
async def test_what_is_no_page_token_is_refused(server: Server, token: str) -> None:
    error = await server.refusal(server.stub.ListRequests(inference_pb2.ListRequestsRequest(page_token=token)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "page_token" in violations_of(error)


async def test_a_list_names_the_model_that_it_lacks(server: Server) -> None:
    await server.engines["b"].stop()
    await server.until(lambda: not next(m for m in server.service.core.models if m.name == "b").serving)
    error = await server.refusal(server.stub.ListRequests(inference_pb2.ListRequestsRequest()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "model b" in (error.details() or "")
    assert retry_delay_s(error) is not None
    await server.stub.ListRequests(inference_pb2.ListRequestsRequest(model="a"))


async def test_an_engine_that_is_lost_takes_only_its_own_streams(server: Server) -> None:
    for engine in server.engines.values():
        engine.running.clear()
    calls = {name: server.generate(name) for name in TOKENS}
    for call in calls.values():
        await call.read()
    await server.engines["b"].stop()
    error = None
    try:
        await events_of(calls["b"])
    except grpc.aio.AioRpcError as failed:
        error = failed
    assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
    server.engines["a"].running.set()
    assert kinds_of(await events_of(calls["a"]))[-1] == "done"
    assert server.service.core.serving


async def test_a_model_that_leaves_finishes_what_is_open(server: Server) -> None:
    server.engines["b"].running.clear()
    call = server.generate("b")
    await call.read()
    server.supervisor.set_model("b", UNLOADING, server.engines["b"].address)
    await server.until(lambda: any(model.closed for model in server.service.core.models))
    error = await server.refusal(server.generate("b"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and retry_delay_s(error) is not None
    assert (await server.stub.GetLoad(inference_pb2.GetLoadRequest(model="b"))).draining
    assert not (await server.stub.GetLoad(inference_pb2.GetLoadRequest(model="a"))).draining
    server.engines["b"].running.set()
    assert kinds_of(await events_of(call))[-1] == "done"
    await server.close_unloaded("b")
    assert (await server.refusal(server.generate("b"))).code() is grpc.StatusCode.NOT_FOUND
    assert await server.tokens("a") == TOKENS["a"]


async def test_streams_of_a_model_that_is_gone_end_unavailable(server: Server) -> None:
    server.engines["b"].running.clear()
    call = server.generate("b")
    await call.read()
    await server.close_unloaded("b")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await events_of(call)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_health_follows_the_default_model_while_it_is_loaded(server: Server) -> None:
    core = server.service.core
    await server.engines["a"].stop()
    await server.until(lambda: not core.serving)
    await server.close_unloaded("a")
    assert core.serving
    error = await server.refusal(server.generate(""))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "default model" in (error.details() or "")
    await server.close_unloaded("b")
    assert not core.serving
    assert not (await server.stub.ListModels(inference_pb2.ListModelsRequest())).models


async def test_a_model_that_the_service_can_not_read_is_broken_alone(server: Server, sockets: pathlib.Path) -> None:
    await server.close_unloaded("b")
    (sockets / "b" / "tokenizer.json").unlink()
    server.supervisor.loadable["b"] = server.engines["b"].address
    errors = [await server.refusal(server.admin.LoadModel(admin_pb2.LoadModelRequest(model="b")))]
    errors.append(await server.refusal(server.generate("b")))
    for error in errors:
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and str(sockets) not in (error.details() or "")
    assert await server.tokens("a") == TOKENS["a"] and server.service.core.serving
    assert [model.name for model in (await server.stub.ListModels(inference_pb2.ListModelsRequest())).models] == ["a"]


async def test_models_that_come_and_go_leave_nothing_behind(server: Server) -> None:
    address = server.engines["b"].address

    async def once() -> None:
        await server.close_unloaded("b")
        server.supervisor.set_model("b", READY, address)
        await server.until(lambda: any(m.name == "b" and m.serving for m in server.service.core.models))
        assert await server.tokens("b") == TOKENS["b"]

    def held() -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        await once()
    await asyncio.sleep(0.5)
    before = held()
    for _ in range(20):
        await once()
    # A closed channel's descriptors go a moment later.
    await server.until(lambda: all(now <= then + 2 for now, then in zip(held(), before, strict=True)))


async def test_a_lost_supervisor_changes_nothing_and_is_found_again(server: Server, sockets: pathlib.Path) -> None:
    await server.supervisor.stop()
    assert await server.tokens("b") == TOKENS["b"]
    error = await server.refusal(server.admin.LoadModel(admin_pb2.LoadModelRequest(model="b")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    await server.supervisor.start(f"unix:{sockets}/control.sock")
    server.supervisor.state.draining = True
    await server.until(lambda: server.service.core.draining)


# -- AdminService


async def test_a_model_is_loaded_and_unloaded_by_an_operator(server: Server) -> None:
    await server.close_unloaded("b")
    server.supervisor.loadable["b"] = server.engines["b"].address
    loaded = await server.admin.LoadModel(admin_pb2.LoadModelRequest(model="b", memory_bytes=5))
    assert (loaded.model.name, loaded.existing) == ("b", False)
    # It serves by the time of the answer.
    assert await server.tokens("b") == TOKENS["b"]
    assert (await server.admin.LoadModel(admin_pb2.LoadModelRequest(model="b"))).existing
    await server.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="b", grace=duration_pb2.Duration(seconds=7)))
    assert (await server.refusal(server.generate("b"))).code() is grpc.StatusCode.NOT_FOUND
    await server.admin.LoadModel(admin_pb2.LoadModelRequest(model="b"))
    await server.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="b"))
    load, again, unload, _, by_default = server.supervisor.requests
    assert load == control_pb2.LoadModelRequest(name="b", memory_bytes=5) and again.memory_bytes == 0
    # The grace that was asked for; without one, the server's own.
    assert (unload.grace_ns, by_default.grace_ns) == (7 * 10**9, 5 * 10**8)


@pytest.fixture
def all_levels() -> Iterator[None]:
    """Whatever a test before this one has set up, each level is logged."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("all_levels")
@pytest.mark.parametrize("state", [READY, control_pb2.BACKEND_STATE_UNLOADING])
async def test_the_end_of_an_engine_is_a_warning_unless_it_is_unloaded(
    server: Server, state: control_pb2.BackendState
) -> None:
    assert await server.tokens("b") == TOKENS["b"]
    [model] = [model for model in server.service.core.models if model.name == "b"]
    # The service may leave an engine that is unloaded before the engine ends.
    with structlog.testing.capture_logs() as logged:
        server.supervisor.set_model("b", state, server.engines["b"].address)
        await server.until(lambda: model.state == state)
        await server.engines["b"].stop()
        await server.until(lambda: any(entry["event"] == "engine.disconnected" for entry in logged))
    [level, *later] = [entry["log_level"] for entry in logged if entry["event"] == "engine.disconnected"]
    assert level == ("warning" if state == READY else "debug") and "warning" not in later


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    ],
)
async def test_the_supervisors_refusals_reach_the_operator(server: Server, code: grpc.StatusCode) -> None:
    server.supervisor.refusal = (code, "1 GiB + 2 GiB = 3 GiB")
    for call in (
        server.admin.LoadModel(admin_pb2.LoadModelRequest(model="b")),
        server.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="b")),
    ):
        error = await server.refusal(call)
        assert error.code() is code and error.details() == "1 GiB + 2 GiB = 3 GiB"


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("LoadModel", admin_pb2.LoadModelRequest(), "model"),
        ("UnloadModel", admin_pb2.UnloadModelRequest(), "model"),
        ("UnloadModel", admin_pb2.UnloadModelRequest(model="b", grace=duration_pb2.Duration(seconds=3601)), "grace"),
        ("UnloadModel", admin_pb2.UnloadModelRequest(model="b", grace=duration_pb2.Duration(seconds=-1)), "grace"),
    ],
)
async def test_requests_that_break_a_rule_are_refused_by_field(
    server: Server, method: str, message: Any, field: str
) -> None:
    error = await server.refusal(getattr(server.admin, method)(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and list(violations_of(error)) == [field]
    assert server.supervisor.requests == []


async def test_the_repository_is_listed_as_the_supervisor_knows_it(server: Server) -> None:
    server.supervisor.set_model("c", FAILED, reason="why")
    server.supervisor.set_model("d", LOADING, "unix:/nowhere", memory_bytes=9)
    await server.until(lambda: len(server.service.core.admin.repository()) == 4)
    listed = (await server.admin.ListRepository(admin_pb2.ListRepositoryRequest())).models
    assert [(m.name, m.state, m.reason, m.memory_bytes) for m in listed] == [
        ("a", admin_pb2.MODEL_STATE_READY, "", 0),
        ("b", admin_pb2.MODEL_STATE_READY, "", 0),
        ("c", admin_pb2.MODEL_STATE_FAILED, "why", 0),
        ("d", admin_pb2.MODEL_STATE_LOADING, "", 9),
    ]
    assert (await server.refusal(server.generate("c"))).code() is grpc.StatusCode.NOT_FOUND
    # One that loads cannot be reached yet, and is no reason to list nothing.
    assert (await server.refusal(server.generate("d"))).code() is grpc.StatusCode.UNAVAILABLE
    models = (await server.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [model.name for model in models] == ["a", "b"]
    assert (await server.stub.ListRequests(inference_pb2.ListRequestsRequest())).next_page_token == ""


async def test_states_have_the_same_numbers_on_both_protocols() -> None:
    public = {name.removeprefix("MODEL_STATE_"): number for name, number in admin_pb2.ModelState.items()}
    private = {name.removeprefix("BACKEND_STATE_"): number for name, number in control_pb2.BackendState.items()}
    assert public == private


async def test_a_drained_server_finishes_what_runs_and_takes_nothing_new(server: Server) -> None:
    server.engines["b"].running.clear()
    call = server.generate("b")
    await call.read()
    assert (await server.admin.Drain(admin_pb2.DrainRequest())).running_sequences == 1
    assert not server.service.core.serving
    error = await server.refusal(server.generate("a"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "drained" in (error.details() or "")
    submit = await server.refusal(server.stub.Submit(inference_pb2.SubmitRequest(spec=spec("a"))))
    assert submit.code() is grpc.StatusCode.UNAVAILABLE
    assert (await server.stub.GetLoad(inference_pb2.GetLoadRequest())).draining
    server.engines["b"].running.set()
    assert kinds_of(await events_of(call))[-1] == "done"
    assert (await server.admin.Drain(admin_pb2.DrainRequest(resume=True))).running_sequences == 0
    assert server.service.core.serving and await server.tokens("a") == TOKENS["a"]


async def test_a_drain_reports_what_is_preempted(server: Server) -> None:
    server.engines["b"].running.clear()
    call = server.generate("b")
    await call.read()
    server.engines["b"].preempts = True
    drained = await server.admin.Drain(admin_pb2.DrainRequest())
    assert (drained.running_sequences, drained.waiting_requests) == (0, 1)
    server.engines["b"].running.set()
    assert kinds_of(await events_of(call))[-1] == "done"
    drained = await server.admin.Drain(admin_pb2.DrainRequest(resume=True))
    assert (drained.running_sequences, drained.waiting_requests) == (0, 0)


async def test_a_memory_plan_is_the_named_models(server: Server) -> None:
    plan = (await server.admin.GetMemoryPlan(admin_pb2.GetMemoryPlanRequest(model="b"))).plan
    assert plan.measured and plan.kv_cache_bytes
    error = await server.refusal(server.admin.GetMemoryPlan(admin_pb2.GetMemoryPlanRequest(model="c")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_without_telemetry_nothing_can_be_set_or_found(server: Server) -> None:
    request = admin_pb2.SetTraceDetailRequest(detail=generation_pb2.TRACE_DETAIL_SPAN)
    for call in (
        server.admin.SetTraceDetail(request),
        server.admin.GetTrace(admin_pb2.GetTraceRequest(trace_id="a" * 32)),
    ):
        error = await server.refusal(call)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and "telemetry is off" in (error.details() or "")


async def test_a_service_without_a_supervisor_drains_itself_and_loads_nothing(running: Any) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(running.channel)
    for call in (
        admin.LoadModel(admin_pb2.LoadModelRequest(model="x")),
        admin.UnloadModel(admin_pb2.UnloadModelRequest(model="x")),
        admin.ListRepository(admin_pb2.ListRepositoryRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await admin.Drain(admin_pb2.DrainRequest())
    assert not running.service.core.serving
    await admin.Drain(admin_pb2.DrainRequest(resume=True))
    assert running.service.core.serving


def test_a_service_needs_one_source_of_models() -> None:
    for sources in ({}, {"engine": ("unix:/e",), "control": "unix:/c"}):
        with pytest.raises(ValueError, match="engine"):
            ServiceConfig(listen=("127.0.0.1:0",), **sources)


def test_what_lives_as_long_as_its_model_is_left_out_of_collections() -> None:
    model = [["a"]]
    text_loader._leave_out_of_collections()
    try:
        assert not any(seen is model for seen in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(seen is model for seen in gc.get_objects())
    gc.freeze()
