"""The tensors of TensorRT-LLM's ensemble for Triton.

Owns their names, types and meaning. Every tensor has a batch dimension, of one: a request is one
prompt. Without temperature, top_k and top_p the most likely token is taken, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from headrace.v1 import generation_pb2
from headrace_service import errors
from headrace_service.kserve.language_models import asked
from headrace_service.kserve.language_models.asked import Asked
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.generation_wire import Progress, Render
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature, TensorSpec, tensor
from headrace_service.kserve.messages.tensors import Tensor

_FLAGS = (
    "stream exclude_input_in_output return_log_probs return_context_logits return_generation_logits "
    "return_perf_metrics "
    "return_num_input_tokens return_num_output_tokens"
).split()
_COUNTS = "end_id pad_id top_k min_tokens min_length beam_width num_return_sequences".split()
_NUMBERS = "top_p temperature length_penalty repetition_penalty presence_penalty frequency_penalty".split()
# What is asked for by truth values, beams and words that this server has no answer to.
_UNBUILT_FLAGS = ("return_context_logits", "return_generation_logits", "return_perf_metrics")
_UNBUILT = (
    tensor("embedding_bias_words", "BYTES", -1, optional=True),
    tensor("embedding_bias_weights", "FP32", -1, optional=True),
    tensor("guided_decoding_guide_type", "BYTES", 1, optional=True),
    tensor("guided_decoding_guide", "BYTES", 1, optional=True),
    tensor("lora_task_id", "UINT64", 1, optional=True),
)


def _optional(names: list[str], datatype: str, *dims: int) -> list[TensorSpec]:
    return [tensor(name, datatype, *dims, optional=True) for name in names]


SIGNATURE = Signature(
    inputs=(
        tensor("text_input", "BYTES", 1),
        tensor("max_tokens", "INT32", 1),
        *_optional(["bad_words", "stop_words"], "BYTES", -1),
        *_optional(_FLAGS, "BOOL", 1),
        *_optional(_COUNTS, "INT32", 1),
        *_optional(_NUMBERS, "FP32", 1),
        *_optional(["seed", "random_seed"], "UINT64", 1),
        *_UNBUILT,
    ),
    outputs=(
        tensor("text_output", "BYTES", -1),
        tensor("cum_log_probs", "FP32", -1),
        tensor("output_log_probs", "FP32", -1, -1),
        tensor("batch_index", "INT32", 1),
        tensor("sequence_index", "INT32", 1),
        tensor("num_input_tokens", "INT32", 1),
        tensor("num_output_tokens", "INT32", -1),
    ),
    max_batch_size=1,
    decoupled=True,
    backend="tensorrtllm",
)
# Which truth value asks for an output.
_ASKED_BY = {
    "cum_log_probs": "return_log_probs",
    "output_log_probs": "return_log_probs",
    "num_input_tokens": "return_num_input_tokens",
    "num_output_tokens": "return_num_output_tokens",
}


_NAMES: Final[Mapping[str, str]] = {
    "spec.text": "text_input",
    "spec.n": "num_return_sequences",
    "spec.stop.strings": "stop_words",
    "spec.stop.bad_words": "bad_words",
    "spec.stop.token_ids[0]": "end_id",
    **{f"spec.stop.{name}": name for name in ("max_tokens", "min_tokens")},
    **{
        f"spec.sampling.{name}": name
        for name in "temperature top_k top_p repetition_penalty presence_penalty frequency_penalty seed".split()
    },
    "spec.priority": "parameters[priority]",
    "spec.time_limit": "parameters[timeout]",
}


class TensorRtLlmTensors:
    """The tensors of TensorRT-LLM's ensemble model."""

    signature = SIGNATURE
    text_shape: tuple[int, ...] = (1, 1)

    def read(self, request: InferRequest) -> Asked:
        """Returns what a request asks for. Raises ServiceError."""
        inputs = request.inputs
        _refuse_unbuilt(request)
        spec = generation_pb2.GenerationSpec(text=asked.text_of(inputs, "text_input"))
        _read_stop(inputs, spec)
        _read_sampling(inputs, spec)
        asked.apply(request.parameters, spec)
        stream = asked.flag(inputs, "stream")
        exclude = asked.flag(inputs, "exclude_input_in_output", default=stream)
        if stream and not exclude:
            raise refusals.invalid(
                "exclude_input_in_output: must not be false when stream is true", "exclude_input_in_output"
            )
        outputs = frozenset(
            output.name
            for output in SIGNATURE.outputs
            if output.name in request.outputs
            and (output.name not in _ASKED_BY or asked.returns(request, _ASKED_BY[output.name]))
            and (request.named_outputs or output.name not in ("batch_index", "sequence_index"))
        )
        if outputs & {"cum_log_probs", "output_log_probs"}:
            spec.logprobs = 0
        is_older = "min_length" in inputs and "min_tokens" not in inputs
        names = {**_NAMES, "spec.stop.min_tokens": "min_length"} if is_older else _NAMES
        return Asked(spec, stream, not exclude, outputs, names)

    def render(self, asked: Asked, token_text: Callable[[int], str]) -> Render:
        """Returns how responses are made."""
        before = asked.spec.text if asked.prompt_first else ""

        def outputs(progress: Progress) -> dict[str, Tensor]:
            pieces = progress.pieces
            texts = [(before + piece.text).encode() for piece in pieces]
            rendered = {"text_output": Tensor.strings(texts, (1, len(texts)))}
            if "cum_log_probs" in asked.outputs:
                rendered["cum_log_probs"] = Tensor.of(np.array([[p.cumulative for p in pieces]], np.float32))
            if "output_log_probs" in asked.outputs:
                rendered["output_log_probs"] = Tensor.of(_padded([[e.sampled for e in p.logprobs] for p in pieces]))
            for index in ("batch_index", "sequence_index"):
                rendered[index] = Tensor.of(np.zeros((1, 1), np.int32))
            rendered["num_input_tokens"] = Tensor.of(np.array([[progress.num_prompt_tokens]], np.int32))
            rendered["num_output_tokens"] = Tensor.of(np.array([[len(p.token_ids) for p in pieces]], np.int32))
            return {name: rendered[name] for name in rendered if name in asked.outputs}

        return outputs


