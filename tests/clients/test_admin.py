"""The operator's client: what is sent, typed answers, errors, and which calls are sent again."""

from __future__ import annotations

import datetime
import json

import pytest
from tests.clients.canned_service import CannedServer

import headrace
from headrace import AdminClient, AsyncAdminClient, ModelState, RetryPolicy
from headrace.connections.channel import service_config
from headrace.v1 import generation_pb2


def test_models_are_loaded_listed_and_unloaded(server: CannedServer) -> None:
    with AdminClient(server.address) as admin:
        loaded = admin.load_model("other", memory_bytes=2 << 30)
        assert (loaded.model.name, loaded.existing) == ("other", False)
        assert admin.load_model("other").existing
        assert [request.memory_bytes for request in server.admin.requests] == [2 << 30, 0]
        rows = admin.list_repository()
        assert [(row.name, row.state) for row in rows] == [
            ("broken", ModelState.FAILED),
            ("canned", ModelState.READY),
            ("other", ModelState.READY),
        ]
        assert rows[0].reason == "no config.json" and rows[1].memory_bytes == 3 << 30
        admin.unload_model("other", grace=datetime.timedelta(seconds=1.5))
        assert server.admin.requests[-1].grace.ToMilliseconds() == 1500
        admin.unload_model("other")
        assert not server.admin.requests[-1].HasField("grace")


def test_drain_resume_and_memory_plan(server: CannedServer) -> None:
    with AdminClient(server.address) as admin:
        assert admin.drain() == headrace.Draining(3, 1)
        assert server.admin.draining
        admin.resume()
        assert not server.admin.draining
        plan = admin.memory_plan()
        assert plan is not None and plan.kv_cache_bytes == 4 << 30
        assert admin.memory_plan("other") is None


def test_traces_are_found_and_their_detail_is_set(server: CannedServer) -> None:
    with AdminClient(server.address) as admin:
        assert admin.get_trace(request_id="one") == admin.get_trace(trace_id="a" * 32) == b"first second"
        with pytest.raises(headrace.NotFound, match="not known"):
            admin.get_trace(request_id="unknown")
        with pytest.raises(headrace.InvalidRequest, match="exactly one"):
            admin.get_trace()
        admin.set_trace_detail("span")
        assert server.admin.requests[-1].detail == generation_pb2.TRACE_DETAIL_SPAN
        with pytest.raises(headrace.InvalidRequest, match="off, array, span"):
            admin.set_trace_detail("all")  # type: ignore[arg-type]


async def test_the_async_admin_finds_traces_as_well(server: CannedServer) -> None:
    async with AsyncAdminClient(server.address) as admin:
        assert await admin.get_trace(request_id="one") == b"first second"
        with pytest.raises(headrace.NotFound):
            await admin.get_trace(request_id="unknown")
        await admin.set_trace_detail("off")


def test_refusals_are_typed(server: CannedServer) -> None:
    with AdminClient(server.address) as admin:
        with pytest.raises(headrace.NotFound, match="no model nowhere"):
            admin.load_model("nowhere")
        with pytest.raises(headrace.Overloaded, match="8 GiB left"):
            admin.load_model("other", memory_bytes=16 << 30)
        with pytest.raises(headrace.InvalidRequest, match="memory_bytes"):
            admin.load_model("other", memory_bytes=-1)
        with pytest.raises(headrace.InvalidRequest, match="grace"):
            admin.unload_model("other", grace=float("nan"))


async def test_async_admin_answers_the_same(server: CannedServer) -> None:
    async with AsyncAdminClient(server.address) as admin:
        assert (await admin.load_model("canned")).existing
        assert len(await admin.list_repository()) == 3
        assert await admin.resume() == headrace.Draining(3, 1)
        assert await admin.memory_plan("other") is None
        await admin.unload_model("other", grace=1)
        with pytest.raises(headrace.NotFound):
            await admin.unload_model("nowhere")


def test_a_state_newer_than_this_client_is_unspecified() -> None:
    assert ModelState.from_proto(99) is ModelState.UNSPECIFIED


def test_unloading_is_sent_once() -> None:
    (config,) = json.loads(service_config(RetryPolicy()))["methodConfig"]
    methods = {(name["service"].rpartition(".")[2], name["method"]) for name in config["name"]}
    assert ("AdminService", "LoadModel") in methods and ("AdminService", "UnloadModel") not in methods
    assert ("InferenceService", "Session") not in methods and ("InferenceService", "Generate") not in methods
