"""Which settings each command takes, and how they become one frozen object per process.

Owns the supervisor's own fields, and the mapping from a command's flat settings to the parts: the service's (`headrace_service.config`) and the
backend's (`headrace_backend.config`). Reading the four sources is `settings.py`'s. The supervisor hands a part to a process as JSON.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from headrace_backend.config import BackendConfig, EngineConfig
from headrace_service.config import ServiceConfig
from headrace_supervisor import settings
from headrace_supervisor.runtime_folder import MAX_BASE_BYTES
from headrace_supervisor.settings import ConfigError, Group


class SupervisorConfig(pydantic.BaseModel):
    """The supervisor itself: where the server listens, how many services, how processes start, restart and end."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    listen: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="addresses to serve: HOST:PORT (port 0: any free one) or unix:PATH; may be repeated",
        ),
    ] = ("127.0.0.1:50051",)
    services: Annotated[int, Field(ge=1, le=64, description="service processes that share the port")] = 1
    runtime_folder: Annotated[
        pathlib.Path | None,
        Field(
            description="where the private folder of the sockets is made; default: XDG_RUNTIME_DIR, or the system's temporary one"
        ),
    ] = None
    restart_backoff_s: Annotated[
        float, Field(gt=0, le=60, description="seconds before a first restart; doubles with each, to 30")
    ] = 0.2
    start_attempts: Annotated[
        int, Field(ge=1, description="starts of one process before the server gives up, while it never served")
    ] = 5
    log_format: Annotated[
        Literal["console", "json"], Field(description="log lines on stderr, for people or for machines")
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least serious log lines that are written")
    ] = "info"


class ServerConfig(pydantic.BaseModel):
    """Everything `headrace serve` was told. `service` and `backend` lack the addresses until `addressed` fills them in."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    supervisor: SupervisorConfig
    service: ServiceConfig
    backend: BackendConfig


# What serve decides by itself: private addresses, names, and who dies with whom (launch.py sees to it). One limit holds for both ends of the private socket.
_SERVICE_PRIVATE = frozenset(
    {"listen", "engine", "engine_token_file", "model_folder", "service_name", "reuse_port", "exit_with_parent"}
)
_BACKEND_PRIVATE = frozenset({"engine", "listen", "token_file", "refusal_file", "max_message_bytes"})

SERVE = (
    Group("Server", SupervisorConfig),
    Group("Model and engine", EngineConfig),
    Group("Service", ServiceConfig, _SERVICE_PRIVATE),
    Group("Backend", BackendConfig, _BACKEND_PRIVATE),
)
SERVICE = (Group("Service", ServiceConfig),)
BACKEND = (Group("Model and engine", EngineConfig), Group("Backend", BackendConfig, frozenset({"engine"})))

# Every setting has one environment variable; a command overlooks those of the other commands, but not unknown ones. The last are the
# client's (clients/python/headrace/cli/options.py).
_CLIENT = {"server", "api_key", "tls", "ca", "client_certificate", "client_key", "server_name"}
_KNOWN = frozenset(name for groups in (SERVE, SERVICE, BACKEND) for name in settings.names(groups)) | _CLIENT


def load_server(flags: Mapping[str, Any], config: pathlib.Path | None) -> ServerConfig:
    """Configuration of `headrace serve`. Raises ConfigError."""
    values = settings.merge(SERVE, flags, config, _KNOWN)
    supervisor = SupervisorConfig(**_part(SERVE[0], values))
    if supervisor.services > 1 and any(address.startswith("unix:") for address in supervisor.listen):
        raise ConfigError(
            f"services is {supervisor.services}; processes can share a HOST:PORT only, a unix: address takes 1"
        )
    private = "unix:to-be-chosen"
    engine = _engine(_part(SERVE[1], values))
    backend = BackendConfig(
        engine=engine, listen=private, max_message_bytes=values["max_engine_message_bytes"], **_part(SERVE[3], values)
    )
    service = _service(listen=supervisor.listen, engine=private, **_part(SERVE[2], values))
    return ServerConfig(supervisor=supervisor, service=service, backend=backend)


def load_service(flags: Mapping[str, Any], config: pathlib.Path | None) -> ServiceConfig:
    """Configuration of `headrace service`. Raises ConfigError."""
    return _service(**settings.merge(SERVICE, flags, config, _KNOWN))


def load_backend(flags: Mapping[str, Any], config: pathlib.Path | None) -> BackendConfig:
    """Configuration of `headrace backend`. Raises ConfigError."""
    values = settings.merge(BACKEND, flags, config, _KNOWN)
    return BackendConfig(engine=_engine(_part(BACKEND[0], values)), **_part(BACKEND[1], values))


def addressed(config: ServerConfig, listen: tuple[str, ...], engine: str) -> ServerConfig:
    """The same configuration with the real public addresses and the private socket in it."""
    shares = any(not address.startswith("unix:") for address in listen)
    service = config.service.model_copy(update={"listen": listen, "engine": engine, "reuse_port": shares})
    return config.model_copy(
        update={"service": service, "backend": config.backend.model_copy(update={"listen": engine})}
    )


def runtime_base(config: SupervisorConfig) -> pathlib.Path:
    """Folder in which the private runtime folder is made. A default whose path is too long for sockets gives way to /tmp."""
    if config.runtime_folder is not None:
        return config.runtime_folder
    session = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    base = session if session.is_absolute() and os.access(session, os.W_OK) else pathlib.Path(tempfile.gettempdir())
    return base if len(os.fsencode(base)) <= MAX_BASE_BYTES else pathlib.Path("/tmp")


def _engine(values: Mapping[str, Any]) -> EngineConfig:
    """The engine's part. Raises ConfigError where its settings do not go together."""
    try:
        return EngineConfig(**values)
    except pydantic.ValidationError as error:
        raise _contradiction(error) from None


def _service(**values: Any) -> ServiceConfig:
    """The service's part. Raises ConfigError where its settings do not go together."""
    try:
        return ServiceConfig(**values)
    except pydantic.ValidationError as error:
        raise _contradiction(error) from None


def _contradiction(error: pydantic.ValidationError) -> ConfigError:
    return ConfigError(error.errors(include_url=False)[0]["msg"].removeprefix("Value error, "))


def _part(group: Group, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in group.fields()}
