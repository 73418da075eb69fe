"""Which settings each command takes, and how they become one frozen object per process.

Owns the supervisor's own fields, and the mapping from a command's flat settings to the parts: the
service's (`headrace_service.config`), the backend's (`headrace_backend.config`), the rank agent's
(`headrace_backend.rank_agent.config`) and telemetry's (`headrace_telemetry.config`). Reading the
four sources is `settings.py`'s. The supervisor hands a part to a process as JSON.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from headrace_backend.config import BackendConfig as BackendConfig
from headrace_backend.config import EngineConfig as EngineConfig
from headrace_backend.rank_agent.config import RanksConfig as RanksConfig
from headrace_service.config import ServiceConfig as ServiceConfig
from headrace_supervisor import service_settings, settings
from headrace_supervisor.named_model import check_before_fetching, fetched, hub_names, with_model_fetched
from headrace_supervisor.repository import NAME_RULE, ModelRepository, is_name, shown
from headrace_supervisor.runtime_folder import MAX_BASE_BYTES
from headrace_supervisor.settings import ConfigError, Group
from headrace_telemetry.config import TelemetryConfig as TelemetryConfig


def _checked_hang_timeout(value: float) -> float:
    """Raises ValueError for what a healthy process on a busy machine would not meet."""
    if 0 < value < 1:
        raise ValueError("must be 0 (never) or 1 and more")
    return value


class SupervisorConfig(pydantic.BaseModel):
    """Settings of the supervisor: addresses, services, and how processes start and end."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    listen: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="addresses to serve: HOST:PORT (port 0: any free one) or unix:PATH; may be repeated",
        ),
    ] = ("127.0.0.1:50051",)
    openai_listen: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "addresses to serve OpenAI's HTTP API on, beside gRPC: HOST:PORT or unix:PATH; may be repeated; none: "
                "it is not served"
            )
        ),
    ] = ()
    model_repository: Annotated[
        pathlib.Path | None,
        Field(
            description=(
                "folder whose subfolders with a config.json, or a GGUF file, are models that may be loaded, by their "
                "names"
            )
        ),
    ] = None
    load_models: Annotated[
        tuple[str, ...],
        Field(description="further models of the repository that are loaded at start; may be repeated"),
    ] = ()
    replicas: Annotated[
        int,
        Field(
            ge=1,
            le=8,
            description=(
                "backends of each model, beside each other: prompts that begin alike go to the same one. On GPUs each "
                "takes GPUs for its tp x pp ranks, the first from the device's index on, the others behind it"
            ),
        ),
    ] = 1
    services: Annotated[int, Field(ge=1, le=64, description="service processes that share the port")] = 1
    openai_services: Annotated[
        int, Field(ge=1, le=64, description="processes that share the port of OpenAI's HTTP API")
    ] = 1
    runtime_folder: Annotated[
        pathlib.Path | None,
        Field(
            description=(
                "where the private folder of the sockets is made; default: XDG_RUNTIME_DIR, or the system's temporary "
                "one"
            )
        ),
    ] = None
    telemetry: Annotated[
        Literal["on", "off"],
        Field(description="whether a telemetry process makes traces and metrics of what the others tell"),
    ] = "on"
    restart_backoff_s: Annotated[
        float, Field(gt=0, le=60, description="seconds before a first restart; doubles with each, to 30")
    ] = 0.2
    start_attempts: Annotated[
        int, Field(ge=1, description="starts of one process before the server gives up, while it never served")
    ] = 5
    hang_timeout_s: Annotated[
        float,
        pydantic.AfterValidator(_checked_hang_timeout),
        Field(
            ge=0,
            le=3600,
            allow_inf_nan=False,
            description=(
                "seconds after which a process that is stopped is killed and started again, 1 or more; one that is not "
                "stopped but whose event loop is silent gets three times as long; 0: never"
            ),
        ),
    ] = 10.0
    log_format: Annotated[
        Literal["console", "json"], Field(description="log lines on stderr, for people or for machines")
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least serious log lines that are written")
    ] = "info"


