"""Typed answers of the calls that do not stream: models, load, requests, submissions.

Owns their Python shape and the conversion from the wire. Does not call anything (calls.py pairs
them with requests). Messages come in, frozen dataclasses go out.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from enum import StrEnum

from headrace.events import FinishReason
from headrace.v1 import generation_pb2, inference_pb2


class RequestState(StrEnum):
    """The state of a request."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


_STATES: dict[int, RequestState] = {
    inference_pb2.REQUEST_STATE_QUEUED: RequestState.QUEUED,
    inference_pb2.REQUEST_STATE_RUNNING: RequestState.RUNNING,
    inference_pb2.REQUEST_STATE_FINISHED: RequestState.FINISHED,
}
STATE_NUMBERS: dict[RequestState, inference_pb2.RequestState] = {
    RequestState.QUEUED: inference_pb2.REQUEST_STATE_QUEUED,
    RequestState.RUNNING: inference_pb2.REQUEST_STATE_RUNNING,
    RequestState.FINISHED: inference_pb2.REQUEST_STATE_FINISHED,
}


@dataclass(frozen=True, slots=True)
class Submitted:
    """A generation that outlives its readers; give it (or its request_id) to subscribe and cancel.

    Attributes:
        request_id: The request's name.
        model_revision: Name and content hash of the model that answers.
        prompt_tokens: Length of the prompt in tokens.
        existing: Whether the idempotency key was known and this is an earlier request.
        num_outputs: How many outputs were asked for.
    """

    request_id: str
    model_revision: str
    prompt_tokens: int
    existing: bool
    num_outputs: int = 1


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One request of a list.

    `state` is None where the server is newer than this client and knows another one.
    """

    request_id: str
    state: RequestState | None
    create_time: datetime.datetime
    prompt_tokens: int
    output_tokens: int
    finish_reasons: tuple[FinishReason, ...]
    detached: bool
    model: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the device's memory is divided, in bytes; `measured` after loading, otherwise estimated.

    `device_bytes` is 0 on a CPU.
    """

    device_bytes: int
    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    other_bytes: int
    reserve_bytes: int
    kv_cache_bytes: int
    measured: bool


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """What `headrace quantize` measured when it made a model's folder.

    It compared its layers with the original ones, on text that was not calibrated on.

    Attributes:
        method: "rtn", "gptq" or "awq".
        tokens: Tokens of text that both models were asked for.
        perplexity_before: The original's on that text.
        perplexity_after: The quantized model's; it may be below.
        divergence: Mean KL divergence from the original's distribution of a token to the quantized
            model's, in nats.
        divergence_interval: Half of its 95% interval; None where the text was one piece.
    """

    method: str
    tokens: int
    perplexity_before: float
    perplexity_after: float
    divergence: float
    divergence_interval: float | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's weights are quantized.

    Attributes:
        scheme: Scheme of the layers, as in "int8" or "gptq int4"; "": they are not.
        group_size: Inputs that share a scale; 0: all of an output's.
        bits_per_weight: Bits of a weight in memory, scales and zero points included.
        mean_relative_error: ||quantized - original|| / ||original|| of a tensor, the mean over all
            tensors. Says nothing of answers.
        worst_relative_error: Relative error of the tensor that is farthest.
        worst_tensor: Its name.
        head_scheme: Scheme of the output layer, "int8" or "fp8"; "" where it was not quantized by
            itself, and from servers older than this client.
        head_bits_per_weight: Bits of a weight of the output layer in memory, scales included.
        head_relative_error: Relative error of the output layer.
        measured: What it cost on text, as the folder's own report says; None where the folder has
            none that is valid, and from servers older than this client.
        activations: How the layers' products round what they multiply, as in "int8 per token"; ""
            where they do not, and from servers older than this client.
    """

    scheme: str
    group_size: int
    bits_per_weight: float
    mean_relative_error: float
    worst_relative_error: float
    worst_tensor: str
    head_scheme: str = ""
    head_bits_per_weight: float = 0.0
    head_relative_error: float = 0.0
    measured: MeasuredLoss | None = None
    activations: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """What one model is and what it allows.

    `default_sampling` holds what absent sampling options become.
    """

    name: str
    revision: str
    architecture: str
    parameter_count: int
    dtype: str
    vocabulary_size: int
    max_context_tokens: int
    max_outputs: int
    end_of_text_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_sampling: dict[str, float | int]
    kv_block_tokens: int
    kv_blocks: int
    device: str
    # None while the server loads the model, and from servers older than this client.
    memory_plan: MemoryPlan | None
    # None where no weights are, while the server loads the model, and from servers older than this
    # client.
    quantization: Quantization | None = None
    # Of the KV cache on each rank's device, all layers and scales included; "" and 0 from servers
    # older than this client, 0 while the server loads the model.
    kv_dtype: str = ""
    kv_bytes_per_token: int = 0
    # What the folder's generation_config.json recommends and requests get otherwise, or not at all:
    # a line each.
    not_followed: tuple[str, ...] = ()
    # Engines that the service was started with and does not use, a line each, for operators.
    engines_left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is.

    Attributes:
        model: Name of the model these figures are of.
        running_sequences: Sequences in the engine's batch.
        max_running_sequences: Most sequences that the batch holds.
        waiting_requests: Requests that wait for their first step.
        max_waiting_requests: Most requests that may wait.
        waiting_tokens: Prompt tokens of the waiting requests.
        kv_cache_usage: Share of the KV cache's blocks in use, 0 to 1.
        kv_blocks: Blocks of the KV cache.
        prefix_cache_hit_rate: Share of prompt tokens that the prefix cache had, over the engine's
            life, 0 to 1.
        output_tokens_per_second: Output tokens per second over the last 10 seconds.
        expected_wait_ns: Expected wait of a request that arrives now.
        serving: Whether the engine makes progress.
        draining: Whether no new generations are taken, because the server is drained or shuts down.
        open_calls: Generations and subscriptions open at the service process that answered.
        max_open_calls: Most that it takes.
    """

    model: str
    running_sequences: int
    max_running_sequences: int
    waiting_requests: int
    max_waiting_requests: int
    waiting_tokens: int
    kv_cache_usage: float
    kv_blocks: int
    prefix_cache_hit_rate: float
    output_tokens_per_second: float
    expected_wait_ns: int
    serving: bool
    draining: bool
    open_calls: int
    max_open_calls: int


