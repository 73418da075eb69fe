"""The facts themselves: what a service or a backend saw, in the terms of its own room.

Owns their fields and byte form (msgpack, a tag each). Facts are reported once, when something has
ended; a token costs its process no more than an entry in a column. Columns are little-endian bytes.
Times are CLOCK_MONOTONIC nanoseconds of the machine that saw it, `unix_offset_ns` is what takes
that clock to UNIX time. No fact holds prompts, outputs or keys.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from headrace_facts.token_steps import TokenSteps

# A frame is its length (4 bytes, little-endian) and a fact or answer of at most this many bytes.
# Who has a longer fact drops it and says so (Dropped).
MAX_FRAME_BYTES: Final = 64 << 20


class Detail(enum.IntEnum):
    """How much of a token's way is traced; the numbers of headrace.v1.TraceDetail."""

    DEFAULT = 0
    OFF = 1
    ARRAY = 2
    SPAN = 3


class SpanContext(msgspec.Struct, frozen=True, array_like=True):
    """The place of a span in its trace (W3C). Ids are lower-case hex."""

    trace_id: str
    span_id: str
    # "": it is a root.
    parent_span_id: str = ""
    tracestate: str = ""
    # Decided at the head: exported whatever happens. If not set, it is kept only if the end says so
    # (tail sampling).
    sampled: bool = False


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first fact of a connection: who tells.

    `attributes` become those of the OpenTelemetry resource.
    """

    # "service" or "backend".
    kind: str
    # "service-0", "backend-demo".
    name: str
    # Unique per life of a process; backends: what `engine` says in their facts.
    instance: str
    version: str
    pid: int
    unix_offset_ns: int
    attributes: dict[str, str] = {}


class EngineFacts(msgspec.Struct, tag="engine", frozen=True):
    """What to know of a backend's model and device to judge its steps.

    Reported when a worker is ready.
    """

    engine: str
    model: str
    device: str
    weight_bytes: int
    # Floating-point operations of the linear layers per token, per pair of query and key, and of
    # the output layer per sampled token.
    flops_per_token: float
    flops_per_pair: float
    flops_per_sample: float
    # Of the cache, all layers, on all ranks together.
    kv_bytes_per_token: int
    # Measured at start on this device; 0: not measured.
    copy_bytes_per_s: float = 0.0
    matmul_flops_per_s: float = 0.0
    # Who drafts tokens that its steps verify, as --speculate names it.
    drafter: str = "off"
    # Of all experts of all layers, which are not in `weight_bytes`; and the share of a layer's
    # experts that compute one token.
    expert_bytes: int = 0
    expert_share: float = 0.0
    # States of one row in recurrent layers, which a step that computes the row reads and writes.
    row_state_bytes: int = 0


class RequestBegan(msgspec.Struct, tag="request_began", frozen=True):
    """A backend admitted a request. Steps name it by `number`, unique within `engine`."""

    engine: str
    number: int
    request_id: str
    # Its inference span; None: nobody traces it.
    span: SpanContext | None = None


class Steps(msgspec.Struct, tag="steps", frozen=True):
    """Settled steps in order.

    From a backend with who was in them; from a service as it received them, without.
    """

    engine: str
    unix_offset_ns: int
    # `step_records.RECORD`, side by side.
    records: bytes
    # Per step: how many entries of `members` (uint32), and flat, the numbers of the requests of its
    # sequences (uint32); of a request with several sequences, several times.
    member_counts: bytes = b""
    members: bytes = b""
    # Per step: how many entries of `chunks` (uint32), and flat, prompt chunks as (request number,
    # first token, tokens) (uint32 each).
    chunk_counts: bytes = b""
    chunks: bytes = b""
    # Per step: how many (uint32), and flat, the numbers of the requests whose sequences lost their
    # row for it (uint32).
    preempted_counts: bytes = b""
    preempted: bytes = b""


class PhaseSpan(msgspec.Struct, frozen=True, array_like=True):
    """One stay in a phase of the ledger.

    Phases are "queued", "prefill", "decode", "preempted" and "restarting".
    """

    phase: str
    begin_ns: int
    end_ns: int


class EngineTrace(msgspec.Struct, frozen=True):
    """What the engine noted of a traced request. Times are the backend's."""

    engine: str
    number: int
    unix_offset_ns: int
    # From its arrival in the engine to its end, without gaps; their sums by phase are the ledger's
    # parts (queued lacks what the service had it for).
    phases: list[PhaseSpan]
    # Prompt chunks as (step id, first token, tokens), uint64 each, in order; with several outputs,
    # recomputation of outputs included.
    chunks: bytes
    # Per output.
    token_steps: list[TokenSteps]


class Emission(msgspec.Struct, frozen=True, array_like=True):
    """How one output left the service, by message."""

    # Tokens, uint32; "": one each.
    counts: bytes
    # When it was made, uint64.
    made_at_ns: bytes
    # When the transport had taken it, uint64: when it was made if nothing else was waiting for
    # that; "": so it is for all.
    written_at_ns: bytes


