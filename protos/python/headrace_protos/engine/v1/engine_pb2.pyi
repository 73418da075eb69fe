from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_CAUSE_UNSPECIFIED: _ClassVar[AbortCause]
    ABORT_CAUSE_CANCELLED: _ClassVar[AbortCause]
    ABORT_CAUSE_DEADLINE: _ClassVar[AbortCause]

class OutputEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_END_REASON_UNSPECIFIED: _ClassVar[OutputEndReason]
    OUTPUT_END_REASON_STOP: _ClassVar[OutputEndReason]
    OUTPUT_END_REASON_LENGTH: _ClassVar[OutputEndReason]
    OUTPUT_END_REASON_CANCELLED: _ClassVar[OutputEndReason]
    OUTPUT_END_REASON_DEADLINE: _ClassVar[OutputEndReason]
    OUTPUT_END_REASON_ERROR: _ClassVar[OutputEndReason]
ABORT_CAUSE_UNSPECIFIED: AbortCause
ABORT_CAUSE_CANCELLED: AbortCause
ABORT_CAUSE_DEADLINE: AbortCause
OUTPUT_END_REASON_UNSPECIFIED: OutputEndReason
OUTPUT_END_REASON_STOP: OutputEndReason
OUTPUT_END_REASON_LENGTH: OutputEndReason
OUTPUT_END_REASON_CANCELLED: OutputEndReason
OUTPUT_END_REASON_DEADLINE: OutputEndReason
OUTPUT_END_REASON_ERROR: OutputEndReason

