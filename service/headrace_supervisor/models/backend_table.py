"""The models of a server and their backends: which there are, which run, and how they come and go.

Owns the states that services watch (`control_server` tells them), the managed processes of each
loaded model (several where it has replicas), and the order of loading and unloading. Loads run one
at a time, because a model measures its device's free memory while it loads. What a launch consists
of is `model_launches`'s, restarts are `managed_process`'s.

    load    LOADING from the moment it is asked for -> its turn -> checks and memory sum, or back to
            what it was -> one replica after the other: process starts -> its engine says serving ->
            READY, or FAILED
    unload  UNLOADING -> no request left, or grace passed -> processes ended -> UNLOADED
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import grpc
import structlog

from headrace_protos.control.v1 import control_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_supervisor import refusals
from headrace_supervisor.models import memory_sums
from headrace_supervisor.models.memory_sums import Claim
from headrace_supervisor.models.model_entry import RUNNING, Backend, Entry
from headrace_supervisor.models.model_launches import Launch, Launches, read_refusal
from headrace_supervisor.processes import engine_probe
from headrace_supervisor.processes.managed_process import ProcessGaveUp, RestartRule
from headrace_supervisor.refusals import Refused

# What a backend gets after SIGTERM; it has nothing to finish by then.
BACKEND_GRACE_S = 10.0
_RESCAN_S = 2.0

_log = structlog.get_logger(process="supervisor")


class _UnloadedMeanwhile(Refused):
    """A load that an operator's unload ended."""

    def __init__(self, name: str) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, f"model {name} was unloaded while it loaded")


class Probe(NamedTuple):
    """Questions to a backend at an address."""

    until_serving: Callable[[str], Awaitable[engine_pb2.EngineModel]] = engine_probe.until_serving
    until_idle: Callable[[str], Awaitable[None]] = engine_probe.until_idle


