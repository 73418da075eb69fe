"""`headrace serve`, from the first check to the last process ended.

It runs one backend for each model and replica, N services, and telemetry.

Owns the order: model folders, memory and addresses are checked before anything starts; backends and
services start together; the ready line is printed once, when all models named at start are loaded
and every service says SERVING; on SIGTERM, SIGINT or SIGHUP services finish their streams first,
then the backends end, and telemetry last, which hears of all that. What happens when one process
dies or hangs is `managed_process`'s, which models run is `backend_table`'s, workers are the
backend's. Configurations go to the processes as JSON files in the private runtime folder.
"""

from __future__ import annotations

import asyncio
import pathlib
import signal
import sys
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic
import structlog

from headrace_credentials import files as credential_files
from headrace_credentials.files import CredentialError
from headrace_credentials.server_tls import ServerTls, TlsFiles
from headrace_facts.process_age import process_age_s
from headrace_service.auth.api_keys import InvalidKeyFile, KeyFile
from headrace_supervisor import config as configs
from headrace_supervisor import service_settings
from headrace_supervisor.config import ServerConfig
from headrace_supervisor.control_server import ControlServer
from headrace_supervisor.models import memory_sums
from headrace_supervisor.models.backend_table import BackendTable, Probe, initial_names
from headrace_supervisor.models.model_launches import Launches, ModelLaunches
from headrace_supervisor.processes.address import AddressError, check_free, claimed
from headrace_supervisor.processes.early_process import EarlyProcess
from headrace_supervisor.processes.managed_process import ManagedProcess, ProcessGaveUp, ProcessSpec, RestartRule
from headrace_supervisor.processes.readiness import until_serving
from headrace_supervisor.refusals import Refused
from headrace_supervisor.runtime_folder import (
    CONTROL_SOCKET,
    PROBE_SOCKET,
    TELEMETRY_SOCKET,
    RuntimeFolderError,
    runtime_folder,
)

EXIT_REFUSED = 2
# A service needs a moment beyond its own grace to say goodbye.
_SERVICE_MARGIN_S = 5.0
# Telemetry flushes to its file, and twice to its collector: spans and metrics.
_TELEMETRY_MARGIN_S = 3.0
# The imports of all others come first: on two cores its own would cost them half a second. What
# happens before is reported once it listens.
_TELEMETRY_DELAY_S = 2.5

_log = structlog.get_logger(process="supervisor")


class StartRefused(Exception):  # an outcome
    """The server does not start: model folder, address or runtime folder. One line; exit code 2."""


class TelemetryProcess(NamedTuple):
    """The telemetry process, and what it gets in seconds to send what is left."""

    spec: ProcessSpec
    grace_s: float


def serve(config: ServerConfig, early: EarlyProcess | None = None) -> int:
    """Runs a server until a signal ends it. Returns the exit code.

    Args:
        config: the server's.
        early: a backend that waits for what it is to do; None: there is none.

    Raises:
        StartRefused: before anything was started.
    """
    names = initial_names(config.model_name, config.supervisor.load_models)
    try:
        with (
            claimed(config.supervisor.listen) as addresses,
            claimed(config.supervisor.openai_listen) as openai_addresses,
            runtime_folder(configs.runtime_base(config.supervisor)) as folder,
        ):
            check_metrics_address(config)
            check_credentials(config.service)
            launches = ModelLaunches(config, folder, early)
            checked = check_models(launches, names)
            control = f"unix:{folder / CONTROL_SOCKET}"
            telemetry = telemetry_process(config, folder)
            socket = str(folder / TELEMETRY_SOCKET) if telemetry is not None else ""
            grpc_service = service_settings.addressed(config.service, addresses, control, socket)
            services, probes = service_specs(grpc_service, config.supervisor.services, folder)
            if config.openai is not None:
                openai_service = service_settings.addressed(config.openai, openai_addresses, control, socket)
                doors = service_specs(openai_service, config.supervisor.openai_services, folder)
                services, probes = services + doors[0], probes + doors[1]
            supervisor = Supervisor(
                config.supervisor,
                launches,
                names,
                services,
                checked=checked,
                control=control,
                addresses=addresses,
                urls=_urls(config, openai_addresses),
                probes=probes,
                grace_s=config.service.shutdown_grace_s,
                telemetry=telemetry,
            )
            return asyncio.run(supervisor.run())
    except (AddressError, RuntimeFolderError) as error:
        raise StartRefused(str(error)) from None


