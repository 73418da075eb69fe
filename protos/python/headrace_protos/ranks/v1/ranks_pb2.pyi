from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromHost(_message.Message):
    __slots__ = ("hello", "joined", "refused", "started", "records", "marks", "exited", "ended", "store")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    joined: Joined
    refused: Refused
    started: Started
    records: Records
    marks: Marks
    exited: Exited
    ended: Ended
    store: StoreBytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., records: _Optional[_Union[Records, _Mapping]] = ..., marks: _Optional[_Union[Marks, _Mapping]] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., store: _Optional[_Union[StoreBytes, _Mapping]] = ...) -> None: ...

class ToHost(_message.Message):
    __slots__ = ("task", "start", "record", "dump_stacks", "end", "beat", "store")
    TASK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    DUMP_STACKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    task: Task
    start: Start
    record: Record
    dump_stacks: DumpStacks
    end: End
    beat: Beat
    store: StoreBytes
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., dump_stacks: _Optional[_Union[DumpStacks, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., store: _Optional[_Union[StoreBytes, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "version", "request_layout", "host", "device_kind")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    request_layout: str
    host: str
    device_kind: str
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., request_layout: _Optional[str] = ..., host: _Optional[str] = ..., device_kind: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("engine_config", "revision", "first_rank", "num_ranks", "draft_revision")
    ENGINE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REVISION_FIELD_NUMBER: _ClassVar[int]
    engine_config: str
    revision: str
    first_rank: int
    num_ranks: int
    draft_revision: str
    def __init__(self, engine_config: _Optional[str] = ..., revision: _Optional[str] = ..., first_rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., draft_revision: _Optional[str] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("engine_address",)
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_address: str
    def __init__(self, engine_address: _Optional[str] = ...) -> None: ...

class StoreBytes(_message.Message):
    __slots__ = ("connection", "data")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    connection: int
    data: bytes
    def __init__(self, connection: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("pids",)
    PIDS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pids: _Optional[_Iterable[int]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("kind", "payload")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    kind: int
    payload: bytes
    def __init__(self, kind: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("rank", "records")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(self, rank: _Optional[int] = ..., records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class Marks(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankMarks]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankMarks, _Mapping]]] = ...) -> None: ...

class RankMarks(_message.Message):
    __slots__ = ("counters", "is_stopped")
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    IS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    counters: _containers.RepeatedScalarFieldContainer[int]
    is_stopped: bool
    def __init__(self, counters: _Optional[_Iterable[int]] = ..., is_stopped: bool = ...) -> None: ...

class Exited(_message.Message):
    __slots__ = ("rank", "exit_code", "cause")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    exit_code: int
    cause: str
    def __init__(self, rank: _Optional[int] = ..., exit_code: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class DumpStacks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class End(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: str
    def __init__(self, failure: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
