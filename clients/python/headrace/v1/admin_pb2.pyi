import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.v1 import generation_pb2 as _generation_pb2
from headrace.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_UNLOADED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_UNLOADING: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_UNLOADED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_UNLOADING: ModelState
MODEL_STATE_FAILED: ModelState

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "memory_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    memory_bytes: int
    def __init__(self, model: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model", "existing")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    model: _inference_pb2.Model
    existing: bool
    def __init__(self, model: _Optional[_Union[_inference_pb2.Model, _Mapping]] = ..., existing: bool = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "grace")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    model: str
    grace: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRepositoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRepositoryResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[RepositoryModel]
    def __init__(self, models: _Optional[_Iterable[_Union[RepositoryModel, _Mapping]]] = ...) -> None: ...

class RepositoryModel(_message.Message):
    __slots__ = ("name", "state", "reason", "memory_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ModelState
    reason: str
    memory_bytes: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., reason: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume",)
    RESUME_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    def __init__(self, resume: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_sequences", "waiting_requests")
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_sequences: int
    waiting_requests: int
    def __init__(self, running_sequences: _Optional[int] = ..., waiting_requests: _Optional[int] = ...) -> None: ...

class SetTraceDetailRequest(_message.Message):
    __slots__ = ("detail",)
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    detail: _generation_pb2.TraceDetail
    def __init__(self, detail: _Optional[_Union[_generation_pb2.TraceDetail, str]] = ...) -> None: ...

class SetTraceDetailResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("request_id", "trace_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("traces_data",)
    TRACES_DATA_FIELD_NUMBER: _ClassVar[int]
    traces_data: bytes
    def __init__(self, traces_data: _Optional[bytes] = ...) -> None: ...

class GetMemoryPlanRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetMemoryPlanResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: _inference_pb2.MemoryPlan
    def __init__(self, plan: _Optional[_Union[_inference_pb2.MemoryPlan, _Mapping]] = ...) -> None: ...
