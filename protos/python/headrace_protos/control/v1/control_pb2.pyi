from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BackendState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKEND_STATE_UNSPECIFIED: _ClassVar[BackendState]
    BACKEND_STATE_UNLOADED: _ClassVar[BackendState]
    BACKEND_STATE_LOADING: _ClassVar[BackendState]
    BACKEND_STATE_READY: _ClassVar[BackendState]
    BACKEND_STATE_UNLOADING: _ClassVar[BackendState]
    BACKEND_STATE_FAILED: _ClassVar[BackendState]
BACKEND_STATE_UNSPECIFIED: BackendState
BACKEND_STATE_UNLOADED: BackendState
BACKEND_STATE_LOADING: BackendState
BACKEND_STATE_READY: BackendState
BACKEND_STATE_UNLOADING: BackendState
BACKEND_STATE_FAILED: BackendState

class WatchRequest(_message.Message):
    __slots__ = ("service_name",)
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    service_name: str
    def __init__(self, service_name: _Optional[str] = ...) -> None: ...

class ServerState(_message.Message):
    __slots__ = ("models", "default_model", "draining", "starting")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelBackend]
    default_model: str
    draining: bool
    starting: bool
    def __init__(self, models: _Optional[_Iterable[_Union[ModelBackend, _Mapping]]] = ..., default_model: _Optional[str] = ..., draining: bool = ..., starting: bool = ...) -> None: ...

class ModelBackend(_message.Message):
    __slots__ = ("name", "state", "reason", "engine_address", "memory_bytes", "replica_addresses")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: BackendState
    reason: str
    engine_address: str
    memory_bytes: int
    replica_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[BackendState, str]] = ..., reason: _Optional[str] = ..., engine_address: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., replica_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("name", "memory_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    memory_bytes: int
    def __init__(self, name: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model", "existing")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    model: ModelBackend
    existing: bool
    def __init__(self, model: _Optional[_Union[ModelBackend, _Mapping]] = ..., existing: bool = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("name", "grace_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRACE_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    grace_ns: int
    def __init__(self, name: _Optional[str] = ..., grace_ns: _Optional[int] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: bool = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