class BackendTable:
    """The models of one server, and the backends that serve them.

    Args:
        launches: which models there are and how their backends start.
        rule: when a backend that died is started again.
        ends_server: asked, by name, when a backend can't be kept running: whether the server ends
            with it.
        first: names of the models that `load_first` loads; until it has, services learn that the
            server starts.
        checked: what those of `first` claim that were checked just before, by name; they are not
            checked again.
        probe: questions to backends.
        machine_bytes: memory of the machine, for models on the CPU.
    """

    def __init__(
        self,
        launches: Launches,
        rule: RestartRule,
        *,
        ends_server: Callable[[str], bool],
        first: Sequence[str] = (),
        checked: Mapping[str, tuple[Claim, ...]] = types.MappingProxyType({}),
        probe: Probe = Probe(),  # noqa: B008  # immutable
        machine_bytes: int | None = None,
    ) -> None:
        self._launches = launches
        self._rule = rule
        self._ends_server = ends_server
        self._probe = probe
        self._machine_bytes = memory_sums.machine_bytes() if machine_bytes is None else machine_bytes
        self._entries: dict[str, Entry] = {}
        self._first = first
        self._checked = checked
        self._starting = bool(first)
        self._draining = False
        self._ending = False
        self._one_load = asyncio.Lock()
        self._change = asyncio.Event()
        # Set with ProcessGaveUp when the server must end.
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take_names(launches.names())

    # -- what there is

    def state(self) -> control_pb2.ServerState:
        """Everything that services need to know."""
        return control_pb2.ServerState(
            models=[self._entries[name].message() for name in sorted(self._entries)],
            default_model=self._launches.default,
            draining=self._draining,
            starting=self._starting,
        )

    async def states(self) -> AsyncIterator[control_pb2.ServerState]:
        """Yields the server's state now, and again whenever it has changed."""
        while True:
            change = self._change
            yield self.state()
            await change.wait()

    def set_draining(self, draining: bool) -> None:
        """Whether services take no new generations."""
        self._draining = draining
        self._changed()

    async def keep_looking(self) -> None:
        """Finds folders that came to the repository or left it, every two seconds.

        Never returns.
        """
        while True:
            await asyncio.sleep(_RESCAN_S)
            self._take_names(await asyncio.to_thread(self._launches.names))

    def _take_names(self, found: Sequence[str]) -> None:
        names = set(found)
        idle = {name for name, entry in self._entries.items() if entry.state not in RUNNING and entry.loading is None}
        gone = idle - names
        for name in gone:
            del self._entries[name]
        new = names - set(self._entries)
        self._entries.update((name, Entry(name)) for name in new)
        if gone or new:
            self._changed()

    # -- coming

    async def load_first(self) -> None:
        """Loads the models of the start, in their order, and tells services when all serve.

        One that an operator unloads meanwhile is left out.

        Raises:
            Refused: one of them can't be loaded, and why.
        """
        entries = [self._entries.setdefault(name, Entry(name)) for name in self._first]
        for load in [self._begin(entry, 0, self._checked.get(entry.name)) for entry in entries]:
            try:
                await asyncio.shield(load)
            except _UnloadedMeanwhile as unloaded:
                _log.warning(f"the server starts without a model: {unloaded}")
        self._starting = False
        self._changed()

    async def load(self, name: str, memory_bytes: int = 0) -> tuple[control_pb2.ModelBackend, bool]:
        """Starts a model's backends and returns when they serve.

        A caller who leaves does not end the load.

        Args:
            name: the model's.
            memory_bytes: its memory budget; 0: what the settings say.

        Returns:
            The model, and whether it served already.

        Raises:
            Refused: it can't be loaded, and why.
        """
        entry = self._entries.get(name)
        if entry is not None and self._serves(entry):
            return entry.message(), True
        if entry is None or entry.loading is None:
            # Refused before the model has a state: a name that is none must not appear in lists.
            await asyncio.to_thread(self._launches.check, name, memory_bytes)
            entry = self._entries.setdefault(name, Entry(name))
        # Another's load may have ended during the check.
        if entry.loading is not None or not self._serves(entry):
            await asyncio.shield(entry.loading or self._begin(entry, memory_bytes))
        return entry.message(), False

    def _serves(self, entry: Entry) -> bool:
        """Whether there is nothing to load. Raises Refused: UNAVAILABLE, not at this moment."""
        if self._ending:
            raise refusals.unavailable("the server is shutting down")
        if entry.state == control_pb2.BACKEND_STATE_UNLOADING:
            raise refusals.unavailable(f"model {entry.name} is being unloaded")
        return entry.state == control_pb2.BACKEND_STATE_READY

    def _begin(self, entry: Entry, memory_bytes: int, claims: tuple[Claim, ...] | None = None) -> asyncio.Task[None]:
        """Announces a model as LOADING, and has it loaded when those before it are.

        `claims` is what it claims, where that was checked already.
        """
        before = entry.state, entry.reason
        self._set(entry, control_pb2.BACKEND_STATE_LOADING)
        loading = self._load(entry, memory_bytes, claims, *before)
        load = entry.loading = asyncio.create_task(loading, name=f"load {entry.name}")
        # Its callers may all have left by the time it fails; the state says so too.
        load.add_done_callback(lambda load: load.cancelled() or load.exception())
        return load

    async def _load(
        self,
        entry: Entry,
        memory_bytes: int,
        claims: tuple[Claim, ...] | None,
        state_before: control_pb2.BackendState,
        reason_before: str,
    ) -> None:
        try:
            async with self._one_load:
                await self._start_all(entry, memory_bytes, claims)
        except Exception as error:
            if _is_still_loading(entry):
                if entry.backends:
                    await self._fail(entry, str(error))
                else:
                    # Refused before anything started: the caller is reported, and the model is what
                    # it was.
                    self._set(entry, state_before, reason_before)
            raise
        finally:
            if entry.loading is asyncio.current_task():
                entry.loading = None

    async def _start_all(self, entry: Entry, memory_bytes: int, claims: tuple[Claim, ...] | None) -> None:
        """Starts the model's backends, each when the one before it serves.

        The model is ready with the last.

        Raises Refused.
        """
        began_s = time.monotonic()
        _check_still_loading(entry)
        loaded = [backend.launch.claim for e in self._entries.values() if e.state in RUNNING for backend in e.backends]
        if claims is None:
            claims = await asyncio.to_thread(self._launches.check, entry.name, memory_bytes)
        for claim in claims:
            memory_sums.check(claim, loaded, self._machine_bytes)
            loaded.append(claim)
        for replica in range(len(claims)):
            launch = await asyncio.to_thread(self._launches.prepare, entry.name, memory_bytes, replica)
            _check_still_loading(entry)
            backend = self._start(entry, launch)
            await self._until_ready(entry, backend)
        self._set(entry, control_pb2.BACKEND_STATE_READY)
        _log.info("model loaded", model=entry.name, seconds=round(time.monotonic() - began_s, 2))

    def _start(self, entry: Entry, launch: Launch) -> Backend:
        backend = Backend(launch, self._rule)
        entry.backends.append(backend)
        backend.life.add_done_callback(lambda _: self._life_ended(entry, backend))
        self._changed()
        return backend

    async def _until_ready(self, entry: Entry, backend: Backend) -> None:
        """Waits until the engine serves.

        Raises Refused if its process gave up, or was unloaded meanwhile.
        """
        ready = asyncio.ensure_future(self._probe.until_serving(backend.launch.address))
        try:
            await asyncio.wait({ready, backend.life}, return_when=asyncio.FIRST_COMPLETED)
            if backend.life.done() or entry.state != control_pb2.BACKEND_STATE_LOADING:
                raise self._why_ended(entry, backend)
            _note_device(backend, ready.result())
        finally:
            ready.cancel()
        backend.was_ready = True

    # -- going

    async def unload(self, name: str, grace_s: float) -> None:
        """Ends a model's backends, after its requests or the grace time.

        A caller who leaves does not stop it.

        Raises:
            Refused: NOT_FOUND: it is not served.
        """
        entry = self._entries.get(name)
        if entry is None or entry.state not in RUNNING:
            raise refusals.not_found(f"model {name[:128]!r} is not loaded")
        if entry.unloading is None:
            entry.unloading = asyncio.create_task(self._unload(entry, grace_s), name=f"unload {name}")
        await asyncio.shield(entry.unloading)

    async def _unload(self, entry: Entry, grace_s: float) -> None:
        was_ready = entry.state == control_pb2.BACKEND_STATE_READY
        self._set(entry, control_pb2.BACKEND_STATE_UNLOADING)
        hurry = asyncio.Event()
        if was_ready and not await self._idle_within([each.launch.address for each in entry.backends], grace_s):
            hurry.set()
        await _stop(entry.backends, BACKEND_GRACE_S, hurry)
        # A load that still waits for its turn finds that it is not the entry's any more.
        entry.backends, entry.unloading, entry.loading = [], None, None
        self._set(entry, control_pb2.BACKEND_STATE_UNLOADED)
        _log.info("model unloaded", model=entry.name)

    async def _idle_within(self, addresses: Sequence[str], grace_s: float) -> bool:
        """Whether the backends had no request left before the grace time passed."""
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*map(self._probe.until_idle, addresses))
        except TimeoutError:
            return False
        return True

    async def stop_all(self, hurry: asyncio.Event) -> None:
        """Ends every backend, and takes no request from then on."""
        self._ending = True
        for entry in self._entries.values():
            for task in (entry.unloading, entry.loading):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Refused):
                        await task
        running = [backend for entry in self._entries.values() for backend in entry.backends]
        await _stop(running, BACKEND_GRACE_S, hurry)

    # -- inside

    def _life_ended(self, entry: Entry, backend: Backend) -> None:
        """A process that gave up takes model or server with it; not one that was ended."""
        error = None if backend.life.cancelled() else backend.life.exception()
        if error is None or backend not in entry.backends:
            return
        reason = str(self._why_ended(entry, backend))
        if not isinstance(error, ProcessGaveUp):
            self._end_server(error)
        elif backend.was_ready and entry.others_live(backend):
            _log.error("a replica is lost", model=entry.name, reason=reason)
        elif self._ends_server(entry.name):
            self._end_server(ProcessGaveUp(reason, error.exit_code))
        elif entry.loading is None and entry.unloading is None:
            self._failed(entry, reason)

    def _end_server(self, error: BaseException) -> None:
        if not self.fatal.done():
            self.fatal.set_exception(error)

    def _why_ended(self, entry: Entry, backend: Backend) -> Refused:
        """The reason of a backend that ended before it was ready, or after."""
        error = backend.life.exception() if backend.life.done() else None
        if error is None or backend not in entry.backends:
            return _UnloadedMeanwhile(entry.name)
        # Which of several it was: a further one may ask for a GPU that nobody named.
        index = entry.backends.index(backend)
        who = (
            f"model {entry.name}, replica {index} on {backend.launch.claim.device}" if index else f"model {entry.name}"
        )
        said = read_refusal(backend.launch.refusal_file)
        if said is not None:
            return Refused(said.code, f"{who}: {said}")
        return refusals.failed_precondition(f"{who}: {error}")

    async def _fail(self, entry: Entry, reason: str) -> None:
        """Ends what runs of a model that will not serve."""
        await _stop(entry.backends, 0.0, asyncio.Event())
        # Nobody waits for an unload of what failed meanwhile.
        if entry.state == control_pb2.BACKEND_STATE_LOADING:
            self._failed(entry, reason)

    def _failed(self, entry: Entry, reason: str) -> None:
        if not self.fatal.done():  # else the server's last line says it
            _log.error("model failed", model=entry.name, reason=reason)
        entry.backends = []
        self._set(entry, control_pb2.BACKEND_STATE_FAILED, reason)

    def _set(self, entry: Entry, state: control_pb2.BackendState, reason: str = "") -> None:
        entry.state, entry.reason = state, reason
        self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _note_device(backend: Backend, model: engine_pb2.EngineModel) -> None:
    """From now on sums are of the device that it really is, with the memory that it really has."""
    claim = backend.launch.claim
    device = model.device.split(" ")[0] or claim.device
    claim = claim._replace(device=device, device_bytes=model.memory.device_bytes)
    backend.launch = backend.launch._replace(claim=claim)


async def _stop(backends: Sequence[Backend], grace_s: float, hurry: asyncio.Event) -> None:
    """Ends processes, all at the same time."""
    await asyncio.gather(*(backend.process.stop(grace_s, hurry) for backend in backends))


def _is_still_loading(entry: Entry) -> bool:
    """Whether the load that asks, a task, is still the model's.

    An operator's unload ends it, and another may have begun since.
    """
    return entry.state == control_pb2.BACKEND_STATE_LOADING and entry.loading is asyncio.current_task()


def _check_still_loading(entry: Entry) -> None:
    """Raises _UnloadedMeanwhile if the load that asks is not the model's any more."""
    if not _is_still_loading(entry):
        raise _UnloadedMeanwhile(entry.name)


def initial_names(default: str, further: Sequence[str]) -> tuple[str, ...]:
    """Models to load at start, each once, the default model first."""
    return tuple(dict.fromkeys((default, *further)))
