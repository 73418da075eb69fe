"""Tensors in POSIX shared memory that a client on this machine made.

Owns the regions that clients registered, known to all service processes and to their tenant alone,
and the reading and writing of tensors in them. Off unless the server is configured otherwise: who
may register may read and write memory of this user's programs. Objects are opened by name under the
system's shared memory folder, nothing else, never created, and mapped for one access only, so that
a region that shrinks fails one request and not the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors
from headrace_service.auth.caller import Caller
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.shared_document import SharedDocument
from headrace_service.kserve.messages.tensors import InputTensor

MAX_REGIONS = 1024
MAX_TENSOR_BYTES = 64 << 20
_MAX_NAME_CHARS = 256
_MAX_SIZE = 1 << 62
_KEY = re.compile(r"/?(?!\.\.?$)[A-Za-z0-9._-]{1,250}")
# Objects of servers themselves; Triton refuses its own by the same rule.
_RESERVED = ("triton_python_backend_shm_region_", "headrace")
_FOLDER = "/dev/shm"
_METHOD = "inference.GRPCInferenceService/SystemSharedMemoryRegister"
# Sent by clients that speak HTTP as well; what they say, the bytes say too.
_OF_OTHERS = ("binary_data", "binary_data_size", "classification")
_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
PARAMETERS = frozenset((_REGION, _SIZE, _OFFSET))
_DISABLED = "Client shared memory is disabled; the server's setting kserve_shared_memory switches it on"


class Placement:
    """The place of a tensor in a region: an open object, and a range within it."""

    def __init__(self, region: str, key: str, offset: int, size: int) -> None:
        self.region = region
        self.offset = offset
        self.size = size
        self._key = key

    def read(self) -> bytes:
        """Returns the tensor's bytes.

        Raises ServiceError: INVALID_ARGUMENT; the object is gone or has shrunk.
        """
        with _opened(self._key, os.O_RDONLY, self.region) as descriptor:
            data = os.pread(descriptor, self.size, self.offset)
        if len(data) != self.size:
            raise self._shrunk()
        return data

    def write(self, data: bytes) -> None:
        """Writes a tensor's bytes to its place in shared memory.

        Raises:
            ServiceError: INVALID_ARGUMENT; they do not fit, or the object is gone or has shrunk.
                RESOURCE_EXHAUSTED; the system has no memory for a part of the object that nobody
                has written yet.
        """
        if len(data) > self.size:
            raise refusals.invalid(
                f"shared memory region '{self.region}': the output has {len(data)} bytes, {_SIZE} is {self.size}", _SIZE
            )
        with _opened(self._key, os.O_RDWR, self.region) as descriptor:
            # Writing past its end would make the object larger.
            if os.fstat(descriptor).st_size < self.offset + len(data):
                raise self._shrunk()
            if not _write_all(descriptor, data, self.offset):
                raise errors.exhausted(f"shared memory region '{self.region}': the system has no memory left for it")

    def _shrunk(self) -> errors.ServiceError:
        return refusals.invalid(f"shared memory region '{self.region}' is smaller than when it was registered", _REGION)


class SharedMemoryRegions:
    """The registered regions.

    Args:
        enabled: whether clients may register any.
        document: where all processes keep them.
    """

    def __init__(self, enabled: bool, document: SharedDocument) -> None:
        self._enabled = enabled
        self._document = document

    @property
    def enabled(self) -> bool:
        """Whether clients may register regions."""
        return self._enabled

    def check_enabled(self) -> None:
        """Raises UNIMPLEMENTED if they may not."""
        if not self._enabled:
            raise refusals.unsupported(_DISABLED)

    def of(self, caller: Caller) -> CallerRegions:
        """Returns the regions of a caller's tenant."""
        return CallerRegions(self, self._document, caller)


