"""The gate in front of every method: who gets through, and what the others hear."""

from __future__ import annotations

import contextlib
import datetime
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.service.auth.credentials_case import bearer, channel, entry, write_keys
from tests.service.harness import Running, events_of, running_service
from tests.support.ports import free_address

from headrace.v1 import admin_pb2, generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_protos.inference import grpc_service_pb2
from headrace_protos.orca import orca_pb2
from headrace_service.auth import api_keys, caller, permissions
from headrace_service.auth.interceptor import AuthInterceptor
from headrace_service.auth.refusals import UNAUTHENTICATED_TEXT

KEY, READER, ADMIN, BOUND = (api_keys.new_key() for _ in range(4))
OLD, EXPIRED, DISABLED = (api_keys.new_key() for _ in range(3))
Spec = generation_pb2.GenerationSpec
NOW = datetime.datetime.now(datetime.UTC)
AN_HOUR = datetime.timedelta(hours=1)

# Every method of every service, ours and others', as "package.Service/Method".
METHODS = sorted(
    f"{service.full_name}/{method.name}"
    for file in (inference_pb2, admin_pb2, grpc_service_pb2, reflection_pb2, orca_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)


@pytest.fixture
def keys_file(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_keys(
        tmp_path / "keys.json",
        entry(KEY, "all-day"),
        entry(READER, "reader", ["read"]),
        entry(ADMIN, "operator", ["admin"]),
        entry(BOUND, "bound", models=("other",)),
        entry(EXPIRED, "expired", expires=NOW - AN_HOUR),
        entry(DISABLED, "disabled", disabled=True),
        entry(
            api_keys.new_key(),
            "rotated",
            previous=api_keys.PreviousSecret(api_keys.digest_of(OLD).hex(), NOW - AN_HOUR),
        ),
    )


@contextlib.asynccontextmanager
async def guarded(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path, **config: Any
) -> AsyncIterator[Running]:
    async with running_service(model_path, sockets, keys_file=keys_file, **config) as running:
        yield running


async def status(running: Running, method: str, metadata: Any = ()) -> tuple[grpc.StatusCode, str]:
    """How a call with an empty request ends.

    On the wire one request is one request, whatever kind the method is; a grpc.aio client that
    writes a stream may report INTERNAL by itself when its write meets the end of the call.
    """
    call = running.channel.unary_stream(f"/{method}")(b"", metadata=metadata, timeout=60)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    call.cancel()
    return grpc.StatusCode.OK, ""


async def test_no_method_of_any_service_answers_without_a_key(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    assert len(METHODS) > 30
    async with guarded(model_path, sockets, keys_file) as running:
        answers = {method: await status(running, method) for method in METHODS}
        assert answers == dict.fromkeys(METHODS, (grpc.StatusCode.UNAUTHENTICATED, UNAUTHENTICATED_TEXT))
        # Neither is it said which methods there are.
        assert (await status(running, "any.Service/Method"))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_without_a_key_it_is_not_said_that_a_request_is_missing(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with guarded(model_path, sockets, keys_file) as running:
        call = running.channel.stream_unary("/headrace.v1.InferenceService/GetModel")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(iter([]))
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.UNAUTHENTICATED,
            UNAUTHENTICATED_TEXT,
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(iter([]), metadata=bearer(READER))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_no_service_that_the_server_reflects_is_open(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with guarded(model_path, sockets, keys_file) as running:
        methods = [method async for method in _reflected(running.channel)]
        assert "headrace.v1.InferenceService/Generate" in methods
        for method in methods:
            open_to_all = method.startswith(permissions.HEALTH_PREFIX)
            code, _ = await status(running, method)
            assert (code is grpc.StatusCode.UNAUTHENTICATED) is not open_to_all, method
            # What is served stands in the table, or it could only be called with the permission
            # admin.
            assert open_to_all or method in permissions.listed()


async def _reflected(connection: grpc.aio.Channel) -> AsyncIterator[str]:
    """All methods of all services that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(connection)

    async def ask(**request: str) -> Any:
        asked = reflection_pb2.ServerReflectionRequest(**request)
        (answer,) = [one async for one in stub.ServerReflectionInfo(iter([asked]), metadata=bearer(READER))]
        return answer

    for service in (await ask(list_services="")).list_services_response.service:
        described = await ask(file_containing_symbol=service.name)
        for data in described.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            for found in file.service:
                if f"{file.package}.{found.name}" == service.name:
                    for method in found.method:
                        yield f"{service.name}/{method.name}"


def _bad_credentials() -> Iterator[Any]:
    wrong = api_keys.new_key()
    cases = {
        "missing": (),
        "basic": (("authorization", "Basic dXNlcjpwYXNz"),),
        "no scheme": (("authorization", KEY),),
        "empty": (("authorization", ""),),
        "bearer alone": (("authorization", "Bearer"),),
        "empty key": bearer(""),
        "wrong, same length": bearer(wrong),
        "wrong, other length": bearer(KEY[:-1]),
        "right, and more": bearer(KEY + "x"),
        "right, spaces around": bearer(f" {KEY} "),
        "two headers, both right": bearer(KEY) * 2,
        "two headers, one right": (*bearer(KEY), *bearer(wrong)),
        "two keys in one": bearer(f"{KEY},{KEY}"),
        "other header": (("x-api-key", KEY),),
        "64 KiB": bearer("k" * (64 << 10)),
        "its hash": bearer(api_keys.digest_of(KEY).hex()),
        "expired": bearer(EXPIRED),
        "disabled": bearer(DISABLED),
        "rotated away": bearer(OLD),
    }
    for name, metadata in cases.items():
        yield pytest.param(metadata, id=name)


@pytest.mark.parametrize("metadata", list(_bad_credentials()))
async def test_all_bad_credentials_are_answered_alike(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path, metadata: Any
) -> None:
    async with guarded(model_path, sockets, keys_file) as running:
        async with channel(running.address) as connection:
            stub = inference_pb2_grpc.InferenceServiceStub(connection)
            for call in (
                stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
                stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x")), metadata=metadata).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert refused.value.details() == UNAUTHENTICATED_TEXT
            # The connection is none the worse.
            await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(KEY))


async def test_the_schemes_case_does_not_matter(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with guarded(model_path, sockets, keys_file) as running:
        for scheme in ("Bearer", "bearer", "BEARER"):
            await running.stub.ListModels(
                inference_pb2.ListModelsRequest(), metadata=(("authorization", f"{scheme} {KEY}"),)
            )


async def test_a_key_opens_its_groups_of_methods_and_no_other(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    held = {KEY: {"generate", "read"}, READER: {"read"}, ADMIN: {"admin"}}
    served = {method for method in METHODS if method.startswith("headrace.v1.InferenceService/")}
    async with guarded(model_path, sockets, keys_file) as running:
        for key, groups in held.items():
            for method in sorted(served):
                code, text = await status(running, method, bearer(key))
                denied = permissions.needed(method) not in groups
                assert (code is grpc.StatusCode.PERMISSION_DENIED) is denied, method
                assert not denied or method in text


async def test_a_permission_may_be_one_method(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    write_keys(keys_file, entry(KEY, "one", ["headrace.v1.InferenceService/ListModels"]))
    async with guarded(model_path, sockets, keys_file) as running:
        await running.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(KEY))
        code, _ = await status(running, "headrace.v1.InferenceService/GetLoad", bearer(KEY))
        assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_an_unknown_method_is_unimplemented_to_those_who_may_ask(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with guarded(model_path, sockets, keys_file) as running:
        code, _ = await status(running, "headrace.v1.InferenceService/Nothing", bearer(READER))
        assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("needs_key", [False, True])
async def test_health_is_open_unless_the_setting_says_otherwise(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path, needs_key: bool
) -> None:
    async with guarded(model_path, sockets, keys_file, health_needs_key=needs_key) as running:
        health = health_pb2_grpc.HealthStub(running.channel)
        request = health_pb2.HealthCheckRequest()
        assert (await health.Check(request, metadata=bearer(READER))).status == health_pb2.HealthCheckResponse.SERVING
        assert (await health.Check(request, metadata=bearer(ADMIN))).status == health_pb2.HealthCheckResponse.SERVING
        if not needs_key:
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            assert (await health.Watch(request).read()).status == health_pb2.HealthCheckResponse.SERVING
            return
        for call in (health.Check(request), health.Watch(request).read()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("wire", ["unix", "tcp"])
async def test_the_probe_address_answers_health_checks_and_nothing_else(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path, wire: str
) -> None:
    probe = f"unix:{sockets}/probe.sock" if wire == "unix" else free_address()
    async with guarded(model_path, sockets, keys_file, health_needs_key=True, probe=probe):
        async with channel(probe) as connection:
            health = health_pb2_grpc.HealthStub(connection)
            assert (
                await health.Check(health_pb2.HealthCheckRequest())
            ).status == health_pb2.HealthCheckResponse.SERVING
            alive = await health.Check(health_pb2.HealthCheckRequest(service="alive"))
            assert alive.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="no service of that name"):
                await health.Check(health_pb2.HealthCheckRequest(service="headrace.v1.InferenceService"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                stub = inference_pb2_grpc.InferenceServiceStub(connection)
                await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(KEY))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_requests_belong_to_the_key_that_made_them(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with guarded(model_path, sockets, keys_file) as running:
        request = inference_pb2.SubmitRequest(spec=Spec(text="hello"))
        submitted = await running.stub.Submit(request, metadata=bearer(KEY))
        assert running.engine.requests[submitted.request_id].add.tenant == "all-day"
        subscribe = inference_pb2.SubscribeRequest(request_id=submitted.request_id)
        assert await events_of(running.stub.Subscribe(subscribe, metadata=bearer(KEY)))


async def test_a_server_without_keys_serves_everybody_as_the_empty_tenant(running: Running) -> None:
    submitted = await running.stub.Submit(inference_pb2.SubmitRequest(spec=Spec(text="hello")), metadata=bearer("x"))
    assert running.engine.requests[submitted.request_id].add.tenant == ""


async def test_refused_calls_are_logged_with_who_and_where_and_never_with_the_key(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    wrong = api_keys.new_key()
    with structlog.testing.capture_logs() as lines:
        async with guarded(model_path, sockets, keys_file) as running:
            await status(running, "headrace.v1.InferenceService/GetLoad", bearer(wrong))
            await status(running, "headrace.v1.InferenceService/Generate", bearer(READER))
    refused = [line for line in lines if line["event"] == "call.refused"]
    assert [(line["code"], line["key_id"]) for line in refused] == [
        ("UNAUTHENTICATED", ""),
        ("PERMISSION_DENIED", "reader"),
    ]
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in refused)
    assert wrong not in str(lines) and READER not in str(lines)


class _ThreeKinds:
    """A service of every kind of method that says who its handler thinks is calling."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def _answer(self, _: Any, __: Any) -> bytes:
        self.seen.append(caller.current().key_id)
        return b""

    async def _stream(self, _: Any, context: Any) -> None:
        self.seen.append(caller.current().key_id)
        await context.write(b"")

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "some.Service",
            {
                "A": grpc.unary_unary_rpc_method_handler(self._answer),
                "B": grpc.unary_stream_rpc_method_handler(self._stream),
                "C": grpc.stream_unary_rpc_method_handler(self._answer),
                "D": grpc.stream_stream_rpc_method_handler(self._stream),
            },
        )


class _NamedByHeader:
    """Stands in for the keys: the caller is whoever it says."""

    def authenticate(self, metadata: Any) -> caller.Caller:
        name = dict(metadata)["who"]
        may = api_keys.ApiKey(name, "0" * 64, ("admin",), ("*",))
        return caller.Caller(name, lambda: may, {})


async def test_the_caller_reaches_the_handlers_of_all_four_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permissions, "needed", lambda method: permissions.Permission.READ)
    monkeypatch.setattr(permissions, "allows", lambda held, method: True)
    service = _ThreeKinds()
    gate = AuthInterceptor(_NamedByHeader(), admin=True, health_needs_key=True, max_metadata_bytes=8192)  # type: ignore[arg-type]
    server = grpc.aio.server(interceptors=[gate])
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        for method in "ABCD":
            call = connection.stream_stream(f"/some.Service/{method}")
            assert await call(iter([b""]), metadata=(("who", f"me-{method}"),)).read() == b""
    await server.stop(0)
    assert service.seen == ["me-A", "me-B", "me-C", "me-D"]


def test_a_handler_without_the_gate_fails() -> None:
    with pytest.raises(AssertionError, match="without the interceptor"):
        caller.current()


async def test_metadata_is_bounded_for_those_who_are_known(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    large = (("x-large", "v" * 15_000),)
    many = tuple((f"key-{number}", "value") for number in range(500))
    method = "headrace.v1.InferenceService/ListModels"
    async with guarded(model_path, sockets, keys_file) as running:
        for metadata in (large, many):
            assert (await status(running, method, (*bearer(KEY), *metadata)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await status(running, method, metadata))[0] is grpc.StatusCode.UNAUTHENTICATED
        fits = (*bearer(KEY), ("x-large", "v" * 7_000))
        await running.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=fits)
