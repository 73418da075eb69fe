"""The table of RPCs of headrace.v1.InferenceService: which handler answers which method.

Owns registration only. Registered by hand rather than through the generated base class, because
requests are parsed inside the boundary and streams are written as bytes; a test holds the table
against the .proto.
"""

from __future__ import annotations

from typing import Any

import grpc

from headrace.v1 import inference_pb2 as pb
from headrace_service.api.generation_handlers import GenerationHandlers
from headrace_service.api.model_handlers import ModelHandlers
from headrace_service.api.request_handlers import RequestHandlers
from headrace_service.api.session import SessionHandlers
from headrace_service.calls.rpc_boundary import bidirectional, streaming, unary
from headrace_service.service_core import ServiceCore

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


def method_handlers(core: ServiceCore) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Returns the handler of each method by its name."""
    generation, requests, model = GenerationHandlers(core), RequestHandlers(core), ModelHandlers(core)
    sessions = SessionHandlers(core)
    return {
        "Generate": streaming(pb.GenerateRequest, generation.generate),
        "Complete": unary(pb.CompleteRequest, pb.CompleteResponse, generation.complete),
        "Chat": streaming(pb.ChatRequest, generation.chat),
        "Submit": unary(pb.SubmitRequest, pb.SubmitResponse, generation.submit),
        "Subscribe": streaming(pb.SubscribeRequest, generation.subscribe),
        "Session": bidirectional(pb.SessionRequest, sessions.session),
        "Cancel": unary(pb.CancelRequest, pb.CancelResponse, requests.cancel),
        "ListRequests": unary(pb.ListRequestsRequest, pb.ListRequestsResponse, requests.list_requests),
        "Tokenize": unary(pb.TokenizeRequest, pb.TokenizeResponse, model.tokenize),
        "Detokenize": unary(pb.DetokenizeRequest, pb.DetokenizeResponse, model.detokenize),
        "GetModel": unary(pb.GetModelRequest, pb.GetModelResponse, model.get_model),
        "ListModels": unary(pb.ListModelsRequest, pb.ListModelsResponse, model.list_models),
        "GetLoad": unary(pb.GetLoadRequest, pb.GetLoadResponse, model.get_load),
    }


def register(server: grpc.aio.Server, core: ServiceCore) -> None:
    """Adds InferenceService to a gRPC server."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, method_handlers(core)),))
