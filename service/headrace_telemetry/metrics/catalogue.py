"""Every metric by name: its kind, its unit, what it says, and the names of attributes.

The one place of names; dashboards, alerts and docs/operations.md are tested against it. Names are
OpenTelemetry's where its conventions have one, else begin with "headrace.".
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Metric(NamedTuple):
    """The description of one metric. Units are UCUM's, as OpenTelemetry wants them."""

    name: str
    kind: Literal["histogram", "counter", "gauge"]
    unit: str
    description: str


# Attributes.
MODEL: Final = "gen_ai.request.model"
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
ERROR_TYPE: Final = "error.type"
RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
TOKEN_KIND: Final = "headrace.token.kind"
STEP_KIND: Final = "headrace.step.kind"
FINISH_REASON: Final = "headrace.finish_reason"
WIRE: Final = "headrace.wire"
BLOCK_STATE: Final = "headrace.kv.block.state"
REFUSAL_REASON: Final = "headrace.refusal.reason"
PROCESS_KIND: Final = "headrace.process.kind"
PROCESS_NAME: Final = "headrace.process.name"
SIGNAL: Final = "headrace.telemetry.signal"
DRAFTER: Final = "headrace.drafter"
CURRENCY: Final = "headrace.cost.currency"

# Of requests and calls, when they end.
REQUEST_DURATION: Final = Metric(
    "gen_ai.server.request.duration",
    "histogram",
    "s",
    "Time from a generation's arrival until its last message was taken.",
)
TIME_TO_FIRST_TOKEN: Final = Metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "Time from a generation's arrival until the first message with a token had left the service; of answers that are "
    "streamed.",
)
ENGINE_TIME_TO_FIRST_TOKEN: Final = Metric(
    "headrace.engine.time_to_first_token",
    "histogram",
    "s",
    "Time from a generation's arrival until the engine had its first token, without the way out of the service.",
)
TIME_PER_OUTPUT_TOKEN: Final = Metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "Time per token after the first: (duration - time to first token, in the engine if nothing is streamed) / (tokens "
    "of one output - 1).",
)
CALL_DURATION: Final = Metric(
    "rpc.server.call.duration", "histogram", "s", "Duration of calls, streams over their whole life."
)
QUEUE_DURATION: Final = Metric(
    "headrace.queue.duration", "histogram", "s", "Time that a generation waited before it was first scheduled."
)
REQUESTS: Final = Metric("headrace.requests", "counter", "{request}", "Generations that have ended.")
TOKENS: Final = Metric(
    "headrace.tokens",
    "counter",
    "{token}",
    "Tokens of generations that have ended: input (prompts), cached (that part of input that the prefix cache had) and "
    "output.",
)

# Of steps.
STEP_DURATION: Final = Metric(
    "headrace.step.duration", "histogram", "s", "Time that the device computed a step, by what was in it."
)
STEP_INTERVAL: Final = Metric(
    "headrace.step.interval",
    "histogram",
    "s",
    "Time between the results of two steps in a row while sequences decode: the gap between tokens as the engine makes "
    "it.",
)
STEP_TOKENS: Final = Metric(
    "headrace.step.tokens", "histogram", "{token}", "Tokens of a step: prompt tokens (prefill) or decoding sequences."
)
STEP_SEQUENCES: Final = Metric("headrace.step.sequences", "histogram", "{sequence}", "Sequences in a step.")
STEP_BANDWIDTH_SHARE: Final = Metric(
    "headrace.step.bandwidth_share", "histogram", "1", "Bytes a step needed over what the device copies in that time."
)
STEP_FLOPS_SHARE: Final = Metric(
    "headrace.step.flops_share",
    "histogram",
    "1",
    "Operations a step needed over what the device's matrix products do in that time.",
)
STEPS_CAPTURED: Final = Metric("headrace.step.captured", "counter", "{step}", "Steps that ran as a captured graph.")
DRAFTS_PROPOSED: Final = Metric("headrace.drafts.proposed", "counter", "{token}", "Draft tokens that were verified.")
DRAFTS_ACCEPTED: Final = Metric("headrace.drafts.accepted", "counter", "{token}", "Draft tokens that were accepted.")
DRAFTS_LOST: Final = Metric(
    "headrace.drafts.lost", "counter", "{token}", "Draft tokens that were lost because the drafter failed."
)
FORCED_TOKENS: Final = Metric(
    "headrace.step.forced_tokens",
    "counter",
    "{token}",
    "Tokens settled without a draw: a structured output left no other.",
)