class CallerRegions:
    """The regions of one tenant, as one of its callers may use them."""

    def __init__(self, regions: SharedMemoryRegions, document: SharedDocument, caller: Caller) -> None:
        self._regions = regions
        self._document = document
        self._caller = caller
        self._tenant = caller.tenant

    def register(self, request: pb.SystemSharedMemoryRegisterRequest) -> None:
        """Registers a region of shared memory.

        Raises:
            ServiceError: INVALID_ARGUMENT for names, keys and ranges that cannot be;
                ALREADY_EXISTS; RESOURCE_EXHAUSTED.
        """
        self._check_allowed()
        _check_name(request.name)
        _check_key(request.key)
        end = request.offset + request.byte_size
        if request.byte_size < 1 or end > _MAX_SIZE:
            raise refusals.invalid(f"byte_size: must be at least 1, and end at most {_MAX_SIZE} bytes in", "byte_size")
        with _opened(request.key, os.O_RDWR, request.name) as descriptor:
            size = os.fstat(descriptor).st_size
        if end > size:
            raise refusals.invalid(
                f"failed to register shared memory region '{request.name}': invalid args, offset and byte_size end "
                f"{end} bytes into an object of {size}",
                "byte_size",
            )
        region = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
        self._document.update(lambda tenants: _add(tenants.setdefault(self._tenant, {}), request.name, region))

    def unregister(self, name: str) -> None:
        """Forgets a region, or all of them; what reads or writes it now is not disturbed."""
        self._check_allowed()
        if self._known():
            self._document.update(lambda tenants: _forget(tenants, self._tenant, name))

    def status(self, name: str) -> pb.SystemSharedMemoryStatusResponse:
        """Returns one region or all. Raises ServiceError: NOT_FOUND."""
        self._check_allowed()
        regions = self._known()
        if name and name not in regions:
            raise errors.not_found(f"Unable to find system shared memory region: {errors.echo(name)}")
        response = pb.SystemSharedMemoryStatusResponse()
        for known, region in regions.items():
            if not name or known == name:
                response.regions[known].CopyFrom(pb.SystemSharedMemoryStatusResponse.RegionStatus(name=known, **region))
        return response

    def read(self, tensor: InputTensor) -> bytes | None:
        """Returns an input's bytes if its parameters say that it is in a region."""
        placement = self.placement(tensor.name, tensor.parameters)
        return placement.read() if placement is not None else None

    def placement(self, tensor_name: str, parameters: Mapping[str, pb.InferParameter]) -> Placement | None:
        """Returns where a tensor's parameters place it; None: not in a region.

        Raises:
            ServiceError: UNIMPLEMENTED while switched off; PERMISSION_DENIED; NOT_FOUND;
                INVALID_ARGUMENT.
        """
        _check_parameters(tensor_name, parameters)
        if _REGION not in parameters:
            return None
        self._check_allowed()
        name = _value(tensor_name, parameters, _REGION, "string_param")
        size = _value(tensor_name, parameters, _SIZE, "int64_param")
        offset = _value(tensor_name, parameters, _OFFSET, "int64_param") if _OFFSET in parameters else 0
        region = self._known().get(name)
        if region is None:
            raise errors.not_found(
                f"Unable to find shared memory region: {errors.echo(name)} (of tensor '{tensor_name}')"
            )
        if size < 0 or offset < 0 or offset + size > region["byte_size"]:
            raise refusals.invalid(
                f"Invalid offset + byte size for shared memory region: '{name}' (of tensor '{tensor_name}'): "
                f"{offset} + {size} exceeds {region['byte_size']}",
                _OFFSET,
            )
        if size > MAX_TENSOR_BYTES:
            raise refusals.invalid(f"{_SIZE} of tensor '{tensor_name}': must be at most {MAX_TENSOR_BYTES}", _SIZE)
        return Placement(name, region["key"], region["offset"] + offset, size)

    def _known(self) -> dict[str, Any]:
        known: dict[str, Any] = self._document.read().get(self._tenant, {})
        return known

    def _check_allowed(self) -> None:
        """Using a region needs the right to register one, on whichever RPC."""
        self._regions.check_enabled()
        self._caller.check_method(_METHOD)


def _add(regions: dict[str, object], name: str, region: dict[str, object]) -> None:
    if name in regions:
        raise errors.ServiceError(grpc.StatusCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
    if len(regions) >= MAX_REGIONS:
        raise errors.exhausted(f"{MAX_REGIONS} shared memory regions are registered, the most this server allows")
    regions[name] = region


def _forget(tenants: dict[str, Any], tenant: str, name: str) -> None:
    regions = tenants.get(tenant, {})
    if name:
        regions.pop(name, None)
    else:
        regions.clear()


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise refusals.invalid(f"name: must have 1 to {_MAX_NAME_CHARS} printable characters", "name")


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise refusals.invalid(
            "key: must be the name of a shared memory object: letters, digits, '.', '_' and '-', after at most one '/'",
            "key",
        )
    if key.lstrip("/").startswith(_RESERVED):
        raise refusals.invalid("key: begins with a prefix that is reserved for servers", "key")


def _check_parameters(tensor_name: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    for key in parameters:
        if key not in PARAMETERS and key not in _OF_OTHERS:
            raise refusals.invalid(f"parameter {errors.echo(key)} of tensor '{tensor_name}' is not known", tensor_name)
    if "classification" in parameters:
        raise refusals.unsupported(f"parameter 'classification' of tensor '{tensor_name}' is not supported")
    if _REGION not in parameters and not PARAMETERS.isdisjoint(parameters):
        raise refusals.invalid(f"tensor '{tensor_name}' has shared memory parameters without {_REGION}", tensor_name)


def _value(tensor_name: str, parameters: Mapping[str, pb.InferParameter], key: str, kind: str) -> Any:
    if key not in parameters or parameters[key].WhichOneof("parameter_choice") != kind:
        raise refusals.invalid(
            f"invalid value type for '{key}' of tensor '{tensor_name}', expected {kind}", tensor_name
        )
    return getattr(parameters[key], kind)


def _write_all(descriptor: int, data: bytes, offset: int) -> bool:
    """Writes to an object; returns whether there was memory for all of it."""
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], offset + written)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _opened(key: str, flags: int, region: str) -> Iterator[int]:
    """Opens a shared memory object that exists.

    The key was checked: it names an entry of one folder.
    """
    path = f"{_FOLDER}/{key.lstrip('/')}"
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        raise refusals.invalid(f"Unable to open shared memory region: '{region[:64]}'", "key") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise refusals.invalid(f"Unable to open shared memory region: '{region[:64]}'", "key")
        yield descriptor
    finally:
        os.close(descriptor)
