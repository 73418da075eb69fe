"""The paths of OpenAI's API that this server answers, and what answers all others.

Owns the table. Starlette routes and answers preflight requests of browsers; a path's application is
reached without anything of Starlette's around it, because a stream's every token passes there.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace_service import errors
from headrace_service.auth.credentials import Credentials
from headrace_service.config import ServiceConfig
from headrace_service.openai.gate import Gate
from headrace_service.openai.handlers.generation_handlers import GenerationHandlers
from headrace_service.openai.handlers.model_handlers import Health, ModelHandlers
from headrace_service.openai.http import http_errors
from headrace_service.service_core import ServiceCore

_EXPOSED = ("x-request-id", "x-trace-id", "x-headrace-ignored", "retry-after", "retry-after-ms")
_SERVED = "/v1/chat/completions, /v1/completions and /v1/models"


def application(config: ServiceConfig, core: ServiceCore, credentials: Credentials) -> ASGIApp:
    """Returns the application of one process."""
    gate = Gate(config, credentials, core.tracer)
    application = Starlette(
        routes=[*_operations(gate, core), *_health(config, gate, core)],
        middleware=_cross_origin(config),
        exception_handlers={404: _no_such_path, 405: _no_such_method},
    )
    # A path with a slash behind it is none of ours, and a redirect would name the caller's Host.
    application.router.redirect_slashes = False
    return application


def _operations(gate: Gate, core: ServiceCore) -> list[BaseRoute]:
    """The operations, by their names in OpenAI's specification."""
    generations, models = GenerationHandlers(core), ModelHandlers(core)
    return [
        Route("/v1/chat/completions", gate.endpoint("CreateChatCompletion", generations.chat), methods=["POST"]),
        Route("/v1/completions", gate.endpoint("CreateCompletion", generations.complete), methods=["POST"]),
        Route("/v1/embeddings", gate.endpoint("CreateEmbedding", models.embed), methods=["POST"]),
        Route("/v1/models", gate.endpoint("ListModels", models.list_models), methods=["GET"]),
        Route("/v1/models/{model:path}", gate.endpoint("RetrieveModel", models.retrieve_model), methods=["GET"]),
    ]


def _health(config: ServiceConfig, gate: Gate, core: ServiceCore) -> list[BaseRoute]:
    applications: dict[str, ASGIApp] = {
        "/health": Health(core, only_live=False),
        "/health/ready": Health(core, only_live=False),
        "/health/live": Health(core, only_live=True),
    }
    if config.health_needs_key:
        applications = {path: gate.open_to(one, "Health") for path, one in applications.items()}
    return [Route(path, one, methods=["GET"]) for path, one in applications.items()]


def _cross_origin(config: ServiceConfig) -> list[Middleware]:
    if not config.openai_cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(config.openai_cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    ]


async def _no_such_path(request: Request, error: Exception) -> Response:
    refusal = errors.not_found(f"there is no {request.method} {request.url.path[:128]} here; this server has {_SERVED}")
    return Response(http_errors.body_of(refusal), 404, media_type="application/json")


async def _no_such_method(request: Request, error: Exception) -> Response:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    refusal = errors.unimplemented(f"{request.url.path[:128]} does not take {request.method}")
    return Response(http_errors.body_of(refusal, "method_not_allowed"), 405, headers, media_type="application/json")