# Of backends, once a second.
RUNNING: Final = Metric("headrace.requests.running", "gauge", "{sequence}", "Sequences that hold a row of the batch.")
MAX_RUNNING: Final = Metric(
    "headrace.requests.max_running", "gauge", "{sequence}", "Most sequences that the batch holds."
)
WAITING: Final = Metric("headrace.requests.waiting", "gauge", "{request}", "Requests in the queue.")
WAITING_TOKENS: Final = Metric(
    "headrace.requests.waiting_tokens", "gauge", "{token}", "Prompt tokens of requests in the queue."
)
KV_BLOCKS: Final = Metric(
    "headrace.kv.blocks", "gauge", "{block}", "Blocks of the KV cache: used, cached (unused, may be hit) or free."
)
KV_USAGE: Final = Metric("headrace.kv.usage", "gauge", "1", "Used blocks of the KV cache over all blocks.")
STEPS: Final = Metric("headrace.steps", "counter", "{step}", "Steps that have settled.")
PREFIX_QUERY_TOKENS: Final = Metric(
    "headrace.prefix.query_tokens", "counter", "{token}", "Prompt tokens that were looked up in the prefix cache."
)
PREFIX_HIT_TOKENS: Final = Metric(
    "headrace.prefix.hit_tokens", "counter", "{token}", "Prompt tokens that the prefix cache had."
)
PREEMPTIONS: Final = Metric(
    "headrace.preemptions", "counter", "{preemption}", "Sequences that lost their blocks and were computed again."
)
ENGINE_RESTARTS: Final = Metric("headrace.engine.restarts", "counter", "{restart}", "Restarts of a backend's workers.")
REFUSALS: Final = Metric("headrace.refusals", "counter", "{request}", "Requests that a backend refused, by reason.")
LATE_WORK: Final = Metric(
    "headrace.late_work", "counter", "{event}", "Kernels compiled and graphs captured after warm-up; should stay 0."
)

# Of services, once a second.
OPEN_CALLS: Final = Metric("headrace.service.open_calls", "gauge", "{call}", "Calls that are open.")
OPEN_GENERATIONS: Final = Metric(
    "headrace.service.open_generations", "gauge", "{request}", "Generations that have a reader."
)
PENDING_BYTES: Final = Metric(
    "headrace.service.pending_bytes", "gauge", "By", "Memory of messages that wait for slow readers."
)

# Of telemetry itself.
PROCESS_UP: Final = Metric("headrace.process.up", "gauge", "{process}", "Processes that are connected to telemetry.")
LOST_LINES: Final = Metric(
    "headrace.log.lost_lines",
    "counter",
    "{line}",
    "Lines that a service or backend could not write to its log, as on a full disk.",
)
DROPPED_FACTS: Final = Metric(
    "headrace.telemetry.dropped_facts", "counter", "{fact}", "Facts that a process dropped, as telemetry was too slow."
)
DROPPED_SPANS: Final = Metric(
    "headrace.telemetry.dropped_spans",
    "counter",
    "{span}",
    "Spans that the collector (traces) or the trace file (file) did not get.",
)
EXPORTED_SPANS: Final = Metric(
    "headrace.telemetry.exported_spans", "counter", "{span}", "Spans that the collector has taken."
)
EXPORT_FAILURES: Final = Metric(
    "headrace.telemetry.export_failures",
    "counter",
    "{attempt}",
    "Attempts to bring something to the collector that failed, by signal.",
)
INCOMPLETE_TRACES: Final = Metric(
    "headrace.telemetry.incomplete_traces",
    "counter",
    "{trace}",
    "Exported generations of which something was not known, as a process had dropped it.",
)
QUEUED_BYTES: Final = Metric(
    "headrace.telemetry.queued_bytes", "gauge", "By", "Memory of spans that wait for the collector."
)
RING_BYTES: Final = Metric("headrace.telemetry.ring_bytes", "gauge", "By", "Memory of recent traces.")
BAD_FRAMES: Final = Metric(
    "headrace.telemetry.bad_frames", "counter", "{frame}", "Connections that were ended, as what they sent is no fact."
)

# Of money.
COST: Final = Metric("headrace.cost", "counter", "{currency}", "Price of the time since telemetry began.")
COST_PER_MILLION_OUTPUT: Final = Metric(
    "headrace.cost.per_million_output_tokens",
    "gauge",
    "{currency}",
    "Price of the last 5 minutes over their output tokens, times a million. All of the price; not to be added to that "
    "of input tokens.",
)
COST_PER_MILLION_INPUT: Final = Metric(
    "headrace.cost.per_million_input_tokens",
    "gauge",
    "{currency}",
    "Price of the last 5 minutes over their input tokens, times a million. All of the price; not to be added to that "
    "of output tokens.",
)

ALL: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
