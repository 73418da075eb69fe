"""Tensors in shared memory: registered regions, and requests that name them."""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from tests.kserve.conformance_models import all_models
from tests.kserve.wire import Wire, numbers_of, request
from tests.service.harness import Running, running_service

from headrace_protos.inference import grpc_service_pb2 as pb

SIZE = 256


@pytest.fixture
def region() -> Iterator[pathlib.Path]:
    """An object of shared memory: 16 fives, 16 ones, room for 32 numbers more."""
    path = pathlib.Path(f"/dev/shm/hrtest-{secrets.token_hex(6)}")
    path.write_bytes(np.array([5] * 16 + [1] * 16 + [0] * 32, "<i4").tobytes())
    yield path
    path.unlink(missing_ok=True)


async def register(wire: Wire, name: str, key: str, size: int = SIZE, offset: int = 0) -> None:
    await wire.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)
    )


def placed(message: object, region: str, size: int, offset: int) -> None:
    parameters = message.parameters  # type: ignore[attr-defined]
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = size
    if offset:
        parameters["shared_memory_offset"].int64_param = offset


def in_region(name: str = "r", outputs: bool = True, size: int = 64, offset: int = 64) -> pb.ModelInferRequest:
    message = request("simple")
    placed(message.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 16]), name, 64, 0)
    placed(message.inputs.add(name="INPUT1", datatype="INT32", shape=[1, 16]), name, size, offset)
    if outputs:
        placed(message.outputs.add(name="OUTPUT0"), name, 64, 128)
        message.outputs.add(name="OUTPUT1")
    return message


