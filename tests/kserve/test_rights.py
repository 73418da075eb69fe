"""What a key may use of the KServe wire.

Models by whichever name, and shared memory of its own tenant.
"""

from __future__ import annotations

import pathlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.kserve.conformance_models import all_models
from tests.kserve.test_shared_memory import in_region
from tests.kserve.wire import Wire, request, simple, stream, text
from tests.service.auth.credentials_case import bearer, entry, write_keys
from tests.service.harness import Running, running_service

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service.auth import api_keys

ALL, OTHER, BOUND, READER = (api_keys.new_key() for _ in range(4))
EVERYTHING = ("generate", "read", "shared_memory")


@pytest_asyncio.fixture
async def secured(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> AsyncIterator[tuple[Running, Wire]]:
    keys_file = write_keys(
        tmp_path / "keys.json",
        entry(ALL, "one", EVERYTHING),
        entry(OTHER, "two", EVERYTHING),
        entry(BOUND, "bound", models=("simple",)),
        entry(READER, "reader", ("read",)),
    )
    options = {"conformance_models": all_models.__name__, "kserve_shared_memory": True}
    async with running_service(model_path, sockets, keys_file=keys_file, **options) as running:
        yield running, Wire(running.channel)


@pytest.fixture
def region() -> Iterator[pathlib.Path]:
    path = pathlib.Path(f"/dev/shm/hrtest-{secrets.token_hex(6)}")
    path.write_bytes(b"\1" * 256)
    yield path
    path.unlink()


async def refused(call: Any, code: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    assert refusal.value.code().name == code
    return refusal.value.details() or ""


@pytest.mark.parametrize("name", ["tiny", "vllm_model", "ensemble", "nothing"])
async def test_a_model_that_is_not_the_keys_is_denied_by_whatever_name(
    secured: tuple[Running, Wire], name: str
) -> None:
    running, wire = secured
    key = bearer(BOUND)
    await refused(wire.ModelInfer(request(name), metadata=key), "PERMISSION_DENIED")
    await refused(wire.ModelConfig(pb.ModelConfigRequest(name=name), metadata=key), "PERMISSION_DENIED")
    await refused(wire.ModelReady(pb.ModelReadyRequest(name=name), metadata=key), "PERMISSION_DENIED")
    (answer,) = await stream(wire, text(model=name), metadata=key)
    assert "this key does not allow the model" in answer.error_message
    assert running.engine.requests == {}


async def test_what_a_key_may_not_use_is_not_shown_to_it(secured: tuple[Running, Wire]) -> None:
    _, wire = secured
    index = await wire.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=bearer(BOUND))
    assert [model.name for model in index.models] == ["simple"]
    statistics = await wire.ModelStatistics(pb.ModelStatisticsRequest(), metadata=bearer(BOUND))
    assert [stats.name for stats in statistics.model_stats] == ["simple"]
    await wire.ModelInfer(simple(), metadata=bearer(BOUND))


async def test_methods_need_their_rights(secured: tuple[Running, Wire]) -> None:
    _, wire = secured
    await wire.ServerMetadata(pb.ServerMetadataRequest(), metadata=bearer(READER))
    await refused(wire.ModelInfer(simple(), metadata=bearer(READER)), "PERMISSION_DENIED")
    load = pb.RepositoryModelLoadRequest(model_name="m")
    await refused(wire.RepositoryModelLoad(load, metadata=bearer(ALL)), "PERMISSION_DENIED")
    await refused(wire.LogSettings(pb.LogSettingsRequest(), metadata=bearer(ALL)), "PERMISSION_DENIED")
    await refused(wire.ModelInfer(simple()), "UNAUTHENTICATED")


async def test_a_region_is_its_tenants_alone(secured: tuple[Running, Wire], region: pathlib.Path) -> None:
    _, wire = secured
    register = pb.SystemSharedMemoryRegisterRequest(name="r", key=region.name, byte_size=256)
    await wire.SystemSharedMemoryRegister(register, metadata=bearer(ALL))
    await wire.ModelInfer(in_region(), metadata=bearer(ALL))
    assert "Unable to find" in await refused(wire.ModelInfer(in_region(), metadata=bearer(OTHER)), "NOT_FOUND")
    status = await wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(), metadata=bearer(OTHER))
    assert not status.regions
    await wire.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(), metadata=bearer(OTHER))
    status = await wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(), metadata=bearer(ALL))
    assert list(status.regions) == ["r"]


async def test_using_a_region_needs_the_right_to_register_one(
    secured: tuple[Running, Wire], region: pathlib.Path
) -> None:
    _, wire = secured
    await refused(wire.ModelInfer(in_region(), metadata=bearer(BOUND)), "PERMISSION_DENIED")