def submitted_from_proto(response: inference_pb2.SubmitResponse, num_outputs: int) -> Submitted:
    """The answer of Submit, with what was asked for."""
    return Submitted(
        response.request_id, response.model_revision, response.prompt_tokens, response.existing, num_outputs
    )


def summary_from_proto(summary: inference_pb2.RequestSummary) -> RequestSummary:
    """One row of ListRequests."""
    return RequestSummary(
        summary.request_id,
        _STATES.get(summary.state),
        summary.create_time.ToDatetime(tzinfo=datetime.UTC),
        summary.prompt_tokens,
        summary.output_tokens,
        tuple(FinishReason.from_proto(reason) for reason in summary.finish_reasons),
        summary.detached,
        summary.model,
    )


def model_from_proto(model: inference_pb2.Model) -> Model:
    """One model of GetModel or ListModels."""
    columns = {name: getattr(model, name) for name in Model.__slots__}
    columns["end_of_text_token_ids"] = tuple(model.end_of_text_token_ids)
    columns["not_followed"] = tuple(model.not_followed)
    columns["engines_left_out"] = tuple(model.engines_left_out)
    columns["default_sampling"] = _set_scalars(model.default_sampling)
    columns["memory_plan"] = memory_plan_from_proto(model.memory_plan) if model.HasField("memory_plan") else None
    columns["quantization"] = _quantization_from_proto(model.quantization) if model.HasField("quantization") else None
    return Model(**columns)


def memory_plan_from_proto(plan: inference_pb2.MemoryPlan) -> MemoryPlan:
    """How a device's memory is divided."""
    return MemoryPlan(**{name: getattr(plan, name) for name in MemoryPlan.__slots__})


def _quantization_from_proto(report: inference_pb2.Quantization) -> Quantization:
    columns = {name: getattr(report, name) for name in Quantization.__slots__}
    columns["measured"] = _measured_from_proto(report.measured) if report.HasField("measured") else None
    return Quantization(**columns)


def _measured_from_proto(measured: inference_pb2.MeasuredLoss) -> MeasuredLoss:
    columns = {name: getattr(measured, name) for name in MeasuredLoss.__slots__}
    columns["divergence_interval"] = measured.divergence_interval if measured.HasField("divergence_interval") else None
    return MeasuredLoss(**columns)


def load_from_proto(response: inference_pb2.GetLoadResponse) -> Load:
    """The answer of GetLoad."""
    return Load(**{name: getattr(response, name) for name in Load.__slots__})


def _set_scalars(sampling: generation_pb2.SamplingParameters) -> dict[str, float | int]:
    """The scalars that are set; single precision, so that seven digits are all there is to show."""
    scalars = {field.name: value for field, value in sampling.ListFields() if field.name != "logit_bias"}
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in scalars.items()}
