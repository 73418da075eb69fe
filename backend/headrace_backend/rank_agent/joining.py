"""Whether this host can do what an engine asks of it, and how its workers are started then.

Owns the checks on this side: the device and the folders are there, the
configuration can be read, the model has the engine's revision.
"""

from __future__ import annotations

import socket

import pydantic

from headrace_backend.config import EngineConfig
from headrace_backend.device_defaults import expects_gpu
from headrace_backend.draft_rules import draft_revision
from headrace_backend.rank_agent.config import RanksConfig
from headrace_backend.server.hosts.ranks_service import PROTOCOL_VERSION
from headrace_backend.server.model_facts import model_limits
from headrace_backend.server.workers.host_ranks import WorkerLaunch
from headrace_backend.start_rules import unsuitable_device
from headrace_facts.version import server_version
from headrace_model_folder import InvalidModelFolder, ModelFolder, revisions
from headrace_protos.ranks.v1 import ranks_pb2
from headrace_request.request import LAYOUT


class HostRefused(Exception):  # the reason, in one line
    """This host can be none of the engine's; trying again does not help."""


def check_host(config: RanksConfig) -> None:
    """Checks that this host has the device and the folders that it was given.

    What is in the folders is read when the engine has said what it needs of them, and what is wrong
    with it is reported to the engine.

    Raises:
        HostRefused: There is no such device, folder or file here.
    """
    reason = unsuitable_device(config.device)
    if reason is not None:
        raise HostRefused(reason)
    for name, path in (("model", config.model), ("draft_model", config.draft_model)):
        if path is not None and not path.exists():
            raise HostRefused(f"{name}: {path}: no such folder or file")


def hello(config: RanksConfig) -> ranks_pb2.Hello:
    """What this host says of itself first."""
    return ranks_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        version=server_version(),
        request_layout=LAYOUT,
        host=socket.gethostname(),
        device_kind="cuda" if expects_gpu(config.device) else "cpu",
    )


def checked_launch(config: RanksConfig, task: ranks_pb2.Task, command: tuple[str, ...]) -> WorkerLaunch:
    """How this host's workers are started. Reads the model's files, which may take a while.

    Raises:
        HostRefused: The engine's model is another, or its configuration is not for this host.
    """
    try:
        engine = EngineConfig.model_validate_json(task.engine_config)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise HostRefused(f"its configuration: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    own = {name: getattr(config, name) for name in ("model", "draft_model", "device", "worker_threads", "kernel_cache")}
    engine = engine.model_copy(update=own)
    try:
        folder = ModelFolder.open(config.model, require_weights=engine.load == "folder")
    except InvalidModelFolder as error:
        raise HostRefused(f"model folder: {error}") from None
    # A folder may have another name on each host.
    if not revisions.are_alike(folder.revision, task.revision):
        raise HostRefused(f"its model is {folder.revision}, and the engine's is {task.revision}")
    _check_draft(engine, task.draft_revision)
    limits = model_limits(engine, folder)
    return WorkerLaunch(
        engine,
        limits.max_model_len,
        command,
        vocab_size=limits.vocab_size,
        num_cache_groups=len(limits.cache_groups),
    )


def _check_draft(engine: EngineConfig, wanted: str) -> None:
    """Raises HostRefused unless this host has the engine's draft model, or neither has one."""
    try:
        found = draft_revision(engine)
    except InvalidModelFolder as error:
        raise HostRefused(f"draft_model: {error}") from None
    if not revisions.are_alike(found, wanted):
        raise HostRefused(f"its draft_model is {found or 'not set'}, and the engine's is {wanted or 'not set'}")
