"""The file that `headrace ray up` takes: what runs on the cluster, and how much of it.

Owns the file's tables and their rules. `[engine]` and `[service]` are the settings of
`headrace backend` and `headrace service` by their own names, which are looked at here and passed
on; what a deployment decides by itself (addresses, certificates, which engines there are) cannot be
set in them.
"""

from __future__ import annotations

import difflib
import math
import pathlib
import re
import tomllib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from headrace_backend.pp_rules import unsuitable_pp
from headrace_backend.start_rules import too_long
from headrace_backend.tp_rules import unsuitable_tp
from headrace_health.address import MAX_PORT
from headrace_hub.names import parse as parse_name
from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_ray.autoscaling import Policy
from headrace_service.config import ServiceConfig
from headrace_supervisor import config as configs
from headrace_supervisor import settings
from headrace_supervisor.settings import ConfigError, Group
from headrace_supervisor.value_rules import rule_of

MOST_ENGINES = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
# Settings that may name a model of a hub in place of a folder.
_OF_A_HUB = frozenset({"model", "draft_model", "model_folder"})
_DEVICES = ("auto", "cpu", "cuda")
_PRIVATE_OF_ENGINES = frozenset(
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
    }
)
_PRIVATE_OF_SERVICES = frozenset(
    {
        "listen",
        "openai_listen",
        "openai_cors_origins",
        "engine",
        "engines_dns",
        "engines_dns_s",
        "engines_file",
        "engine_token_file",
        "engine_tls_ca",
        "engine_tls_cert",
        "engine_tls_key",
        "control",
        "default_model_aliases",
        "service_name",
        "reuse_port",
        "probe",
        "telemetry_socket",
        "exit_with_parent",
    }
)
_ENGINE = Group("engine", configs.EngineConfig, frozenset())
_BACKEND = Group("backend", configs.BackendConfig, _PRIVATE_OF_ENGINES)
_SERVICE = Group("service", ServiceConfig, _PRIVATE_OF_SERVICES)


class _Table(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _checked_ports(ports: Any) -> Any:
    """Raises ValueError for what are no two ports in order."""
    is_pair = isinstance(ports, list | tuple) and len(ports) == 2 and all(type(port) is int for port in ports)
    if not is_pair or not 1 <= ports[0] <= ports[1] <= MAX_PORT:
        raise ValueError(f"must be two of 1 to {MAX_PORT}, the first not above the last")
    return ports


class Engines(_Table):
    """How many engines there may be, and what each of them takes of its node."""

    min: Annotated[int, Field(ge=1, le=MOST_ENGINES, description="fewest engines")] = 1
    max: Annotated[int, Field(ge=0, le=MOST_ENGINES, description="most engines; 0: as many as min")] = 0
    cpus: Annotated[float, Field(gt=0, le=4096, description="CPUs that Ray reserves for each engine")] = 1.0
    resources: Annotated[
        dict[str, float], Field(description="further resources of Ray that each engine takes, by name")
    ] = {}
    ports: Annotated[
        tuple[int, int],
        pydantic.BeforeValidator(_checked_ports),
        Field(description="first and last port at which engines listen; each takes a free one"),
    ] = (20_000, 20_999)
    drain_s: Annotated[
        float, Field(ge=0, le=86_400, description="seconds that an engine may finish its requests before it ends")
    ] = 600.0

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.max and self.max < self.min:
            raise ValueError(f"max is {self.max}; it must be min ({self.min}) or more")
        for name, amount in self.resources.items():
            if name in ("", "CPU", "GPU") or amount <= 0:
                raise ValueError(f"resources: {name!r} must be another resource than CPU and GPU, and above 0")
        return self


class Autoscaling(_Table):
    """When engines are added and given up."""

    waiting_tokens: Annotated[
        int, Field(ge=1, description="waiting prompt tokens for each engine beyond which another one is wanted")
    ] = 8192
    up_after_s: Annotated[float, Field(ge=0, le=86_400, description="seconds that they must wait, all the time")] = 10.0
    down_after_s: Annotated[
        float, Field(ge=0, le=86_400, description="seconds that engines must have too little to do, all the time")
    ] = 300.0


class Services(_Table):
    """The port of services: each node has one, at its own address in the cluster."""

    port: Annotated[int, Field(ge=1, le=MAX_PORT, description="port of every service")] = 50_051


class RayConfig(_Table):
    """A deployment on a Ray cluster.

    Attributes:
        engine: settings of each `headrace backend`, by name.
        service: settings of each `headrace service`, by name.
    """

    name: Annotated[
        str, Field(description="name of the deployment on its cluster: letters, digits, _ and -; 63 at most")
    ] = "headrace"
    engines: Engines = Engines()
    autoscaling: Autoscaling = Autoscaling()
    services: Services = Services()
    engine: dict[str, Any] = {}
    service: dict[str, Any] = {}

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        check_name(self.name)
        return self

    @property
    def policy(self) -> Policy:
        """When the number of engines changes."""
        engines, scaling = self.engines, self.autoscaling
        most = engines.max or engines.min
        return Policy(engines.min, most, scaling.waiting_tokens, scaling.up_after_s, scaling.down_after_s)

    @property
    def hosts(self) -> int:
        """Nodes of each engine."""
        return int(self.engine.get("hosts", 1))

    @property
    def ranks_per_host(self) -> int:
        """Ranks of an engine on each of its nodes."""
        return int(self.engine.get("tp", 1)) * int(self.engine.get("pp", 1)) // self.hosts

    @property
    def device(self) -> str:
        """The device that engines were given: auto, cpu or cuda."""
        return str(self.engine.get("device", "auto"))


def check_name(name: str) -> None:
    """Raises ValueError: no deployment can have this name."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name {name[:64]!r} must be 1 to 63 letters, digits, _ and -, and begin with none of the last"
        )


def load(path: pathlib.Path) -> RayConfig:
    """Returns the configuration in a TOML file.

    A model that is a path is taken from the current folder on, and must be at that path on the
    nodes.

    Raises:
        ConfigError: the file can't be read, or a setting is unknown, out of range or missing; in
            one sentence with file, table and setting.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    return parse(table, str(path))


def parse(table: Mapping[str, Any], where: str = "configuration") -> RayConfig:
    """Returns the configuration that a dictionary of tables is.

    Args:
        table: as the file has it.
        where: what a refusal begins with.

    Raises:
        ConfigError: as `load`.
    """
    try:
        config = RayConfig(**table)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}: {_problem(error)}") from None
    except TypeError:
        raise ConfigError(f"{where}: must be a table of settings") from None
    engine = _with_whole_paths((_BACKEND, _ENGINE), config.engine, f"{where}: [engine]")
    service = _with_whole_paths((_SERVICE,), config.service, f"{where}: [service]")
    _check_engine(engine, f"{where}: [engine]")
    settings.check_table(_SERVICE, service, f"{where}: [service]")
    return config.model_copy(update={"engine": engine, "service": service})


