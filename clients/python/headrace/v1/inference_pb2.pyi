import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from headrace.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoiceMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_MODE_UNSPECIFIED: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_AUTO: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_NONE: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_REQUIRED: _ClassVar[ToolChoiceMode]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
TOOL_CHOICE_MODE_UNSPECIFIED: ToolChoiceMode
TOOL_CHOICE_MODE_AUTO: ToolChoiceMode
TOOL_CHOICE_MODE_NONE: ToolChoiceMode
TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_FINISHED: RequestState

class GenerateRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _generation_pb2.GenerationSpec
    def __init__(self, spec: _Optional[_Union[_generation_pb2.GenerationSpec, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _generation_pb2.GenerationEvent
    def __init__(self, event: _Optional[_Union[_generation_pb2.GenerationEvent, _Mapping]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _generation_pb2.GenerationSpec
    def __init__(self, spec: _Optional[_Union[_generation_pb2.GenerationSpec, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("request_id", "model_revision", "outputs", "usage", "ledger", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model_revision: str
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    usage: _generation_pb2.Usage
    ledger: _generation_pb2.Ledger
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PromptLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., model_revision: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., ledger: _Optional[_Union[_generation_pb2.Ledger, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.PromptLogprobs, _Mapping]]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("output_index", "token_ids", "content", "logprobs", "finished")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    content: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Content]
    logprobs: _generation_pb2.Logprobs
    finished: _generation_pb2.OutputFinished
    def __init__(self, output_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., content: _Optional[_Iterable[_Union[_generation_pb2.Content, _Mapping]]] = ..., logprobs: _Optional[_Union[_generation_pb2.Logprobs, _Mapping]] = ..., finished: _Optional[_Union[_generation_pb2.OutputFinished, _Mapping]] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("messages", "spec", "continue_last_message", "tools", "tool_choice", "parallel_tool_calls")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    spec: _generation_pb2.GenerationSpec
    continue_last_message: bool
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., spec: _Optional[_Union[_generation_pb2.GenerationSpec, _Mapping]] = ..., continue_last_message: bool = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: bool = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json_schema", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json_schema: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json_schema: _Optional[str] = ..., strict: bool = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "name")
    MODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoiceMode
    name: str
    def __init__(self, mode: _Optional[_Union[ToolChoiceMode, str]] = ..., name: _Optional[str] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _generation_pb2.GenerationEvent
    def __init__(self, event: _Optional[_Union[_generation_pb2.GenerationEvent, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "parts", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: Role
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "reasoning")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning: str
    def __init__(self, text: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("spec", "idempotency_key", "messages", "continue_last_message", "tools", "tool_choice", "parallel_tool_calls")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    spec: _generation_pb2.GenerationSpec
    idempotency_key: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    continue_last_message: bool
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    def __init__(self, spec: _Optional[_Union[_generation_pb2.GenerationSpec, _Mapping]] = ..., idempotency_key: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., continue_last_message: bool = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: bool = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("request_id", "model_revision", "prompt_tokens", "existing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model_revision: str
    prompt_tokens: int
    existing: bool
    def __init__(self, request_id: _Optional[str] = ..., model_revision: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., existing: bool = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("request_id", "output_index", "from_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    output_index: int
    from_token: int
    def __init__(self, request_id: _Optional[str] = ..., output_index: _Optional[int] = ..., from_token: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _generation_pb2.GenerationEvent
    def __init__(self, event: _Optional[_Union[_generation_pb2.GenerationEvent, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("stream_id", "submit", "attach", "cancel")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    submit: SessionSubmit
    attach: SessionAttach
    cancel: SessionCancel
    def __init__(self, stream_id: _Optional[int] = ..., submit: _Optional[_Union[SessionSubmit, _Mapping]] = ..., attach: _Optional[_Union[SessionAttach, _Mapping]] = ..., cancel: _Optional[_Union[SessionCancel, _Mapping]] = ...) -> None: ...

class SessionSubmit(_message.Message):
    __slots__ = ("spec", "messages", "continue_last_message", "detached", "idempotency_key", "traceparent", "tracestate", "tools", "tool_choice", "parallel_tool_calls")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    spec: _generation_pb2.GenerationSpec
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    continue_last_message: bool
    detached: bool
    idempotency_key: str
    traceparent: str
    tracestate: str
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    def __init__(self, spec: _Optional[_Union[_generation_pb2.GenerationSpec, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., continue_last_message: bool = ..., detached: bool = ..., idempotency_key: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: bool = ...) -> None: ...

class SessionAttach(_message.Message):
    __slots__ = ("request_id", "output_index", "from_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    output_index: int
    from_token: int
    def __init__(self, request_id: _Optional[str] = ..., output_index: _Optional[int] = ..., from_token: _Optional[int] = ...) -> None: ...

class SessionCancel(_message.Message):
    __slots__ = ("detach",)
    DETACH_FIELD_NUMBER: _ClassVar[int]
    detach: bool
    def __init__(self, detach: bool = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("tokens", "events")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    tokens: SessionTokens
    events: _containers.RepeatedCompositeFieldContainer[SessionEvent]
    def __init__(self, tokens: _Optional[_Union[SessionTokens, _Mapping]] = ..., events: _Optional[_Iterable[_Union[SessionEvent, _Mapping]]] = ...) -> None: ...

class SessionTokens(_message.Message):
    __slots__ = ("stream_ids", "output_indices", "token_ids", "texts")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: _containers.RepeatedScalarFieldContainer[int]
    output_indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stream_ids: _Optional[_Iterable[int]] = ..., output_indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("stream_id", "event", "error")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    event: _generation_pb2.GenerationEvent
    error: _status_pb2.Status
    def __init__(self, stream_id: _Optional[int] = ..., event: _Optional[_Union[_generation_pb2.GenerationEvent, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: bool = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("state", "page_size", "page_token", "model")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    state: RequestState
    page_size: int
    page_token: str
    model: str
    def __init__(self, state: _Optional[_Union[RequestState, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequestSummary(_message.Message):
    __slots__ = ("request_id", "state", "create_time", "prompt_tokens", "output_tokens", "finish_reasons", "detached", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    create_time: _timestamp_pb2.Timestamp
    prompt_tokens: int
    output_tokens: int
    finish_reasons: _containers.RepeatedScalarFieldContainer[_generation_pb2.FinishReason]
    detached: bool
    model: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., finish_reasons: _Optional[_Iterable[_Union[_generation_pb2.FinishReason, str]]] = ..., detached: bool = ..., model: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "add_special_tokens", "model")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    add_special_tokens: bool
    model: str
    def __init__(self, text: _Optional[str] = ..., add_special_tokens: bool = ..., model: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens", "model")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    model: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "revision", "architecture", "parameter_count", "dtype", "vocabulary_size", "max_context_tokens", "max_outputs", "end_of_text_token_ids", "has_chat_template", "default_sampling", "kv_block_tokens", "kv_blocks", "device", "memory_plan", "quantization", "kv_dtype", "kv_bytes_per_token", "drafter", "max_drafts", "not_followed", "engines_left_out", "tool_format", "reasoning", "reasoning_effort")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    END_OF_TEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLAN_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NOT_FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    ENGINES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    architecture: str
    parameter_count: int
    dtype: str
    vocabulary_size: int
    max_context_tokens: int
    max_outputs: int
    end_of_text_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    default_sampling: _generation_pb2.SamplingParameters
    kv_block_tokens: int
    kv_blocks: int
    device: str
    memory_plan: MemoryPlan
    quantization: Quantization
    kv_dtype: str
    kv_bytes_per_token: int
    drafter: str
    max_drafts: int
    not_followed: _containers.RepeatedScalarFieldContainer[str]
    engines_left_out: _containers.RepeatedScalarFieldContainer[str]
    tool_format: str
    reasoning: bool
    reasoning_effort: bool
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., parameter_count: _Optional[int] = ..., dtype: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_outputs: _Optional[int] = ..., end_of_text_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: bool = ..., default_sampling: _Optional[_Union[_generation_pb2.SamplingParameters, _Mapping]] = ..., kv_block_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., device: _Optional[str] = ..., memory_plan: _Optional[_Union[MemoryPlan, _Mapping]] = ..., quantization: _Optional[_Union[Quantization, _Mapping]] = ..., kv_dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., drafter: _Optional[str] = ..., max_drafts: _Optional[int] = ..., not_followed: _Optional[_Iterable[str]] = ..., engines_left_out: _Optional[_Iterable[str]] = ..., tool_format: _Optional[str] = ..., reasoning: bool = ..., reasoning_effort: bool = ...) -> None: ...

class Quantization(_message.Message):
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
    measured: MeasuredLoss
    activations: str
    def __init__(self, scheme: _Optional[str] = ..., group_size: _Optional[int] = ..., bits_per_weight: _Optional[float] = ..., mean_relative_error: _Optional[float] = ..., worst_relative_error: _Optional[float] = ..., worst_tensor: _Optional[str] = ..., head_scheme: _Optional[str] = ..., head_bits_per_weight: _Optional[float] = ..., head_relative_error: _Optional[float] = ..., measured: _Optional[_Union[MeasuredLoss, _Mapping]] = ..., activations: _Optional[str] = ...) -> None: ...

class MeasuredLoss(_message.Message):
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

class MemoryPlan(_message.Message):
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

class GetLoadRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running_sequences", "waiting_requests", "waiting_tokens", "kv_cache_usage", "kv_blocks", "max_waiting_requests", "output_tokens_per_second", "expected_wait_ns", "serving", "model", "max_running_sequences", "prefix_cache_hit_rate", "draining", "open_calls", "max_open_calls")
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    OPEN_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_CALLS_FIELD_NUMBER: _ClassVar[int]
    running_sequences: int
    waiting_requests: int
    waiting_tokens: int
    kv_cache_usage: float
    kv_blocks: int
    max_waiting_requests: int
    output_tokens_per_second: float
    expected_wait_ns: int
    serving: bool
    model: str
    max_running_sequences: int
    prefix_cache_hit_rate: float
    draining: bool
    open_calls: int
    max_open_calls: int
    def __init__(self, running_sequences: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., kv_blocks: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., output_tokens_per_second: _Optional[float] = ..., expected_wait_ns: _Optional[int] = ..., serving: bool = ..., model: _Optional[str] = ..., max_running_sequences: _Optional[int] = ..., prefix_cache_hit_rate: _Optional[float] = ..., draining: bool = ..., open_calls: _Optional[int] = ..., max_open_calls: _Optional[int] = ...) -> None: ...