def check_metrics_address(config: ServerConfig) -> None:
    """Checks that telemetry, which starts last, will be able to listen. Raises AddressError."""
    if config.telemetry is None or not config.telemetry.metrics_listen:
        return
    try:
        check_free(config.telemetry.metrics_listen)
    except AddressError as error:
        raise AddressError(f"metrics_listen: {error}") from None


def check_credentials(service: configs.ServiceConfig) -> None:
    """Checks that every service will be able to use its certificate and keys.

    Raises StartRefused.
    """
    try:
        if service.tls_cert is not None and service.tls_key is not None:
            ServerTls(TlsFiles(service.tls_cert, service.tls_key, service.tls_client_ca), _log)
        if service.keys_file is not None:
            KeyFile.parse(credential_files.read(service.keys_file, private=False))
    except CredentialError as error:
        raise StartRefused(str(error)) from None
    except InvalidKeyFile as error:
        raise StartRefused(f"{service.keys_file}: {error}") from None


def check_models(launches: Launches, names: Sequence[str]) -> dict[str, tuple[memory_sums.Claim, ...]]:
    """Checks, without torch, the models to load at start and the sum of their memory.

    Returns what each of them claims. Raises StartRefused.
    """
    checked: dict[str, tuple[memory_sums.Claim, ...]] = {}
    claims: list[memory_sums.Claim] = []
    try:
        for name in names:
            checked[name] = launches.check(name)
            for claim in checked[name]:
                memory_sums.check(claim, claims, memory_sums.machine_bytes())
                claims.append(claim)
    except Refused as refused:
        raise StartRefused(str(refused)) from None
    return checked


def service_specs(
    service: configs.ServiceConfig, number: int, folder: pathlib.Path
) -> tuple[list[ProcessSpec], list[str]]:
    """Returns so many services of a configuration, and where each answers health checks.

    Their JSON is written to `folder`. Raises RuntimeFolderError.
    """
    kind, module = ("service", "headrace_service") if service.listen else ("openai", "headrace_service.openai")
    specs, probes = [], []
    for index in range(number):
        name = f"{kind}-{index}"
        socket = PROBE_SOCKET.format(index=f"{kind[0]}{index}")
        probes.append(f"unix:{folder / socket}")
        named = service.model_copy(update={"service_name": name, "probe": probes[-1]})
        specs.append(_spec(name, module, named, folder))
    return specs, probes


def _urls(config: ServerConfig, addresses: Sequence[str]) -> list[str]:
    """Returns what clients of OpenAI's HTTP API are given as its base."""
    scheme = "http" if config.openai is None or config.openai.tls_cert is None else "https"
    return [one if one.startswith("unix:") else f"{scheme}://{one}/v1" for one in addresses]


def telemetry_process(config: ServerConfig, folder: pathlib.Path) -> TelemetryProcess | None:
    """Returns the telemetry process of a configuration; None: it is off.

    Its JSON is written to `folder`. Raises RuntimeFolderError.
    """
    if config.telemetry is None:
        return None
    named = config.telemetry.model_copy(update={"telemetry_socket": folder / TELEMETRY_SOCKET})
    spec = _spec("telemetry", "headrace_telemetry", named, folder)
    return TelemetryProcess(spec, 2 * named.telemetry_flush_s + _TELEMETRY_MARGIN_S)


def _spec(name: str, module: str, config: pydantic.BaseModel, folder: pathlib.Path) -> ProcessSpec:
    path = folder / f"{name}.json"
    try:
        path.write_text(config.model_dump_json(), encoding="utf-8")
    except OSError as error:
        raise RuntimeFolderError(f"runtime folder {folder}: {error.strerror}") from None
    return ProcessSpec(name, (sys.executable, "-m", module, "--config-json", str(path)))