async def refused(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call  # type: ignore[misc]
    return refusal.value


async def test_inputs_are_read_and_outputs_written_where_they_are_placed(wire: Wire, region: pathlib.Path) -> None:
    await register(wire, "r", f"/{region.name}")
    response = await wire.ModelInfer(in_region())
    assert response.raw_output_contents[0] == b""
    assert response.outputs[0].parameters["shared_memory_region"].string_param == "r"
    assert response.outputs[0].parameters["shared_memory_byte_size"].int64_param == 64
    assert np.frombuffer(region.read_bytes()[128:192], "<i4").tolist() == [6] * 16
    assert numbers_of(response, "OUTPUT1") == [4] * 16
    status = await wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
    assert status.regions["r"].key == f"/{region.name}" and status.regions["r"].byte_size == SIZE


async def test_a_region_that_is_gone_shrunk_or_forgotten_fails_the_request_alone(
    wire: Wire, region: pathlib.Path
) -> None:
    await register(wire, "r", region.name)
    os.truncate(region, 100)
    error = await refused(wire.ModelInfer(in_region()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "smaller than when it was registered" in error.details()
    region.unlink()
    error = await refused(wire.ModelInfer(in_region()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "Unable to open" in error.details()
    await wire.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="r"))
    error = await refused(wire.ModelInfer(in_region()))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "Unable to find shared memory region: 'r'" in error.details()
    assert (await wire.ServerReady(pb.ServerReadyRequest())).ready


async def test_an_output_never_makes_an_object_larger(wire: Wire, region: pathlib.Path) -> None:
    await register(wire, "r", region.name)
    os.truncate(region, 130)
    error = await refused(wire.ModelInfer(in_region()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert region.stat().st_size == 130


@pytest.mark.parametrize(
    ("key", "size", "offset", "why"),
    [
        ("/", 1, 0, "key: must be the name"),
        ("", 1, 0, "key: must be the name"),
        ("..", 1, 0, "key: must be the name"),
        ("../x", 1, 0, "key: must be the name"),
        ("/../x", 1, 0, "key: must be the name"),
        ("a/../../etc/passwd", 1, 0, "key: must be the name"),
        ("///x", 1, 0, "key: must be the name"),
        ("x\0y", 1, 0, "key: must be the name"),
        ("triton_python_backend_shm_region_1", 1, 0, "reserved for servers"),
        ("/triton_python_backend_shm_region_1", 1, 0, "reserved for servers"),
        ("//triton_python_backend_shm_region_1", 1, 0, "key: must be the name"),
        ("/headrace-ring", 1, 0, "reserved for servers"),
        ("no-such-object", 1, 0, "Unable to open shared memory region"),
        ("REGION", SIZE + 1, 0, "end 257 bytes into an object of 256"),
        ("REGION", 1, SIZE, "end 257 bytes into an object of 256"),
        ("REGION", 0, 0, "byte_size: must be at least 1"),
        ("REGION", (1 << 64) - 1, 2, "byte_size: must be at least 1, and end"),
        ("REGION", 1, (1 << 64) - 1, "byte_size: must be at least 1, and end"),
    ],
)
async def test_what_cannot_be_a_region_is_refused(
    wire: Wire, region: pathlib.Path, key: str, size: int, offset: int, why: str
) -> None:
    error = await refused(register(wire, "r", region.name if key == "REGION" else key, size, offset))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert why in error.details()
    assert "/dev/shm" not in error.details()
    assert not (await wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions


async def test_links_and_folders_are_no_regions(wire: Wire) -> None:
    link = pathlib.Path(f"/dev/shm/hrtest-{secrets.token_hex(6)}")
    link.symlink_to("/etc/passwd")
    try:
        error = await refused(register(wire, "r", link.name, 1))
    finally:
        link.unlink()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "passwd" not in error.details()


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb"])
async def test_names_are_short_and_printable(wire: Wire, region: pathlib.Path, name: str) -> None:
    error = await refused(register(wire, name, region.name))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "name: must have 1 to 256" in error.details()


async def test_a_name_is_taken_once(wire: Wire, region: pathlib.Path) -> None:
    await register(wire, "r", region.name)
    error = await refused(register(wire, "r", region.name))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert error.details() == "shared memory region 'r' already in manager"


@pytest.mark.parametrize(("size", "offset"), [(SIZE + 1, 0), (64, SIZE - 63), (-1, 64), (64, -1), (64, (1 << 63) - 1)])
async def test_a_tensor_lies_within_its_region(wire: Wire, region: pathlib.Path, size: int, offset: int) -> None:
    await register(wire, "r", region.name)
    error = await refused(wire.ModelInfer(in_region(size=size, offset=offset)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Invalid offset + byte size for shared memory region: 'r'" in error.details()


async def test_the_size_in_a_region_is_the_tensors(wire: Wire, region: pathlib.Path) -> None:
    await register(wire, "r", region.name)
    error = await refused(wire.ModelInfer(in_region(size=60)))
    assert "Expected 64, got 60" in error.details()
    message = in_region(outputs=False)
    placed(message.outputs.add(name="OUTPUT0"), "r", 60, 128)
    error = await refused(wire.ModelInfer(message))
    assert "the output has 64 bytes, shared_memory_byte_size is 60" in error.details()


async def test_parameters_of_a_tensor_have_their_types(wire: Wire, region: pathlib.Path) -> None:
    await register(wire, "r", region.name)
    message = in_region()
    message.inputs[0].parameters["shared_memory_byte_size"].string_param = "64"
    assert "expected int64_param" in (await refused(wire.ModelInfer(message))).details()
    message = in_region()
    del message.inputs[0].parameters["shared_memory_region"]
    assert "without shared_memory_region" in (await refused(wire.ModelInfer(message))).details()
    message = in_region()
    message.inputs[0].parameters["other"].bool_param = True
    assert "parameter 'other' of tensor 'INPUT0' is not known" in (await refused(wire.ModelInfer(message))).details()


async def test_nothing_of_it_works_unless_switched_on(
    model_path: pathlib.Path, sockets: pathlib.Path, region: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, conformance_models=all_models.__name__) as running:
        wire = Wire(running.channel)
        calls = [
            register(wire, "r", region.name),
            wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()),
            wire.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest()),
            wire.ModelInfer(in_region()),
        ]
        for call in calls:
            error = await refused(call)
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "Client shared memory is disabled" in error.details()
        metadata = await wire.ServerMetadata(pb.ServerMetadataRequest())
        assert "system_shared_memory" not in metadata.extensions


async def test_cuda_memory_is_refused_by_name_and_forgetting_it_is_none(wire: Wire) -> None:
    error = await refused(wire.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="c", byte_size=4)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED and "CUDA shared memory" in error.details()
    assert not (await wire.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
    await wire.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest())


async def test_unregistering_all_forgets_all(wire: Wire, region: pathlib.Path, running: Running) -> None:
    for name in ("a", "b"):
        await register(wire, name, region.name)
    await wire.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="c"))
    assert set((await wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions) == {"a", "b"}
    error = await refused(wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="c")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    await wire.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
    assert not (await wire.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions
