"""The tensors of vLLM's backend for Triton.

Owns their names, types and meaning: the text goes in as text_input, sampling parameters as JSON,
and each response brings what is new of every output.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from headrace.v1 import generation_pb2
from headrace_service import errors
from headrace_service.kserve.language_models import asked, strict_json, vllm_sampling
from headrace_service.kserve.language_models.asked import Asked
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.generation_wire import Piece, Progress, Render
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature, tensor
from headrace_service.kserve.messages.tensors import Tensor

SIGNATURE = Signature(
    inputs=(
        tensor("text_input", "BYTES", 1),
        tensor("image", "BYTES", -1, optional=True),
        *(tensor(name, "BOOL", 1, optional=True) for name in ("stream", "exclude_input_in_output")),
        tensor("sampling_parameters", "BYTES", 1, optional=True),
        *(
            tensor(f"return_{name}", "BOOL", 1, optional=True)
            for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
        ),
    ),
    outputs=(
        tensor("text_output", "BYTES", -1),
        tensor("finish_reason", "BYTES", -1),
        tensor("cumulative_logprob", "FP32", -1),
        tensor("logprobs", "BYTES", -1),
        tensor("num_input_tokens", "UINT32", 1),
        tensor("num_output_tokens", "UINT32", -1),
    ),
    decoupled=True,
    backend="vllm",
)
_UNFINISHED = "None"


class VllmTensors:
    """The tensors of Triton's vLLM backend."""

    signature = SIGNATURE
    text_shape: tuple[int, ...] = (1,)

    def read(self, request: InferRequest) -> Asked:
        """Returns what a request asks for. Raises ServiceError."""
        inputs = request.inputs
        if "image" in inputs:
            raise asked.unbuilt("image")
        spec = generation_pb2.GenerationSpec(text=asked.text_of(inputs, "text_input"))
        parameters = _sampling(request)
        vllm_sampling.fill(spec, parameters)
        asked.apply(request.parameters, spec)
        stream = asked.flag(inputs, "stream")
        exclude = asked.flag(inputs, "exclude_input_in_output", default=stream)
        if stream and not exclude:
            raise refusals.invalid(
                "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
                "exclude_input_in_output",
            )
        outputs = frozenset(
            spec.name
            for spec in SIGNATURE.outputs
            if spec.name in request.outputs
            and (spec.name == "text_output" or asked.returns(request, f"return_{spec.name}"))
        )
        if "cumulative_logprob" in outputs and not spec.HasField("logprobs"):
            spec.logprobs = 0
        return Asked(spec, stream, not exclude, outputs, vllm_sampling.names(parameters))

    def render(self, asked: Asked, token_text: Callable[[int], str]) -> Render:
        """Returns how responses are made."""
        with_logprobs = asked.spec.HasField("logprobs")
        before = asked.spec.text if asked.prompt_first else ""

        def outputs(progress: Progress) -> dict[str, Tensor]:
            pieces = progress.pieces
            rendered = {"text_output": Tensor.strings([(before + piece.text).encode() for piece in pieces])}
            if "finish_reason" in asked.outputs:
                rendered["finish_reason"] = Tensor.strings([(p.reason or _UNFINISHED).encode() for p in pieces])
            if "cumulative_logprob" in asked.outputs:
                rendered["cumulative_logprob"] = Tensor.of(np.array([p.cumulative for p in pieces], np.float32))
            if "logprobs" in asked.outputs:
                columns = [_logprobs(piece, token_text) if with_logprobs else "null" for piece in pieces]
                rendered["logprobs"] = Tensor.strings([column.encode() for column in columns])
            if "num_input_tokens" in asked.outputs:
                rendered["num_input_tokens"] = Tensor.of(np.array([progress.num_prompt_tokens], np.uint32))
            if "num_output_tokens" in asked.outputs:
                rendered["num_output_tokens"] = Tensor.of(np.array([len(p.token_ids) for p in pieces], np.uint32))
            return {name: rendered[name] for name in rendered if name in asked.outputs}

        return outputs


def _sampling(request: InferRequest) -> vllm_sampling.Parameters:
    """Returns the sampling parameters: those of the request, and over them those of the tensor."""
    parameters = vllm_sampling.of_request(request.parameters.custom)
    if "sampling_parameters" in request.inputs:
        try:
            values = strict_json.read_object(asked.text_of(request.inputs, "sampling_parameters"))
        except ValueError as error:
            raise errors.invalid_field("sampling_parameters", str(error)) from None
        parameters |= vllm_sampling.in_tensor(values)
    return parameters


def _logprobs(piece: Piece, token_text: Callable[[int], str]) -> str:
    """Returns the log probabilities of the new tokens as vLLM writes them.

    Per token an object by token id.
    """
    columns = []
    for token, entry in zip(piece.token_ids, piece.logprobs, strict=True):
        ranked = {
            top: (logprob, rank)
            for rank, (top, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        }
        ranked.setdefault(token, (entry.sampled, entry.rank))
        columns.append(
            {
                str(top): {"logprob": logprob, "rank": rank, "decoded_token": token_text(top)}
                for top, (logprob, rank) in ranked.items()
            }
        )
    return json.dumps(columns)
