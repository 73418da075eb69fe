"""Entry of the backend process.

It reads the configuration, checks what can be checked without torch, and joins the parts.

Order of a start: configuration, socket, model folder (each refused with one line and exit code 2
before anything heavy happens), then the gRPC server, so that services can connect and see
"loading", then the workers (`backend`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence

import pydantic
import uvloop

import headrace_facts.plain_structlog  # noqa: F401  # before anything that imports structlog
from headrace_backend.config import BackendConfig, EngineConfig
from headrace_backend.draft_rules import draft_revision, unsuitable_draft
from headrace_backend.engine.engine import Engine
from headrace_backend.pp_rules import unsuitable_pp
from headrace_backend.quantize_rules import unsuitable_head, unsuitable_quantization
from headrace_backend.server.backend import Backend
from headrace_backend.server.engine_loop import EngineLoop
from headrace_backend.server.health import Health
from headrace_backend.server.hosts.host_table import HostTable
from headrace_backend.server.hosts.ranks_service import RanksService
from headrace_backend.server.lifetime import (
    ExitCode,
    ListenAddress,
    StartRefused,
    claimed_socket,
    parse_listen,
    read_secret,
)
from headrace_backend.server.logs import configure_logs, get_logger
from headrace_backend.server.model_facts import ModelFacts, model_limits, text_bytes
from headrace_backend.server.socket_tls import read_tls
from headrace_backend.server.streams.engine_service import EngineService
from headrace_backend.server.telemetry import Teller, new_step_log, open_feed
from headrace_backend.server.workers import early_workers as early
from headrace_backend.server.workers.early_workers import EarlyWorkers
from headrace_backend.server.workers.host_ranks import WorkerLaunch, plan_ring_bytes
from headrace_backend.server.workers.worker_process import DEFAULT_WORKER_COMMAND
from headrace_backend.server.workers.worker_supervision import ModelRefused
from headrace_backend.start_rules import too_long, unsuitable_device
from headrace_backend.state_rules import reuses_prefixes, unsuitable_states
from headrace_backend.structured_output.compiler import grammar_compiler
from headrace_backend.structured_output.mask_pool import MaskPool
from headrace_backend.tp_rules import unsuitable_tp
from headrace_credentials.server_tls import ServerTls
from headrace_facts import pulse
from headrace_model_folder import InvalidModelFolder, MeasuredLoss, ModelFolder, read_measured_loss

_MAX_CONFIG_BYTES = 1 << 20


def main(
    arguments: Sequence[str],
    worker_command: tuple[str, ...] = DEFAULT_WORKER_COMMAND,
    early_workers: EarlyWorkers | None = None,
) -> int:
    """Runs the backend until a signal ends it.

    Args:
        arguments: Command line without the program.
        worker_command: What starts a worker; its own arguments are appended.
        early_workers: Workers of that command that wait already; None: there are none.

    Returns:
        An `ExitCode`.
    """
    parser = argparse.ArgumentParser(prog="headrace_backend", description="Headrace's backend process.")
    parser.add_argument(
        "--config-json", required=True, metavar="PATH", help="BackendConfig as JSON; - reads standard input"
    )
    parser.add_argument("--outlive-parent", action="store_true", help="do not die with the parent process")
    parser.add_argument(
        early.FLAG,
        type=int,
        default=0,
        metavar="N",
        help="workers to start first of all, which wait for what they are to do",
    )
    pulse.add_argument(parser)
    options = parser.parse_args(arguments)
    config, early_workers = None, early_workers or EarlyWorkers()
    try:
        config = _read_config(options.config_json)
        configure_logs(config.log_format, config.log_level)
        address = parse_listen(config.listen)
        _check_hosts(config.engine, address)
        tls = read_tls(config, address)
        secret = read_secret(config.token_file, address, has_certificates=tls is not None)
        with claimed_socket(address):
            folder = _open_model(config.engine)
            backend = uvloop.run(
                _run(config, address, tls, secret, folder, worker_command, early_workers, options.pulse_fd)
            )
    except (StartRefused, ModelRefused) as refused:
        if not _noted_refusal(config, refused):
            print(f"headrace backend: {refused}", file=sys.stderr, flush=True)
        return ExitCode.REFUSED
    finally:
        early_workers.close()
    return backend


def _check_hosts(config: EngineConfig, address: ListenAddress) -> None:
    """Raises StartRefused if other hosts have ranks, and can't reach the backend."""
    if config.hosts > 1 and address.socket_path is not None:
        raise StartRefused(
            f"hosts is {config.hosts}, and listen is {address.target!r}, which other hosts do not reach: "
            "HOST:PORT works"
        )


