"""One model of a server: the state that services hear, and its backends while it has some.

Owns what a model and a started backend consist of; when they change is `backend_table`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses

from headrace_protos.control.v1 import control_pb2
from headrace_supervisor.models.model_launches import Launch
from headrace_supervisor.processes.managed_process import ManagedProcess, RestartRule

State = control_pb2.BackendState
RUNNING = (
    control_pb2.BACKEND_STATE_LOADING,
    control_pb2.BACKEND_STATE_READY,
    control_pb2.BACKEND_STATE_UNLOADING,
)


class Backend:
    """One process that serves a model, started."""

    def __init__(self, launch: Launch, rule: RestartRule) -> None:
        self.launch = launch
        self.was_ready = False
        self.process = ManagedProcess(launch.spec, rule, lambda: self.was_ready)
        self.life = self.process.start()


@dataclasses.dataclass
class Entry:
    """One model: its state, and its backends while there are some."""

    name: str
    state: State = control_pb2.BACKEND_STATE_UNLOADED
    reason: str = ""
    # One, or as many as there are replicas, in their order; those that are still to come are
    # missing.
    backends: list[Backend] = dataclasses.field(default_factory=list)
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None

    def message(self) -> control_pb2.ModelBackend:
        """The model's state as services hear it."""
        model = control_pb2.ModelBackend(name=self.name, state=self.state, reason=self.reason)
        if self.backends and self.state in RUNNING:
            first, *others = (backend.launch for backend in self.backends)
            model.engine_address = first.address
            model.replica_addresses.extend(launch.address for launch in others)
            model.memory_bytes = first.claim.budget_bytes
        return model

    def others_live(self, ended: Backend) -> bool:
        """Whether the model is served without this backend."""
        return any(other.was_ready and not other.life.done() for other in self.backends if other is not ended)
