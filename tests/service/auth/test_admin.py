"""Administration: who may, when it is served at all, and the line it leaves in the audit log."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import grpc
import pytest
import structlog
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.service.auth.credentials_case import CertificateFolder, bearer, entry, write_keys
from tests.service.harness import running_service

from headrace.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from headrace_protos.inference import grpc_service_pb2
from headrace_protos.orca import orca_pb2
from headrace_service.auth import api_keys, audit, certificates, permissions
from headrace_service.config import ServiceConfig

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        str(_ROOT / part) for part in ("service", "backend", "both_sides", "protos/python", "clients/python")
    ),
}
ADMIN, USER, NARROW = (api_keys.new_key() for _ in range(3))
ADMIN_METHODS = [
    method for method in sorted(permissions.listed()) if permissions.needed(method) is permissions.Permission.ADMIN
]


@pytest.fixture
def keys_file(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_keys(
        tmp_path / "keys.json",
        entry(ADMIN, "operator", ["admin"]),
        entry(USER, "user"),
        entry(NARROW, "narrow", ["admin"], models=("other",)),
    )


async def outcome(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_method_of_the_descriptors_stands_in_one_group() -> None:
    for file in (admin_pb2, inference_pb2, grpc_service_pb2, orca_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                name = f"{service.full_name}/{method.name}"
                assert name in permissions.listed(), name
                # The audit's line is written when a call ends, and knows one request.
                if permissions.needed(name) is permissions.Permission.ADMIN:
                    assert not method.client_streaming
    assert all(f"headrace.v1.AdminService/{m.name}" in ADMIN_METHODS for m in _admin_service().methods)


def _admin_service() -> Any:
    return admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


async def test_each_admin_call_leaves_a_line_however_it_ends(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    with structlog.testing.capture_logs() as lines:
        async with running_service(model_path, sockets, keys_file=keys_file) as running:
            admin = admin_pb2_grpc.AdminServiceStub(running.channel)
            plan = admin_pb2.GetMemoryPlanRequest(model="tiny")
            assert await outcome(admin.GetMemoryPlan(plan, metadata=bearer(ADMIN))) is grpc.StatusCode.OK
            unknown = admin_pb2.GetMemoryPlanRequest(model="nothing")
            assert await outcome(admin.GetMemoryPlan(unknown, metadata=bearer(ADMIN))) is grpc.StatusCode.NOT_FOUND
            assert await outcome(admin.GetMemoryPlan(plan, metadata=bearer(USER))) is grpc.StatusCode.PERMISSION_DENIED
            broken = running.channel.unary_unary("/headrace.v1.AdminService/GetMemoryPlan")
            assert await outcome(broken(b"\xff", metadata=bearer(ADMIN))) is grpc.StatusCode.INVALID_ARGUMENT
            without = running.channel.stream_unary("/headrace.v1.AdminService/GetMemoryPlan")
            assert await outcome(without(iter([]), metadata=bearer(ADMIN))) is grpc.StatusCode.INVALID_ARGUMENT
    written = [line for line in lines if line["event"] == "admin.call"]
    method = "headrace.v1.AdminService/GetMemoryPlan"
    assert [(line["key_id"], line["method"], line["model"], line["outcome"]) for line in written] == [
        ("operator", method, "'tiny'", "OK"),
        ("operator", method, "'nothing'", "NOT_FOUND"),
        ("operator", method, "", "INVALID_ARGUMENT"),
        ("operator", method, "", "INVALID_ARGUMENT"),
    ]
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in written)
    assert [line["key_id"] for line in lines if line["event"] == "call.refused"] == ["user"]
    assert ADMIN not in str(lines)


async def test_the_line_names_the_clients_certificate(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path, keys_file: pathlib.Path
) -> None:
    files = CertificateFolder.make(tmp_path)
    credentials = files.channel_credentials(certificates.new_client(files.ca, "console", 1))
    with structlog.testing.capture_logs() as lines:
        async with running_service(
            model_path,
            sockets,
            keys_file=keys_file,
            **files.settings(mutual=True),
            channel_credentials=credentials,
        ) as running:
            admin = admin_pb2_grpc.AdminServiceStub(running.channel)
            await admin.GetMemoryPlan(admin_pb2.GetMemoryPlanRequest(), metadata=bearer(ADMIN))
    (line,) = [line for line in lines if line["event"] == "admin.call"]
    assert line["certificate"] == "'console'"


async def test_administration_that_is_off_is_unimplemented_and_not_reflected(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    write_keys(keys_file, entry(ADMIN, "operator", ["admin", "read"]))
    async with running_service(model_path, sockets, keys_file=keys_file, admin=False) as running:
        for method in ADMIN_METHODS:
            call = running.channel.unary_unary(f"/{method}")
            assert await outcome(call(b"", metadata=bearer(ADMIN))) is grpc.StatusCode.UNIMPLEMENTED
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), metadata=bearer(ADMIN))]
        names = {service.name for service in listed.list_services_response.service}
        assert "headrace.v1.InferenceService" in names and "headrace.v1.AdminService" not in names


@pytest.mark.parametrize(
    ("listen", "settings", "served"),
    [
        ("127.0.0.1:0", {}, True),
        ("unix:/tmp/x", {}, True),
        ("0.0.0.0:1", {"insecure": True}, False),
        ("0.0.0.0:1", {"insecure": True, "keys_file": "k.json"}, True),
        ("127.0.0.1:0", {"admin": False}, False),
    ],
)
def test_without_keys_administration_is_served_to_this_machine_only(
    listen: str, settings: dict[str, Any], served: bool
) -> None:
    assert ServiceConfig(listen=(listen,), engine=("unix:/x",), **settings).serves_admin is served


def test_a_flood_of_refusals_is_counted_and_not_written() -> None:
    now_s = 0.0
    log = audit.RefusalLog(burst=5, clock_s=lambda: now_s)
    with structlog.testing.capture_logs() as lines:
        for _ in range(1000):
            log.write(grpc.StatusCode.UNAUTHENTICATED, "", "m", "p")
        assert len(lines) == 5
        now_s = 1.0
        log.write(grpc.StatusCode.UNAUTHENTICATED, "", "m", "p")
    assert [line["unwritten_before"] for line in lines] == [0, 0, 0, 0, 0, 995]


async def test_without_keys_a_call_of_this_machine_is_audited_too(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    with structlog.testing.capture_logs() as lines:
        async with running_service(model_path, sockets) as running:
            await admin_pb2_grpc.AdminServiceStub(running.channel).GetMemoryPlan(admin_pb2.GetMemoryPlanRequest())
            await inference_pb2_grpc.InferenceServiceStub(running.channel).ListModels(inference_pb2.ListModelsRequest())
    assert [line["key_id"] for line in lines if line["event"] == "admin.call"] == [""]


async def test_others_who_need_no_key_get_no_administration(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, listen=("0.0.0.0:0",), insecure=True) as running:
        await inference_pb2_grpc.InferenceServiceStub(running.channel).ListModels(inference_pb2.ListModelsRequest())
        for method in ADMIN_METHODS:
            call = running.channel.unary_unary(f"/{method}")
            assert await outcome(call(b"")) is grpc.StatusCode.UNIMPLEMENTED, method


async def test_a_key_for_one_model_administers_no_other(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, keys_file=keys_file) as running:
        admin = admin_pb2_grpc.AdminServiceStub(running.channel)
        for call in (
            admin.LoadModel(admin_pb2.LoadModelRequest(model="tiny"), metadata=bearer(NARROW)),
            admin.UnloadModel(admin_pb2.UnloadModelRequest(model="tiny"), metadata=bearer(NARROW)),
            admin.GetMemoryPlan(admin_pb2.GetMemoryPlanRequest(), metadata=bearer(NARROW)),
        ):
            assert await outcome(call) is grpc.StatusCode.PERMISSION_DENIED
        for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
            request = getattr(grpc_service_pb2, f"{method}Request")(model_name="tiny").SerializeToString()
            call = running.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            assert await outcome(call(request, metadata=bearer(NARROW))) is grpc.StatusCode.PERMISSION_DENIED


def test_audit_lines_are_written_whatever_is_logged_otherwise() -> None:
    """In a process of its own: logs are set up once for each."""
    code = """
from headrace_service import logs
from headrace_service.auth import audit_log
import structlog
logs.configure("json", "error")
logs.switch_by(lambda: logs.Switches(debug=False, info=False, warning=False, error=False))
structlog.get_logger().error("other")
audit_log.logger().info("admin.call", key_id="me")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=_ENVIRONMENT, capture_output=True, text=True, timeout=600, check=True
    )
    (line,) = [json.loads(line) for line in ended.stderr.splitlines()]
    assert (line["event"], line["key_id"], line["audit"]) == ("admin.call", "me", True)
