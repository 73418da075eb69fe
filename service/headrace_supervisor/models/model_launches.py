"""From a model's name to a backend that can be started: its folder, its configuration, its socket.

Owns the checks that cost milliseconds and no torch, and the JSON file that a backend reads. Starts
nothing; which models run is `backend_table`'s.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import NamedTuple, Protocol

from headrace_backend.draft_rules import unsuitable_draft
from headrace_backend.pp_rules import unsuitable_pp
from headrace_backend.quantize_rules import unsuitable_head, unsuitable_quantization
from headrace_backend.start_rules import too_long, unsuitable_device
from headrace_backend.state_rules import unsuitable_states
from headrace_backend.tp_rules import unsuitable_tp
from headrace_hub.resolve import no_folder
from headrace_model_folder.errors import InvalidModelFolder
from headrace_model_folder.folder import ModelFolder
from headrace_supervisor import config as configs
from headrace_supervisor import refusals
from headrace_supervisor.config import ServerConfig
from headrace_supervisor.models.memory_sums import Claim
from headrace_supervisor.processes.early_process import EarlyProcess
from headrace_supervisor.processes.managed_process import ProcessSpec
from headrace_supervisor.refusals import Refused
from headrace_supervisor.repository import ModelRepository, check_name, is_inside
from headrace_supervisor.runtime_folder import ENGINE_SOCKET, TELEMETRY_SOCKET
from headrace_supervisor.settings import ConfigError


class Launch(NamedTuple):
    """A backend that can be started.

    Attributes:
        spec: its process.
        address: where it will listen.
        claim: the memory that it may take.
        refusal_file: where it leaves the reason if it refuses to start.
    """

    spec: ProcessSpec
    address: str
    claim: Claim
    refusal_file: pathlib.Path


class Launches(Protocol):
    """The launches of backends."""

    @property
    def default(self) -> str:
        """Name of the default model."""

    def names(self) -> tuple[str, ...]:
        """Names of all models that could be loaded now."""

    def check(self, name: str, memory_bytes: int = 0) -> tuple[Claim, ...]:
        """Returns what each backend of a model would claim, after all checks without torch.

        Raises Refused.
        """

    def prepare(self, name: str, memory_bytes: int, replica: int) -> Launch:
        """Returns the launch of one backend of a model, which was checked, its files written.

        Raises Refused.
        """


class ModelLaunches:
    """Launches of the default model and of the models of a repository."""

    def __init__(self, config: ServerConfig, runtime_folder: pathlib.Path, early: EarlyProcess | None = None) -> None:
        """Launches in a folder.

        Args:
            config: the server's.
            runtime_folder: where configurations and sockets lie.
            early: a backend that waits for what it is to do, for the first launch; None: there is
                none.
        """
        self._config = config
        self._early = early
        self._runtime_folder = runtime_folder
        repository = config.supervisor.model_repository
        self._telemetry_socket = str(runtime_folder / TELEMETRY_SOCKET) if config.telemetry is not None else ""
        self._repository = ModelRepository(repository) if repository is not None else None
        self._replicas = config.supervisor.replicas
        self._indices = itertools.count()

    @property
    def default(self) -> str:
        """Name of the default model."""
        return self._config.model_name

    def names(self) -> tuple[str, ...]:
        """Names of the default model and of the repository's models, in order."""
        found = self._repository.names() if self._repository is not None else ()
        return tuple(sorted({self.default, *found}))

    def check(self, name: str, memory_bytes: int = 0) -> tuple[Claim, ...]:
        """Returns what each backend of a model would claim of the memory.

        Args:
            name: the model's.
            memory_bytes: its budget; 0: what the settings say.

        Raises:
            Refused: INVALID_ARGUMENT, NOT_FOUND, or FAILED_PRECONDITION with what is wrong in the
                folder, or in settings that do not suit it.
        """
        engine = self._backend(name, memory_bytes, index=0, replica=0).engine
        try:
            opened = ModelFolder.open(engine.model, require_weights=engine.load == "folder")
            if opened.token_table is None:
                raise InvalidModelFolder(f"has no {opened.tokenizer_name}, which a service needs")
        except InvalidModelFolder as error:
            said = f"{str(error).removeprefix(f'{engine.model}: ')}{no_folder(engine.model)}"
            raise refusals.failed_precondition(f"model {self._shown(name, engine.model)}: {said}") from None
        reasons = (
            unsuitable_device(engine.device),
            too_long(engine, opened.config),
            unsuitable_quantization(engine, opened.config, opened.gguf_file),
            unsuitable_head(engine, opened),
            unsuitable_states(engine, opened.config),
            unsuitable_tp(engine, opened.config),
            unsuitable_pp(engine, opened.config),
            unsuitable_draft(engine, opened),
        )
        for reason in filter(None, reasons):
            raise refusals.failed_precondition(f"model {self._shown(name, engine.model)}: {reason}")
        return tuple(_claim(name, engine, replica) for replica in range(self._replicas))

    def prepare(self, name: str, memory_bytes: int, replica: int) -> Launch:
        """Writes the configuration of one backend for a model, whose folder `check` has opened.

        Raises Refused where the settings have no such model, do not suit it, or can't be written.
        """
        index = next(self._indices)
        backend = self._backend(name, memory_bytes, index, replica)
        assert backend.refusal_file is not None
        path = self._runtime_folder / f"backend-{index}.json"
        try:
            path.write_text(backend.model_dump_json(), encoding="utf-8")
        except OSError as error:
            raise refusals.unavailable(f"model {name}: its configuration can't be written: {error.strerror}") from None
        process = "backend" if self._repository is None else f"backend {name}"
        process += f" (replica {replica})" if self._replicas > 1 else ""
        workers = ("--early-workers", str(backend.engine.ranks_per_host))
        command = (sys.executable, "-m", "headrace_backend", *workers, "--config-json", str(path))
        early, self._early = self._early, None
        spec = ProcessSpec(process, command, early)
        # The engine's device is the replica's already.
        return Launch(spec, backend.listen, _claim(name, backend.engine, 0), backend.refusal_file)

    def _backend(self, name: str, memory_bytes: int, index: int, replica: int) -> configs.BackendConfig:
        folder = self._folder(name)
        if not is_inside(folder / configs.MODEL_FILE, folder):
            raise refusals.failed_precondition(
                f"model {name}: {configs.MODEL_FILE} is a link that leads out of its folder"
            )
        try:
            backend = configs.model_backend(
                self._config,
                name,
                folder,
                memory_bytes=memory_bytes,
                listen=f"unix:{self._runtime_folder / ENGINE_SOCKET.format(index=index)}",
                refusal_file=self._runtime_folder / f"refusal-{index}.json",
                replica=replica,
                telemetry_socket=self._telemetry_socket,
            )
            if replica:
                # The first one's device is as it was written: it may leave the choice to the
                # worker.
                engine = backend.engine.model_copy(update={"device": device_of(backend.engine, replica)})
                backend = backend.model_copy(update={"engine": engine})
            return backend
        except ConfigError as error:
            reason = str(error).replace(f"{folder}/", "")
            raise refusals.failed_precondition(f"model {self._shown(name, folder)}: {reason}") from None

    def _folder(self, name: str) -> pathlib.Path:
        if name == self.default:
            return self._config.backend.engine.model
        check_name(name)
        if self._repository is None:
            raise refusals.failed_precondition(
                f"model {name!r} can't be loaded: this server has no model repository (--model-repository)"
            )
        return self._repository.find(name)

    def _shown(self, name: str, folder: pathlib.Path) -> str:
        """How a model is named to whoever asked.

        By its path where that is what was typed, else without the server's paths.
        """
        return str(folder) if self._repository is None else name


def _claim(name: str, engine: configs.EngineConfig, replica: int) -> Claim:
    return Claim(name, device_of(engine, replica), int(engine.memory_budget), ranks=engine.num_ranks)


def device_of(engine: configs.EngineConfig, replica: int) -> str:
    """Returns the device on which a model's backend begins.

    GPUs of replicas follow each other, a CPU they share.
    """
    device = engine.expected_device()
    kind, _, index = device.partition(":")
    # An index that is none is refused by the worker.
    return f"{kind}:{int(index) + replica * engine.num_ranks}" if index.isdecimal() else device


def read_refusal(path: pathlib.Path) -> Refused | None:
    """Returns why a backend refused to start, if it left a word."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    refuse = refusals.exhausted if said["does_not_fit"] else refusals.failed_precondition
    return refuse(str(said["reason"]))