def service_config(values: Mapping[str, Any], address: str, **private: Any) -> ServiceConfig:
    """Returns the settings of one service.

    Args:
        values: the table `[service]`.
        address: HOST:PORT at which it listens.
        private: what the deployment decides.

    Raises:
        ConfigError: settings do not go together, or not with this address.
    """
    return configs.load_service({**values, "listen": (address,), **private}, None)


def _check_engine(engine: Mapping[str, Any], where: str) -> None:
    if "model" not in engine:
        raise ConfigError(f"{where}: model is needed: a folder that every node has, or ORG/NAME of a hub")
    of_backend = {name: value for name, value in engine.items() if name in _BACKEND.fields()}
    of_engine = {name: value for name, value in engine.items() if name not in of_backend}
    settings.check_table(_BACKEND, of_backend, where)
    values = settings.check_table(_ENGINE, of_engine, where)
    if engine.get("device", "auto") not in _DEVICES:
        raise ConfigError(
            f"{where}: device is {engine['device']!r}; it must be auto, cpu or cuda: Ray chooses the GPUs"
        )
    # Which device "auto" is depends on the node; a GPU's sizes have room for a CPU's.
    device = "cuda" if values.get("device", "auto") == "auto" else values["device"]
    try:
        made = configs.engine_config({"model_name": "", **values, "device": device})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if made.model.exists():
        _check_model(made, where)


def _check_model(engine: configs.EngineConfig, where: str) -> None:
    """Raises ConfigError if the model at this path, which nodes have too, can't be served so."""
    try:
        opened = ModelFolder.open(engine.model, require_weights=engine.load == "folder")
    except InvalidModelFolder as error:
        said = str(error).removeprefix(f"{engine.model}: ")
        raise ConfigError(f"{where}: model {engine.model}: {said}") from None
    for rule in (too_long, unsuitable_tp, unsuitable_pp):
        if (reason := rule(engine, opened.config)) is not None:
            raise ConfigError(f"{where}: {reason}")


def _with_whole_paths(groups: tuple[Group, ...], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns settings whose paths begin at the root, as nodes have another current folder."""
    known = {name: field for group in groups for name, field in group.fields().items()}
    paths = {name for name in table if name in known and _is_path(known[name]) and isinstance(table[name], str)}
    return {name: _whole(name, value, where) if name in paths else value for name, value in table.items()}


def _is_path(field: FieldInfo) -> bool:
    return pathlib.Path in (field.annotation, *typing.get_args(field.annotation))


def _whole(name: str, text: str, where: str) -> str:
    path = pathlib.Path(text)
    if path.is_absolute() or (name in _OF_A_HUB and not path.exists() and parse_name(text) is not None):
        return text
    if not text or not path.exists():
        raise ConfigError(
            f"{where}: {name}: there is no {text!r} here; what the nodes alone have is named from / on, because they "
            "have another current folder"
        )
    return str(path.absolute())


def _problem(error: pydantic.ValidationError) -> str:
    """Returns the first problem of the deployment's own tables, in a sentence."""
    problem = error.errors(include_url=False)[0]
    *tables, name = [str(part) for part in problem["loc"][:2]] or [""]
    table = f"[{tables[0]}]: " if tables else ""
    if problem["type"] == "extra_forbidden":
        known = (RayConfig.model_fields[tables[0]].annotation if tables else RayConfig).model_fields  # type: ignore[union-attr]
        near = difflib.get_close_matches(name, known, n=1)
        return f"{table}unknown setting {name}" + (f"; the nearest known one is {near[0]}" if near else "")
    rule = rule_of(problem)
    if problem["type"] == "value_error" and not tables:
        return f"[{name}]: {rule}" if name else rule
    value = problem["input"]
    shown = "nan" if isinstance(value, float) and math.isnan(value) else repr(value)[:80]
    return f"{table}{name}: {rule}, not {shown}"