def _refuse_unbuilt(request: InferRequest) -> None:
    inputs = request.inputs
    for spec in _UNBUILT:
        if spec.name in inputs:
            raise asked.unbuilt(spec.name)
    for name in _UNBUILT_FLAGS:
        if asked.flag(inputs, name):
            raise asked.unbuilt(name)
    if "beam_width" in inputs and asked.number_of(inputs, "beam_width") != 1:
        raise asked.unbuilt("beam_width other than 1")
    if "length_penalty" in inputs and asked.number_of(inputs, "length_penalty") not in (0, 1):
        raise asked.unbuilt("length_penalty other than 1, which needs beams,")
    for key in request.parameters.custom:
        raise errors.invalid_field(f"parameters[{key[:64]}]", "is not known")


def _read_stop(inputs: Mapping[str, Tensor], spec: generation_pb2.GenerationSpec) -> None:
    stop = spec.stop
    stop.max_tokens = asked.unsigned(asked.number_of(inputs, "max_tokens"), "max_tokens")
    for name in ("min_length", "min_tokens"):
        if name in inputs:
            stop.min_tokens = asked.unsigned(asked.number_of(inputs, name), name)
    for name, field in (("stop_words", stop.strings), ("bad_words", stop.bad_words)):
        if name in inputs:
            # Clients send one empty word for none.
            field.extend(word for word in asked.texts_of(inputs, name) if word)
    if "end_id" in inputs:
        # It takes the place of the model's own; -1: the output goes on to its longest.
        end_id = asked.number_of(inputs, "end_id")
        stop.ignore_eos = True
        if end_id != -1:
            stop.token_ids.append(asked.unsigned(end_id, "end_id"))
    if "pad_id" in inputs:
        # Outputs are not padded, so that any id will do.
        asked.signed(asked.number_of(inputs, "pad_id"), "pad_id")
    if "num_return_sequences" in inputs:
        spec.n = asked.unsigned(asked.number_of(inputs, "num_return_sequences"), "num_return_sequences")


def _read_sampling(inputs: Mapping[str, Tensor], spec: generation_pb2.GenerationSpec) -> None:
    sampling = spec.sampling
    for name in _NUMBERS:
        if name in inputs and name != "length_penalty":
            setattr(sampling, name, asked.number_of(inputs, name))
    if "top_k" in inputs:
        sampling.top_k = asked.number_of(inputs, "top_k")
    for name in ("random_seed", "seed"):
        if name in inputs:
            sampling.seed = asked.seed(asked.number_of(inputs, name), name)
    if not any(sampling.HasField(name) for name in ("temperature", "top_k", "top_p")):
        sampling.temperature = 0


def _padded(rows: list[list[float]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the rows as one array [1, outputs, tokens], shorter ones padded with zeros."""
    longest = max(map(len, rows))
    array = np.zeros((1, len(rows), longest), np.float32)
    for row, values in enumerate(rows):
        array[0, row, : len(values)] = values
    return array
