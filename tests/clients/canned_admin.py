"""The AdminService of the canned server.

It has a repository of three models, whose states change when they are reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from headrace.v1 import admin_pb2 as admin
from headrace.v1 import admin_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import inference_pb2 as api

REVISION = "canned@1"


def canned_model(name: str = "canned") -> api.Model:
    """A model as GetModel tells it."""
    return api.Model(
        name=name,
        revision=REVISION,
        architecture="LlamaForCausalLM",
        parameter_count=7_500_000,
        dtype="bf16",
        vocabulary_size=4096,
        max_context_tokens=2048,
        max_outputs=8,
        end_of_text_token_ids=[1, 2],
        has_chat_template=True,
        default_sampling=pb.SamplingParameters(temperature=0.7, top_k=40),
        kv_block_tokens=16,
        kv_blocks=64,
        device="cpu",
        not_followed=["suppress_tokens (a list of 2 entries) has no effect"],
        memory_plan=api.MemoryPlan(total_bytes=8 << 30, weight_bytes=1 << 30, kv_cache_bytes=4 << 30, measured=True),
        quantization=api.Quantization(
            scheme="int4",
            group_size=64,
            bits_per_weight=4.375,
            mean_relative_error=0.09,
            worst_relative_error=0.125,
            worst_tensor="a.weight",
            head_scheme="int8",
            head_bits_per_weight=8.5,
            head_relative_error=0.0625,
            activations="int8 per token",
            measured=api.MeasuredLoss(
                method="awq",
                tokens=12_345,
                perplexity_before=3.25,
                perplexity_after=3.125,
                divergence=0.0625,
                divergence_interval=0.03125,
            ),
        ),
    )


class CannedAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Keeps the requests it got in `requests`."""

    def __init__(self) -> None:
        self.requests: list[object] = []
        self.draining = False
        # What GetTrace ends with; None: it answers.
        self.traces_refused: grpc.StatusCode | None = None
        self.states = {
            "broken": admin.MODEL_STATE_FAILED,
            "canned": admin.MODEL_STATE_READY,
            "other": admin.MODEL_STATE_UNLOADED,
        }

    def LoadModel(self, request: admin.LoadModelRequest, context: grpc.ServicerContext) -> admin.LoadModelResponse:
        self._known(request.model, context)
        self.requests.append(request)
        if request.memory_bytes > 8 << 30:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "16 GiB asked for, 8 GiB left")
        existing = self.states[request.model] == admin.MODEL_STATE_READY
        self.states[request.model] = admin.MODEL_STATE_READY
        return admin.LoadModelResponse(model=canned_model(request.model), existing=existing)

    def UnloadModel(
        self, request: admin.UnloadModelRequest, context: grpc.ServicerContext
    ) -> admin.UnloadModelResponse:
        self._known(request.model, context)
        self.requests.append(request)
        self.states[request.model] = admin.MODEL_STATE_UNLOADED
        return admin.UnloadModelResponse()

    def ListRepository(
        self, request: admin.ListRepositoryRequest, context: grpc.ServicerContext
    ) -> admin.ListRepositoryResponse:
        rows = [
            admin.RepositoryModel(
                name=name,
                state=state,
                reason="no config.json" if state == admin.MODEL_STATE_FAILED else "",
                memory_bytes=3 << 30 if state == admin.MODEL_STATE_READY else 0,
            )
            for name, state in self.states.items()
        ]
        return admin.ListRepositoryResponse(models=rows)

    def Drain(self, request: admin.DrainRequest, context: grpc.ServicerContext) -> admin.DrainResponse:
        self.draining = not request.resume
        return admin.DrainResponse(running_sequences=3, waiting_requests=1)

    def GetMemoryPlan(
        self, request: admin.GetMemoryPlanRequest, context: grpc.ServicerContext
    ) -> admin.GetMemoryPlanResponse:
        if request.model == "other":
            return admin.GetMemoryPlanResponse()
        return admin.GetMemoryPlanResponse(plan=canned_model().memory_plan)

    def SetTraceDetail(
        self, request: admin.SetTraceDetailRequest, context: grpc.ServicerContext
    ) -> admin.SetTraceDetailResponse:
        self.requests.append(request)
        return admin.SetTraceDetailResponse()

    def GetTrace(
        self, request: admin.GetTraceRequest, context: grpc.ServicerContext
    ) -> Iterator[admin.GetTraceResponse]:
        self.requests.append(request)
        if self.traces_refused is not None:
            context.abort(self.traces_refused, "no traces here")
        if request.request_id == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "trace of 'unknown' is not known")
        yield admin.GetTraceResponse(traces_data=b"first ")
        yield admin.GetTraceResponse(traces_data=b"second")

    def _known(self, model: str, context: grpc.ServicerContext) -> None:
        if model not in self.states:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {model} in the repository")