def _noted_refusal(config: BackendConfig | None, refused: StartRefused | ModelRefused) -> bool:
    """Tells whoever started this process why, in a form that a program reads.

    Returns:
        Whether the reason was written, so that it reaches the operator from there.
    """
    if config is None or config.refusal_file is None:
        return False
    does_not_fit = isinstance(refused, ModelRefused) and refused.does_not_fit
    try:
        config.refusal_file.write_text(json.dumps({"reason": str(refused), "does_not_fit": does_not_fit}))
    except OSError:
        return False
    return True


def _read_config(source: str) -> BackendConfig:
    try:
        with contextlib.ExitStack() as stack:
            file = sys.stdin.buffer if source == "-" else stack.enter_context(pathlib.Path(source).open("rb"))
            data = file.read(_MAX_CONFIG_BYTES)
        return BackendConfig.model_validate_json(data)
    except OSError as error:
        raise StartRefused(f"configuration {source}: {error.strerror}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "JSON"
        raise StartRefused(f"configuration {source}: {field}: {first['msg']}") from error


def _open_model(config: EngineConfig) -> ModelFolder:
    try:
        folder = ModelFolder.open(config.model, require_weights=config.load == "folder")
    except InvalidModelFolder as error:
        raise StartRefused(f"model folder: {error}") from error
    reasons = (
        unsuitable_device(config.device),
        too_long(config, folder.config),
        unsuitable_quantization(config, folder.config, folder.gguf_file),
        unsuitable_head(config, folder),
        unsuitable_states(config, folder.config),
        unsuitable_tp(config, folder.config),
        unsuitable_pp(config, folder.config),
        unsuitable_draft(config, folder),
    )
    for reason in filter(None, reasons):
        raise StartRefused(reason)
    if not reuses_prefixes(config, folder.config.description) and config.enable_prefix_cache is None:
        get_logger().info(
            "prefix caching is off: the model has recurrent layers, and state_checkpoints is 0",
            architecture=folder.config.architecture,
        )
    if folder.config.names_own_code:
        get_logger().warning(
            "config.json names code of the model folder's own (auto_map): it is not run, the model is served as its "
            "architecture",
            architecture=folder.config.architecture,
        )
    return folder


def _measured_loss(config: EngineConfig, folder: ModelFolder) -> MeasuredLoss | None:
    """Reads what the folder's report says that quantizing cost, if those weights are served.

    An invalid report does not keep the weights from being served.
    """
    if config.load != "folder":
        return None
    try:
        return read_measured_loss(folder)
    except InvalidModelFolder as error:
        get_logger().warning("what quantizing cost is not reported", why=str(error))
        return None


async def _run(
    config: BackendConfig,
    address: ListenAddress,
    tls: ServerTls | None,
    secret: bytes | None,
    folder: ModelFolder,
    worker_command: tuple[str, ...],
    early_workers: EarlyWorkers,
    pulse_fd: int | None,
) -> ExitCode:
    pulse.start(pulse_fd)
    limits = model_limits(config.engine, folder)
    clock = time.monotonic_ns
    engine = Engine(config.engine, limits, text_bytes(folder), clock, steps=new_step_log(clock))
    engine_loop = EngineLoop(engine, clock, MaskPool(limits.vocab_size))
    health = Health()
    facts = ModelFacts(config.engine, folder, limits, _measured_loss(config.engine, folder))
    teller = None
    if config.telemetry_socket:
        feed = open_feed(config.telemetry_socket, facts.describe().name, config.replica, engine.steps)
        teller = Teller(feed, engine, facts)
    service = EngineService(
        engine_loop,
        health,
        facts.describe,
        clock,
        secret=secret,
        max_message_bytes=config.max_message_bytes,
        log_ttl_s=config.engine.log_ttl_s,
        teller=teller,
        grammars=grammar_compiler(folder),
    )
    shows_bars = config.log_format == "console" and sys.stderr.isatty()
    launch = WorkerLaunch(
        config.engine,
        limits.max_model_len,
        worker_command,
        shows_bars=shows_bars,
        vocab_size=limits.vocab_size,
        num_cache_groups=len(limits.cache_groups),
        early_workers=early_workers,
    )
    hosts = None
    if config.engine.hosts > 1:
        table = HostTable(config.engine, config.hosts_timeout_s)
        drafts = draft_revision(config.engine)
        hosts = RanksService(config.engine, folder.revision, table, secret, _plan_bytes(config, launch), drafts)
    backend = Backend(config, address, tls, engine_loop, health, facts, service, teller, hosts)
    return await backend.run(launch)


def _plan_bytes(config: BackendConfig, launch: WorkerLaunch) -> int:
    """Bytes of step plans that may wait for another host.

    Raises:
        StartRefused: A plan may be larger than a message.
    """
    ring_bytes = plan_ring_bytes(launch)
    if ring_bytes // 2 > config.max_message_bytes:
        raise StartRefused(
            f"max_message_bytes is {config.max_message_bytes}, and a step plan may have {ring_bytes // 2} bytes, which "
            "cross to other hosts as one message"
        )
    return ring_bytes