class ServerConfig(pydantic.BaseModel):
    """Everything `headrace serve` was reported.

    `service`, `openai` and `backend` lack the addresses until the supervisor fills them in.

    Attributes:
        service: settings of the services that speak gRPC.
        openai: settings of the services that speak OpenAI's HTTP API; None: there are none.
        backend: settings of backends; its engine's model is the default model.
        model_name: name of the default model.
        engine_values: the settings of all models' engines as they were merged, which a model's own
            file goes before.
        telemetry: settings of the telemetry process, without its socket; None: it is off.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    supervisor: SupervisorConfig
    service: ServiceConfig
    openai: ServiceConfig | None = None
    backend: BackendConfig
    model_name: str
    engine_values: dict[str, Any]
    telemetry: TelemetryConfig | None = None


# What serve decides by itself: private addresses, names, and who dies with whom (launch.py sees to
# it). One limit holds for both ends of the private socket.
_SERVICE_PRIVATE = frozenset(
    {
        "listen",
        "openai_listen",
        "engine",
        "engines_dns",
        "engines_dns_s",
        "engines_file",
        "control",
        "engine_token_file",
        "engine_tls_ca",
        "engine_tls_cert",
        "engine_tls_key",
        "model_folder",
        "default_model_aliases",
        "service_name",
        "reuse_port",
        "probe",
        "telemetry_socket",
        "exit_with_parent",
    }
)
_BACKEND_PRIVATE = frozenset(
    {
        "engine",
        "listen",
        "token_file",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "refusal_file",
        "probe",
        "replica",
        "telemetry_socket",
        "max_message_bytes",
        "hosts_timeout_s",
    }
)
# Engines of a server listen to its own services alone, and not to other hosts.
_ENGINE_ALONE = frozenset({"hosts"})
_TELEMETRY_PRIVATE = frozenset({"telemetry_socket"})

SERVE = (
    Group("Server", SupervisorConfig),
    Group("Model and engine", EngineConfig, _ENGINE_ALONE),
    Group("Service", ServiceConfig, _SERVICE_PRIVATE),
    Group("Backend", BackendConfig, _BACKEND_PRIVATE),
    Group("Telemetry", TelemetryConfig, _TELEMETRY_PRIVATE),
)
# What the headrace.toml in a model's folder may set: where the model is, and its name, the folder
# says.
MODEL = Group("Model and engine", EngineConfig, _ENGINE_ALONE | {"model", "model_name"})
MODEL_FILE = "headrace.toml"

SERVICE = (Group("Service", ServiceConfig, frozenset({"control", "default_model_aliases"})),)
BACKEND = (Group("Model and engine", EngineConfig), Group("Backend", BackendConfig, frozenset({"engine", "replica"})))
RANKS = (Group("Ranks", RanksConfig),)
TELEMETRY = (Group("Telemetry", TelemetryConfig),)

# Every setting has one environment variable; a command overlooks those of the other commands, but
# not unknown ones. The last are the client's (clients/python/headrace/cli/options.py).
_CLIENT = {"server", "api_key", "tls", "ca", "client_certificate", "client_key", "server_name", "chat_history"}
_KNOWN = (
    frozenset(name for groups in (SERVE, SERVICE, BACKEND, RANKS, TELEMETRY) for name in settings.names(groups))
    | _CLIENT
)


def load_server(flags: Mapping[str, Any], config: pathlib.Path | None) -> ServerConfig:
    """Configuration of `headrace serve`. Raises ConfigError."""
    values = settings.merge(SERVE, flags, config, _KNOWN)
    supervisor = SupervisorConfig(**_part(SERVE[0], values))
    service_settings.check_sharing("services", supervisor.services, supervisor.listen)
    service_settings.check_sharing("openai_services", supervisor.openai_services, supervisor.openai_listen)
    private = "unix:to-be-chosen"
    service, openai = service_settings.services(
        supervisor.listen, supervisor.openai_listen, {"control": private, **_part(SERVE[2], values)}
    )
    telemetry = _telemetry_of_server(supervisor, _part(SERVE[4], values))
    settings.check_addresses(
        listen=supervisor.listen,
        openai_listen=supervisor.openai_listen,
        metrics_listen=[values["metrics_listen"]] if telemetry is not None else [],
    )
    check_before_fetching(values["model"], (*supervisor.listen, *supervisor.openai_listen))
    engine_values = _with_model_found(_part(SERVE[1], values), supervisor)
    engine = engine_config(engine_values)
    backend = BackendConfig(
        engine=engine, listen=private, max_message_bytes=values["max_engine_message_bytes"], **_part(SERVE[3], values)
    )
    aliases = () if values["model_name"] else hub_names(values["model"], engine.model)
    return ServerConfig(
        supervisor=supervisor,
        service=service_settings.with_aliases(service, aliases),
        openai=openai and service_settings.with_aliases(openai, aliases),
        backend=backend,
        model_name=engine.model_name or _own_name(engine.model),
        engine_values=engine_values,
        telemetry=telemetry,
    )


def _with_model_found(engine_values: dict[str, Any], supervisor: SupervisorConfig) -> dict[str, Any]:
    """The engine's settings, `model` being a folder.

    A bare name that the repository has is meant to be that one, ORG/NAME one of the hub.
    """
    if supervisor.model_repository is None:
        if supervisor.load_models:
            raise ConfigError("load_models needs model_repository, the folder that the names are looked for in")
        return with_model_fetched(engine_values)
    if not supervisor.model_repository.is_dir():
        raise ConfigError(f"model_repository: there is no folder {supervisor.model_repository}")
    name = str(engine_values["model"])
    if name not in ModelRepository(supervisor.model_repository):
        return with_model_fetched(engine_values)
    if engine_values["model_name"] not in ("", name):
        raise ConfigError(f"model_name is for a model given as a path; {name} of the repository has its folder's name")
    return {**engine_values, "model": supervisor.model_repository / name}


def _own_name(model: pathlib.Path) -> str:
    """The name of a model that is given by its path.

    Its folder's, or its file's without the ending.

    A file may be a link to a name that says nothing.
    """
    return model.stem if model.suffix == ".gguf" else model.resolve().name


def model_backend(
    config: ServerConfig, name: str, folder: pathlib.Path, *, memory_bytes: int = 0, **private: Any
) -> BackendConfig:
    """Configuration of one model's backend.

    The server's settings, before them the model's own file, before that a budget given at its
    loading.

    Args:
        config: the server's.
        name: the model's name.
        folder: its folder.
        memory_bytes: memory budget; 0: what the settings say.
        private: fields of BackendConfig that the supervisor chooses.

    Raises:
        ConfigError: the model's headrace.toml has an unknown key or an impossible value.
    """
    path = folder / MODEL_FILE
    own = settings.read_file(MODEL, path)
    budget = {"memory_budget": memory_bytes} if memory_bytes else {}
    try:
        engine = EngineConfig(**{**config.engine_values, **own, **budget, "model": folder, "model_name": name})
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: {settings.contradiction(error)}") from None
    return config.backend.model_copy(update={"engine": engine, **private})


def load_service(flags: Mapping[str, Any], config: pathlib.Path | None) -> ServiceConfig:
    """Configuration of `headrace service`. Raises ConfigError."""
    values = settings.merge(SERVICE, flags, config, _KNOWN)
    for name, *others in (("listen", "openai_listen"), ("engine", "engines_dns", "engines_file")):
        if not any(values[each] for each in (name, *others)):
            raise ConfigError(settings.needed(name))
    if values["model_folder"] is not None:
        typed = values["model_folder"]
        values["model_folder"] = fetched("model_folder", typed).path
        values["default_model_aliases"] = hub_names(typed, values["model_folder"])
    service = service_settings.service(**values)
    probes = [service.probe] if service.probe else []
    settings.check_addresses(listen=service.listen, openai_listen=service.openai_listen, probe=probes)
    return service


def load_backend(flags: Mapping[str, Any], config: pathlib.Path | None) -> BackendConfig:
    """Configuration of `headrace backend`. Raises ConfigError."""
    values = settings.merge(BACKEND, flags, config, _KNOWN)
    engine = engine_config(with_model_fetched(_part(BACKEND[0], values)))
    backend = BackendConfig(engine=engine, **_part(BACKEND[1], values))
    settings.check_addresses(listen=[backend.listen], probe=[backend.probe] if backend.probe else [])
    return backend


def load_ranks(flags: Mapping[str, Any], config: pathlib.Path | None) -> RanksConfig:
    """Configuration of `headrace ranks`. Raises ConfigError."""
    values = settings.merge(RANKS, flags, config, _KNOWN)
    values["model"] = fetched("model", values["model"]).path
    try:
        return RanksConfig(**values)
    except pydantic.ValidationError as error:
        raise settings.contradiction(error) from None


def load_telemetry(flags: Mapping[str, Any], config: pathlib.Path | None) -> TelemetryConfig:
    """Configuration of `headrace telemetry`. Raises ConfigError."""
    return _telemetry(**settings.merge(TELEMETRY, flags, config, _KNOWN))


def runtime_base(config: SupervisorConfig) -> pathlib.Path:
    """Folder in which the private runtime folder is made.

    A default whose path is too long for sockets gives way to /tmp.
    """
    if config.runtime_folder is not None:
        return config.runtime_folder
    session = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    base = session if session.is_absolute() and os.access(session, os.W_OK) else pathlib.Path(tempfile.gettempdir())
    return base if len(os.fsencode(base)) <= MAX_BASE_BYTES else pathlib.Path("/tmp")


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Returns the engine's part.

    Raises ConfigError where its settings do not go together, or name a model as none may be named.
    """
    name = values["model_name"]
    if name and not is_name(name):
        raise ConfigError(
            f"model_name: {shown(name)} is no name of a model: {NAME_RULE}, or nothing for the folder's own"
        )
    try:
        return EngineConfig(**values)
    except pydantic.ValidationError as error:
        raise settings.contradiction(error) from None


def _telemetry_of_server(supervisor: SupervisorConfig, values: dict[str, Any]) -> TelemetryConfig | None:
    """Telemetry's part; None where it is off, and then settings of it are a mistake.

    Raises ConfigError.
    """
    if supervisor.telemetry == "on":
        return _telemetry(telemetry_socket="to-be-chosen", **values)
    shared = SupervisorConfig.model_fields
    fields = TelemetryConfig.model_fields
    for name in [name for name in values if name not in shared and values[name] != fields[name].default]:
        raise ConfigError(f"{name}: telemetry is off; {settings.flag_name(name)} needs it")
    return None


def _telemetry(**values: Any) -> TelemetryConfig:
    """Telemetry's part, its files looked at. Raises ConfigError."""
    try:
        config = TelemetryConfig(**values)
        config.check_files()
    except pydantic.ValidationError as error:
        raise settings.contradiction(error) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _part(group: Group, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in group.fields()}