class ToEngine(_message.Message):
    __slots__ = ("hello", "add", "abort", "attach", "detach", "list", "load", "find_key", "quota_peers", "quota_report", "held_engines")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FIND_KEY_FIELD_NUMBER: _ClassVar[int]
    QUOTA_PEERS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_REPORT_FIELD_NUMBER: _ClassVar[int]
    HELD_ENGINES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    add: AddRequest
    abort: AbortRequest
    attach: AttachRequest
    detach: DetachRequest
    list: ListQuery
    load: LoadQuery
    find_key: KeyQuery
    quota_peers: QuotaPeers
    quota_report: QuotaReport
    held_engines: HeldEngines
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., add: _Optional[_Union[AddRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., detach: _Optional[_Union[DetachRequest, _Mapping]] = ..., list: _Optional[_Union[ListQuery, _Mapping]] = ..., load: _Optional[_Union[LoadQuery, _Mapping]] = ..., find_key: _Optional[_Union[KeyQuery, _Mapping]] = ..., quota_peers: _Optional[_Union[QuotaPeers, _Mapping]] = ..., quota_report: _Optional[_Union[QuotaReport, _Mapping]] = ..., held_engines: _Optional[_Union[HeldEngines, _Mapping]] = ...) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("welcome", "added", "aborted", "attached", "refused", "step", "list", "load", "state", "unguarded", "quota_report")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UNGUARDED_FIELD_NUMBER: _ClassVar[int]
    QUOTA_REPORT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    added: Added
    aborted: Aborted
    attached: Attached
    refused: Refused
    step: StepOutputs
    list: RequestList
    load: Load
    state: EngineState
    unguarded: Unguarded
    quota_report: QuotaReport
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., added: _Optional[_Union[Added, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., step: _Optional[_Union[StepOutputs, _Mapping]] = ..., list: _Optional[_Union[RequestList, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., unguarded: _Optional[_Union[Unguarded, _Mapping]] = ..., quota_report: _Optional[_Union[QuotaReport, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "service_name", "wants_step_records", "request_layout", "guards")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    WANTS_STEP_RECORDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GUARDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    service_name: str
    wants_step_records: bool
    request_layout: str
    guards: bool
    def __init__(self, protocol_version: _Optional[int] = ..., service_name: _Optional[str] = ..., wants_step_records: bool = ..., request_layout: _Optional[str] = ..., guards: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "model", "state", "engine", "unix_offset_ns", "log_ttl_ns", "shares_quotas")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    UNIX_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    LOG_TTL_NS_FIELD_NUMBER: _ClassVar[int]
    SHARES_QUOTAS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model: EngineModel
    state: EngineState
    engine: str
    unix_offset_ns: int
    log_ttl_ns: int
    shares_quotas: bool
    def __init__(self, protocol_version: _Optional[int] = ..., model: _Optional[_Union[EngineModel, _Mapping]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., engine: _Optional[str] = ..., unix_offset_ns: _Optional[int] = ..., log_ttl_ns: _Optional[int] = ..., shares_quotas: bool = ...) -> None: ...

class EngineModel(_message.Message):
    __slots__ = ("name", "revision", "architecture", "parameter_count", "dtype", "vocabulary_size", "max_context_tokens", "max_outputs", "end_of_text_token_ids", "kv_block_tokens", "kv_blocks", "device", "folder", "max_waiting_requests", "memory", "quantization", "kv_dtype", "kv_bytes_per_token", "drafter", "max_drafts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    END_OF_TEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    architecture: str
    parameter_count: int
    dtype: str
    vocabulary_size: int
    max_context_tokens: int
    max_outputs: int
    end_of_text_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_block_tokens: int
    kv_blocks: int
    device: str
    folder: str
    max_waiting_requests: int
    memory: EngineMemory
    quantization: EngineQuantization
    kv_dtype: str
    kv_bytes_per_token: int
    drafter: str
    max_drafts: int
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., parameter_count: _Optional[int] = ..., dtype: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_outputs: _Optional[int] = ..., end_of_text_token_ids: _Optional[_Iterable[int]] = ..., kv_block_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., device: _Optional[str] = ..., folder: _Optional[str] = ..., max_waiting_requests: _Optional[int] = ..., memory: _Optional[_Union[EngineMemory, _Mapping]] = ..., quantization: _Optional[_Union[EngineQuantization, _Mapping]] = ..., kv_dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., drafter: _Optional[str] = ..., max_drafts: _Optional[int] = ...) -> None: ...

class EngineQuantization(_message.Message):
    __slots__ = ("scheme", "group_size", "bits_per_weight", "mean_relative_error", "worst_relative_error", "worst_tensor", "head_scheme", "head_bits_per_weight", "head_relative_error", "measured", "activations")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MEAN_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    WORST_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    WORST_TENSOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_SCHEME_FIELD_NUMBER: _ClassVar[int]
    HEAD_BITS_PER_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    HEAD_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    scheme: str
    group_size: int
    bits_per_weight: float
    mean_relative_error: float
    worst_relative_error: float
    worst_tensor: str
    head_scheme: str
    head_bits_per_weight: float
    head_relative_error: float
    measured: EngineMeasuredLoss
    activations: str
    def __init__(self, scheme: _Optional[str] = ..., group_size: _Optional[int] = ..., bits_per_weight: _Optional[float] = ..., mean_relative_error: _Optional[float] = ..., worst_relative_error: _Optional[float] = ..., worst_tensor: _Optional[str] = ..., head_scheme: _Optional[str] = ..., head_bits_per_weight: _Optional[float] = ..., head_relative_error: _Optional[float] = ..., measured: _Optional[_Union[EngineMeasuredLoss, _Mapping]] = ..., activations: _Optional[str] = ...) -> None: ...

class EngineMeasuredLoss(_message.Message):
    __slots__ = ("method", "tokens", "perplexity_before", "perplexity_after", "divergence", "divergence_interval")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_BEFORE_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_AFTER_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    method: str
    tokens: int
    perplexity_before: float
    perplexity_after: float
    divergence: float
    divergence_interval: float
    def __init__(self, method: _Optional[str] = ..., tokens: _Optional[int] = ..., perplexity_before: _Optional[float] = ..., perplexity_after: _Optional[float] = ..., divergence: _Optional[float] = ..., divergence_interval: _Optional[float] = ...) -> None: ...

class EngineMemory(_message.Message):
    __slots__ = ("device_bytes", "total_bytes", "weight_bytes", "activation_bytes", "graph_bytes", "other_bytes", "reserve_bytes", "kv_cache_bytes", "measured")
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    device_bytes: int
    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    other_bytes: int
    reserve_bytes: int
    kv_cache_bytes: int
    measured: bool
    def __init__(self, device_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., graph_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., reserve_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., measured: bool = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("serving", "reason", "stale_after_ns", "load")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STALE_AFTER_NS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    reason: str
    stale_after_ns: int
    load: EngineLoad
    def __init__(self, serving: bool = ..., reason: _Optional[str] = ..., stale_after_ns: _Optional[int] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("prefill_tokens", "prefill_tokens_per_second", "open_requests", "rows", "row_time_ns")
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens: int
    prefill_tokens_per_second: float
    open_requests: int
    rows: int
    row_time_ns: int
    def __init__(self, prefill_tokens: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., open_requests: _Optional[int] = ..., rows: _Optional[int] = ..., row_time_ns: _Optional[int] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("handle", "query_id", "request_id", "tenant", "request", "remaining_ns", "service_ns", "detached", "idempotency_key", "spec_digest", "service_state", "traceparent", "emitted", "limits", "recording", "earlier", "admitted", "prompt_logprobs", "unasked_engines", "stands_in")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REMAINING_NS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NS_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SERVICE_STATE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    UNASKED_ENGINES_FIELD_NUMBER: _ClassVar[int]
    STANDS_IN_FIELD_NUMBER: _ClassVar[int]
    handle: int
    query_id: int
    request_id: str
    tenant: str
    request: bytes
    remaining_ns: int
    service_ns: int
    detached: bool
    idempotency_key: str
    spec_digest: bytes
    service_state: bytes
    traceparent: str
    emitted: _containers.RepeatedCompositeFieldContainer[EmittedTokens]
    limits: TenantLimits
    recording: Recording
    earlier: RequestDone
    admitted: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobColumns]
    unasked_engines: _containers.RepeatedScalarFieldContainer[int]
    stands_in: bool
    def __init__(self, handle: _Optional[int] = ..., query_id: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., request: _Optional[bytes] = ..., remaining_ns: _Optional[int] = ..., service_ns: _Optional[int] = ..., detached: bool = ..., idempotency_key: _Optional[str] = ..., spec_digest: _Optional[bytes] = ..., service_state: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., emitted: _Optional[_Iterable[_Union[EmittedTokens, _Mapping]]] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., recording: _Optional[_Union[Recording, _Mapping]] = ..., earlier: _Optional[_Union[RequestDone, _Mapping]] = ..., admitted: bool = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobColumns, _Mapping]]] = ..., unasked_engines: _Optional[_Iterable[int]] = ..., stands_in: bool = ...) -> None: ...

class Recording(_message.Message):
    __slots__ = ("parent_span_id", "tracestate", "detail", "operation", "wire")
    PARENT_SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    parent_span_id: str
    tracestate: str
    detail: int
    operation: str
    wire: str
    def __init__(self, parent_span_id: _Optional[str] = ..., tracestate: _Optional[str] = ..., detail: _Optional[int] = ..., operation: _Optional[str] = ..., wire: _Optional[str] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("requests_per_minute", "concurrent_streams", "tokens_per_minute", "kv_cache_share")
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_SHARE_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: int
    concurrent_streams: int
    tokens_per_minute: int
    kv_cache_share: float
    def __init__(self, requests_per_minute: _Optional[int] = ..., concurrent_streams: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., kv_cache_share: _Optional[float] = ...) -> None: ...

class QuotaPeers(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engines: _Optional[_Iterable[str]] = ...) -> None: ...

class HeldEngines(_message.Message):
    __slots__ = ("reached", "guarded")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    GUARDED_FIELD_NUMBER: _ClassVar[int]
    reached: _containers.RepeatedScalarFieldContainer[int]
    guarded: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reached: _Optional[_Iterable[int]] = ..., guarded: _Optional[_Iterable[int]] = ...) -> None: ...

class QuotaReport(_message.Message):
    __slots__ = ("engine", "number", "complete", "tenants", "gone", "heard")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    engine: str
    number: int
    complete: bool
    tenants: _containers.RepeatedCompositeFieldContainer[TenantQuotas]
    gone: _containers.RepeatedScalarFieldContainer[str]
    heard: _containers.RepeatedCompositeFieldContainer[QuotaHeard]
    def __init__(self, engine: _Optional[str] = ..., number: _Optional[int] = ..., complete: bool = ..., tenants: _Optional[_Iterable[_Union[TenantQuotas, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ..., heard: _Optional[_Iterable[_Union[QuotaHeard, _Mapping]]] = ...) -> None: ...

class QuotaHeard(_message.Message):
    __slots__ = ("engine", "number")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    engine: str
    number: int
    def __init__(self, engine: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class TenantQuotas(_message.Message):
    __slots__ = ("tenant", "limits", "streams", "requests", "tokens", "pressed")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESSED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: TenantLimits
    streams: QuotaShare
    requests: QuotaShare
    tokens: QuotaShare
    pressed: bool
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., streams: _Optional[_Union[QuotaShare, _Mapping]] = ..., requests: _Optional[_Union[QuotaShare, _Mapping]] = ..., tokens: _Optional[_Union[QuotaShare, _Mapping]] = ..., pressed: bool = ...) -> None: ...

class QuotaShare(_message.Message):
    __slots__ = ("taken", "want", "missing")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    taken: int
    want: int
    missing: int
    def __init__(self, taken: _Optional[int] = ..., want: _Optional[int] = ..., missing: _Optional[int] = ...) -> None: ...

class EmittedTokens(_message.Message):
    __slots__ = ("token_ids", "end", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    end: OutputEnd
    logprobs: LogprobColumns
    def __init__(self, token_ids: _Optional[bytes] = ..., end: _Optional[_Union[OutputEnd, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ...) -> None: ...

class Added(_message.Message):
    __slots__ = ("handle", "query_id", "request_id", "existing", "prompt_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    query_id: int
    request_id: str
    existing: bool
    prompt_tokens: int
    def __init__(self, handle: _Optional[int] = ..., query_id: _Optional[int] = ..., request_id: _Optional[str] = ..., existing: bool = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("handle", "query_id", "status", "ask_again_ns")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ASK_AGAIN_NS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    query_id: int
    status: _status_pb2.Status
    ask_again_ns: int
    def __init__(self, handle: _Optional[int] = ..., query_id: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., ask_again_ns: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("query_id", "request_id", "tenant", "cause")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    request_id: str
    tenant: str
    cause: AbortCause
    def __init__(self, query_id: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., cause: _Optional[_Union[AbortCause, str]] = ...) -> None: ...

class Aborted(_message.Message):
    __slots__ = ("query_id", "found", "was_active")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    WAS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    found: bool
    was_active: bool
    def __init__(self, query_id: _Optional[int] = ..., found: bool = ..., was_active: bool = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("handle", "request_id", "tenant", "output_index", "from_token", "limits", "guards")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    GUARDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    tenant: str
    output_index: int
    from_token: int
    limits: TenantLimits
    guards: bool
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., output_index: _Optional[int] = ..., from_token: _Optional[int] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., guards: bool = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("handle", "service_state", "prompt_tokens", "started", "cached_tokens", "outputs", "done", "prompt_logprobs", "request", "second_guardian")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SECOND_GUARDIAN_FIELD_NUMBER: _ClassVar[int]
    handle: int
    service_state: bytes
    prompt_tokens: int
    started: bool
    cached_tokens: int
    outputs: _containers.RepeatedCompositeFieldContainer[OutputLog]
    done: RequestDone
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobColumns]
    request: AddRequest
    second_guardian: bool
    def __init__(self, handle: _Optional[int] = ..., service_state: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., started: bool = ..., cached_tokens: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[OutputLog, _Mapping]]] = ..., done: _Optional[_Union[RequestDone, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobColumns, _Mapping]]] = ..., request: _Optional[_Union[AddRequest, _Mapping]] = ..., second_guardian: bool = ...) -> None: ...

class Unguarded(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[OwnedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[OwnedRequest, _Mapping]]] = ...) -> None: ...

class OwnedRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class OutputLog(_message.Message):
    __slots__ = ("output_index", "token_ids", "logprobs", "end")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    token_ids: bytes
    logprobs: LogprobColumns
    end: OutputEnd
    def __init__(self, output_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., end: _Optional[_Union[OutputEnd, _Mapping]] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("step_id", "handles", "output_indices", "tokens", "logprobs", "logprob_rows", "events", "planned_at_ns", "settled_at_ns", "batch_sequences", "batch_tokens", "step_records")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_ROWS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_AT_NS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_AT_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_RECORDS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    handles: bytes
    output_indices: bytes
    tokens: bytes
    logprobs: LogprobColumns
    logprob_rows: bytes
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    planned_at_ns: int
    settled_at_ns: int
    batch_sequences: int
    batch_tokens: int
    step_records: bytes
    def __init__(self, step_id: _Optional[int] = ..., handles: _Optional[bytes] = ..., output_indices: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., logprob_rows: _Optional[bytes] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ..., planned_at_ns: _Optional[int] = ..., settled_at_ns: _Optional[int] = ..., batch_sequences: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., step_records: _Optional[bytes] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("sampled", "ranks", "top_counts", "top_token_ids", "top_logprobs")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sampled: bytes
    ranks: bytes
    top_counts: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, sampled: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("handle", "started", "output_end", "resumed", "done", "prompt_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_END_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    started: RequestStarted
    output_end: OutputEnd
    resumed: RequestResumed
    done: RequestDone
    prompt_logprobs: PromptLogprobColumns
    def __init__(self, handle: _Optional[int] = ..., started: _Optional[_Union[RequestStarted, _Mapping]] = ..., output_end: _Optional[_Union[OutputEnd, _Mapping]] = ..., resumed: _Optional[_Union[RequestResumed, _Mapping]] = ..., done: _Optional[_Union[RequestDone, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobColumns, _Mapping]] = ...) -> None: ...

class PromptLogprobColumns(_message.Message):
    __slots__ = ("first_token_index", "columns")
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    first_token_index: int
    columns: LogprobColumns
    def __init__(self, first_token_index: _Optional[int] = ..., columns: _Optional[_Union[LogprobColumns, _Mapping]] = ...) -> None: ...

class RequestStarted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class RequestResumed(_message.Message):
    __slots__ = ("pause_ns",)
    PAUSE_NS_FIELD_NUMBER: _ClassVar[int]
    pause_ns: int
    def __init__(self, pause_ns: _Optional[int] = ...) -> None: ...

class OutputEnd(_message.Message):
    __slots__ = ("output_index", "reason", "stop_token_id", "stop_string_index", "trim_bytes", "error", "score")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRIM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    reason: OutputEndReason
    stop_token_id: int
    stop_string_index: int
    trim_bytes: int
    error: _status_pb2.Status
    score: float
    def __init__(self, output_index: _Optional[int] = ..., reason: _Optional[_Union[OutputEndReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string_index: _Optional[int] = ..., trim_bytes: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., score: _Optional[float] = ...) -> None: ...

class RequestDone(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_tokens", "queued_ns", "prefill_ns", "decode_ns", "preempted_ns", "engine_restart_ns", "ttft_ns", "step_count", "preemptions", "draft_tokens", "accepted_tokens", "ended_ago_ns", "engine_trace")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_NS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RESTART_NS_FIELD_NUMBER: _ClassVar[int]
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_AGO_NS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TRACE_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    queued_ns: int
    prefill_ns: int
    decode_ns: int
    preempted_ns: int
    engine_restart_ns: int
    ttft_ns: int
    step_count: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    ended_ago_ns: int
    engine_trace: bytes
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queued_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., preempted_ns: _Optional[int] = ..., engine_restart_ns: _Optional[int] = ..., ttft_ns: _Optional[int] = ..., step_count: _Optional[int] = ..., preemptions: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., ended_ago_ns: _Optional[int] = ..., engine_trace: _Optional[bytes] = ...) -> None: ...

class ListQuery(_message.Message):
    __slots__ = ("query_id", "tenant", "state", "page_size", "before")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    tenant: str
    state: int
    page_size: int
    before: int
    def __init__(self, query_id: _Optional[int] = ..., tenant: _Optional[str] = ..., state: _Optional[int] = ..., page_size: _Optional[int] = ..., before: _Optional[int] = ...) -> None: ...

class RequestList(_message.Message):
    __slots__ = ("query_id", "rows", "next_before")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    rows: _containers.RepeatedCompositeFieldContainer[RequestRow]
    next_before: int
    def __init__(self, query_id: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RequestRow, _Mapping]]] = ..., next_before: _Optional[int] = ...) -> None: ...

class RequestRow(_message.Message):
    __slots__ = ("request_id", "state", "created_at_ns", "prompt_tokens", "output_tokens", "finish_reasons", "detached", "sequence_number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: int
    created_at_ns: int
    prompt_tokens: int
    output_tokens: int
    finish_reasons: _containers.RepeatedScalarFieldContainer[OutputEndReason]
    detached: bool
    sequence_number: int
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[int] = ..., created_at_ns: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., finish_reasons: _Optional[_Iterable[_Union[OutputEndReason, str]]] = ..., detached: bool = ..., sequence_number: _Optional[int] = ...) -> None: ...

class LoadQuery(_message.Message):
    __slots__ = ("query_id",)
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    def __init__(self, query_id: _Optional[int] = ...) -> None: ...

class KeyQuery(_message.Message):
    __slots__ = ("query_id", "tenant", "idempotency_key", "spec_digest")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    tenant: str
    idempotency_key: str
    spec_digest: bytes
    def __init__(self, query_id: _Optional[int] = ..., tenant: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., spec_digest: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("query_id", "running_sequences", "waiting_requests", "waiting_tokens", "kv_cache_usage", "kv_blocks", "max_waiting_requests", "output_tokens_per_second", "expected_wait_ns", "free_blocks", "cached_blocks", "used_blocks", "step_count", "preemptions", "prefix_query_tokens", "prefix_hit_tokens", "late_work", "max_running_sequences", "held_plans", "late_plans", "active_requests", "taken_requests", "refused_requests")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATE_WORK_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HELD_PLANS_FIELD_NUMBER: _ClassVar[int]
    LATE_PLANS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    running_sequences: int
    waiting_requests: int
    waiting_tokens: int
    kv_cache_usage: float
    kv_blocks: int
    max_waiting_requests: int
    output_tokens_per_second: float
    expected_wait_ns: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    step_count: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    late_work: int
    max_running_sequences: int
    held_plans: int
    late_plans: int
    active_requests: int
    taken_requests: int
    refused_requests: int
    def __init__(self, query_id: _Optional[int] = ..., running_sequences: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., kv_blocks: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., output_tokens_per_second: _Optional[float] = ..., expected_wait_ns: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., step_count: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., late_work: _Optional[int] = ..., max_running_sequences: _Optional[int] = ..., held_plans: _Optional[int] = ..., late_plans: _Optional[int] = ..., active_requests: _Optional[int] = ..., taken_requests: _Optional[int] = ..., refused_requests: _Optional[int] = ...) -> None: ...
