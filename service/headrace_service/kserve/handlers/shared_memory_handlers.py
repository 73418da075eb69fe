"""The RPCs about shared memory.

The system's, in `shared_memory`, and CUDA's, which this server does not have.
"""

from __future__ import annotations

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.shared_memory import SharedMemoryRegions

_NO_CUDA = "CUDA shared memory is not supported: this service has no GPU of its own; use system shared memory"


class SharedMemoryHandlers:
    """Handlers of the RPCs that register shared memory."""

    def __init__(self, regions: SharedMemoryRegions) -> None:
        self._regions = regions

    async def status(
        self, request: pb.SystemSharedMemoryStatusRequest, call: Call
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Lists the registered regions."""
        return self._regions.of(call.caller).status(request.name)

    async def register(
        self, request: pb.SystemSharedMemoryRegisterRequest, call: Call
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Registers a region."""
        self._regions.of(call.caller).register(request)
        return pb.SystemSharedMemoryRegisterResponse()

    async def unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, call: Call
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forgets one region or all."""
        self._regions.of(call.caller).unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(
        self, request: pb.CudaSharedMemoryStatusRequest, call: Call
    ) -> pb.CudaSharedMemoryStatusResponse:
        """Lists no regions, since there can be none."""
        self._regions.check_enabled()
        if request.name:
            raise errors.not_found(f"Unable to find cuda shared memory region: {errors.echo(request.name)}")
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_register(
        self, request: pb.CudaSharedMemoryRegisterRequest, call: Call
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """Refuses to register CUDA memory, which this server does not read."""
        raise refusals.unsupported(_NO_CUDA)

    async def cuda_unregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, call: Call
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Does nothing, as there is nothing to forget.

        Programs call it before they begin with system shared memory.
        """
        self._regions.check_enabled()
        return pb.CudaSharedMemoryUnregisterResponse()