class Supervisor:
    """The life of one server's processes.

    Args:
        config: restarts, and whether there is a repository.
        launches: which models there are.
        names: models to load at start. The server ends with one that can't be, before it ever
            served.
        services: processes of the services.
        checked: what those of the names claim that were checked a moment ago.
        control: where the control server listens.
        addresses: the public ones of gRPC.
        urls: those of OpenAI's HTTP API.
        probes: where each service answers health checks, without TLS and keys.
        grace_s: what services get to finish their streams.
        telemetry: who is reported what happens; its end never ends the server, which starts it
            again.
        ready: returns when a service serves, by its probe address.
        probe: questions to backends.
    """

    def __init__(
        self,
        config: configs.SupervisorConfig,
        launches: Launches,
        names: Sequence[str],
        services: Sequence[ProcessSpec],
        *,
        checked: Mapping[str, tuple[memory_sums.Claim, ...]] = types.MappingProxyType({}),
        control: str,
        addresses: Sequence[str],
        urls: Sequence[str] = (),
        probes: Sequence[str],
        grace_s: float,
        telemetry: TelemetryProcess | None = None,
        ready: Callable[[str], Awaitable[None]] = until_serving,
        probe: Probe = Probe(),  # noqa: B008  # immutable
    ) -> None:
        self._rule = RestartRule(config.restart_backoff_s, config.start_attempts, config.hang_timeout_s)
        self._has_repository = config.model_repository is not None
        self._launches = launches
        self._names = names
        self._checked = checked
        self._services = [ManagedProcess(spec, self._rule, lambda: self._served) for spec in services]
        self._telemetry = telemetry and ManagedProcess(
            telemetry.spec, self._rule._replace(start_attempts=None), lambda: self._served
        )
        self._telemetry_runs = False
        self._telemetry_grace_s = telemetry.grace_s if telemetry is not None else 0.0
        self._control = control
        self._addresses = addresses
        self._urls = urls
        self._probes = probes
        self._grace_s = grace_s
        self._ready = ready
        self._probe = probe
        self._served = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Runs until a signal or until a process can't be kept running. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in _ends():
            loop.add_signal_handler(number, self._on_signal)
        table = BackendTable(
            self._launches,
            self._rule,
            ends_server=self._ends_server,
            first=self._names,
            checked=self._checked,
            probe=self._probe,
        )
        server = ControlServer(table)
        await server.start(self._control)
        lives = [process.start() for process in self._services]
        looking = asyncio.create_task(table.keep_looking())
        starting = asyncio.create_task(self._start_telemetry_later())
        announced = asyncio.create_task(self._announce(table))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            # A life ends by itself only when it gave up; an announcement, only when it was made or
            # failed.
            while not (stopped.done() or table.fatal.done() or any(life.done() for life in lives)):
                waiting: set[asyncio.Future[Any]] = {*lives, stopped, table.fatal}
                if not announced.done():
                    waiting.add(announced)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if announced.done() and not table.fatal.done():
                    announced.result()
        except Refused as refused:
            print(f"headrace: {refused}", file=sys.stderr, flush=True)
            return EXIT_REFUSED
        finally:
            for task in (announced, stopped, looking, starting):
                task.cancel()
            await self._end(table)
            await server.stop()
        return _exit_code([*lives, table.fatal])

    def _ends_server(self, name: str) -> bool:
        """Whether the server is of no use without this model.

        It was asked for at start, and never served; or nobody could load it again.
        """
        return name in self._names and (not self._served or not self._has_repository)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _announce(self, table: BackendTable) -> None:
        """Loads the first models, then prints the ready line when every service serves.

        Raises Refused.
        """
        await table.load_first()
        for probe in self._probes:
            await self._ready(probe)
        self._served = True
        self._start_telemetry()
        places = " and ".join(", ".join(some) for some in (self._addresses, self._urls) if some)
        print(f"listening on {places} (ready after {process_age_s():.1f} s; Ctrl-C ends)", flush=True)

    async def _start_telemetry_later(self) -> None:
        await asyncio.sleep(_TELEMETRY_DELAY_S)
        self._start_telemetry()

    def _start_telemetry(self) -> None:
        if self._telemetry is not None and not self._telemetry_runs:
            self._telemetry.start()
            self._telemetry_runs = True

    async def _end(self, table: BackendTable) -> None:
        """Services first: they finish their streams while the backends still compute.

        Telemetry ends last, because it records all other ends.
        """
        grace_s = self._grace_s + _SERVICE_MARGIN_S
        await asyncio.gather(*(service.stop(grace_s, self._hurry) for service in self._services))
        await table.stop_all(self._hurry)
        if self._telemetry is not None and self._telemetry_runs:
            await self._telemetry.stop(self._telemetry_grace_s, self._hurry)


def _ends() -> list[signal.Signals]:
    """Returns the signals that end the server.

    SIGHUP comes when the terminal goes away. Who starts the server with `nohup` wants it to stay.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]


def _exit_code(lives: Sequence[asyncio.Future[None]]) -> int:
    """0 after a signal; the first process that gave up decides otherwise."""
    for failure in [error for life in lives if life.done() and (error := life.exception())]:
        if not isinstance(failure, ProcessGaveUp):
            raise failure
        print(f"headrace: {failure}", file=sys.stderr, flush=True)
        return failure.exit_code
    return 0