class Generation(msgspec.Struct, tag="generation", frozen=True):
    """A generation has ended.

    Reported for every one; what is traced has `span`, and, if its tokens were recorded, `trace`.
    """

    request_id: str
    model: str
    model_revision: str
    # gen_ai.operation.name: "chat" or "text_completion".
    operation: str
    # "generate", "complete", "chat", "submit", "session" or "kserve".
    wire: str
    unix_offset_ns: int
    # From the arrival of the call (Submit and dropped readers: in the engine) to the moment that
    # its last message was taken.
    arrival_ns: int
    end_ns: int
    # From the same moment to the first token in the engine, as the ledger has it; 0: there was
    # none.
    ttft_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    # Per output: "stop", "length", "cancelled", "deadline", "error", or "invalid" where the error
    # is the request's.
    finish_reasons: list[str]
    # "": none; else a gRPC status ("INTERNAL") or "engine_error".
    error_type: str = ""
    # Parts of the ledger by name without "_ns", in ns: queued, prefill, decode, preempted,
    # engine_restart, detokenize_and_send, blocked_on_reader, end_to_end.
    ledger: dict[str, int] = {}
    step_count: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    # gen_ai.request.*: max_tokens, temperature, top_p, top_k, seed, choice.count,
    # frequency_penalty, presence_penalty, stop_sequences (their number only); what the caller left
    # out is not there.
    parameters: dict[str, int | float] = {}
    streamed: bool = True
    # From the same moment until the first message with a token had left the service; 0: none did,
    # as the answer was one message, or nobody who tells this saw it.
    first_chunk_ns: int = 0
    span: SpanContext | None = None
    detail: Detail = Detail.DEFAULT
    trace: EngineTrace | None = None
    # Per output; empty if nobody read it.
    emissions: list[Emission] = []


class CallEnded(msgspec.Struct, tag="call", frozen=True):
    """A call has ended. Reported for every one, after its generations."""

    # "headrace.v1.InferenceService/Generate", "openai.v1/CreateChatCompletion".
    method: str
    # "OK", "INVALID_ARGUMENT" ...
    status: str
    unix_offset_ns: int
    start_ns: int
    end_ns: int
    request_id: str = ""
    span: SpanContext | None = None
    # Contexts of inference spans that it read without being their parent (Subscribe, sessions'
    # attach).
    links: list[SpanContext] = []
    # The wire that brought it: "grpc" or "http".
    system: str = "grpc"


class EngineLoad(msgspec.Struct, tag="load", frozen=True):
    """How busy a backend is, once a second."""

    engine: str
    model: str
    running_sequences: int
    max_running_sequences: int
    waiting_requests: int
    waiting_tokens: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    # Totals since the backend began.
    step_count: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    late_work: int
    restarts: int = 0
    # Requests refused by admission or quotas, by reason: "queue_full", "deadline", "quota",
    # "invalid", "other".
    refusals: dict[str, int] = {}


class ServiceLoad(msgspec.Struct, tag="service_load", frozen=True):
    """How busy a service is, once a second."""

    open_calls: int
    open_generations: int
    pending_bytes: int


class Dropped(msgspec.Struct, tag="dropped", frozen=True):
    """Facts that this process could not report since it last said so.

    Nobody took them in time.
    """

    facts: int
    tokens: int


class LinesLost(msgspec.Struct, tag="lines_lost", frozen=True):
    """Lines of its log that this process could not write since it last said so."""

    lines: int


class SetDetail(msgspec.Struct, tag="set_detail", frozen=True):
    """An operator asks for another detail, for all processes from now on."""

    detail: Detail


class TraceQuery(msgspec.Struct, tag="trace_query", frozen=True):
    """A service asks for a recent trace, by request id or trace id."""

    query_id: int
    key: str


Fact = (
    Hello
    | EngineFacts
    | RequestBegan
    | Steps
    | Generation
    | CallEnded
    | EngineLoad
    | ServiceLoad
    | Dropped
    | LinesLost
    | SetDetail
    | TraceQuery
)


class TraceSettings(msgspec.Struct, tag="settings", frozen=True):
    """What the telemetry process asks of those who tell: on connection and whenever it changes."""

    # Share of calls without a context of their own that are sampled.
    sample_ratio: float
    detail: Detail
    # Whether tail sampling may keep any generation, so that all must be recorded.
    record_all: bool


class TraceFound(msgspec.Struct, tag="trace_found", frozen=True):
    """The answer to a TraceQuery, in parts; the last has `last` set.

    The parts are serialized opentelemetry.proto.trace.v1.TracesData.

    Unknown: one part, empty.
    """

    query_id: int
    part: bytes
    last: bool


Answer = TraceSettings | TraceFound

_encoder = msgspec.msgpack.Encoder()
_facts = msgspec.msgpack.Decoder(Fact)
_answers = msgspec.msgpack.Decoder(Answer)
_traces = msgspec.msgpack.Decoder(EngineTrace)


def encode(message: Fact | Answer) -> bytes:
    """Bytes of one fact or answer, tag included."""
    return _encoder.encode(message)


def decode_fact(data: bytes | memoryview) -> Fact:
    """Reads a fact. Raises msgspec.ValidationError or DecodeError on anything else."""
    fact: Fact = _facts.decode(data)
    return fact


def decode_answer(data: bytes | memoryview) -> Answer:
    """Reads an answer. Raises msgspec.ValidationError or DecodeError on anything else."""
    answer: Answer = _answers.decode(data)
    return answer


def encode_trace(trace: EngineTrace) -> bytes:
    """Bytes of what an engine noted, as `RequestDone.engine_trace` brings it to a service."""
    return _encoder.encode(trace)


def decode_trace(data: bytes | memoryview) -> EngineTrace:
    """Reads what `encode_trace` wrote.

    Raises msgspec.ValidationError or DecodeError on anything else.
    """
    trace: EngineTrace = _traces.decode(data)
    return trace
