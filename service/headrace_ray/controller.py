"""The controller of one deployment: an actor that keeps engines and services as they are wanted.

Owns the loop that compares what there is with what should be, and what follows: engines are placed,
replaced, added and given up, every node has a service, services learn of engines. It keeps nothing
that it could not find again: when its node is lost, Ray starts it on another, and it takes over the
actors that it finds by their names. Streams do not pass through it, nor wait for it.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time

from headrace_ray import member, nodes, placement
from headrace_ray.authority import Authority
from headrace_ray.autoscaling import Autoscaler
from headrace_ray.config import RayConfig
from headrace_ray.engine_actor import Engine, EngineSpec
from headrace_ray.member import Member, Part
from headrace_ray.placement import Node
from headrace_ray.ranks_actor import Ranks, RanksSpec
from headrace_ray.reports import Status
from headrace_ray.service_actor import Service, ServiceSpec

_LOOK_S = 0.5
# An engine whose node has no room after all is placed wherever there is some.
_PLACING_S = 10.0
# A controller that was just started waits so long for what it found to speak.
_HEARING_S = 15.0
# Services have left an engine by then.
_LEAVING_S = 2.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_log = logging.getLogger("headrace.ray")


class _Pauses:
    """The pauses after failures of one kind, which grow until something serves."""

    def __init__(self) -> None:
        self.failures = 0
        self.why = ""
        self._not_before_s = 0.0

    def failed(self, now_s: float, why: str) -> None:
        """Notes a failure."""
        self.failures += 1
        self.why = why
        self._not_before_s = now_s + min(_FIRST_PAUSE_S * 2 ** (self.failures - 1), _LONGEST_PAUSE_S)

    def served(self) -> None:
        """Notes that something serves."""
        self.failures, self._not_before_s = 0, 0.0

    def is_over(self, now_s: float) -> bool:
        """Whether the next attempt may be made."""
        return now_s >= self._not_before_s


class Controller:
    """Keeps a deployment. Its methods are called by Ray, the loop runs in a thread."""

    def __init__(self, config: RayConfig, authority: Authority) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        self._config = config
        self._authority = authority
        self._engines = member.found(f"{config.name}/engine-", config.hosts - 1)
        # Until all of them have spoken, nobody knows where they are: services keep the engines that
        # they have, and no engine is added or given up.
        self._to_hear = list(self._engines)
        self._services = {each.name: each for each in member.found(f"{config.name}/service-")}
        # The engines that each service was given last, by its name.
        self._given: dict[str, tuple[str, ...]] = {}
        self._scaler = Autoscaler(config.policy, len(self._engines))
        self._engine_pauses = _Pauses()
        self._service_pauses: dict[str, _Pauses] = collections.defaultdict(_Pauses)
        self._served = bool(self._engines)
        self._last_number = max((_number(each.name) for each in self._engines), default=0)
        living = nodes.living()
        on_gpus = config.device == "cuda" or (config.device == "auto" and placement.has_gpus(living))
        self._device = "cuda" if on_gpus else "cpu"
        self._demand = placement.demand(
            config.ranks_per_host, config.engines.cpus, config.engines.resources, on_gpus=on_gpus
        )
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def deployed(self) -> tuple[RayConfig, Authority]:
        """Returns what the deployment was made from."""
        return self._config, self._authority

    def status(self) -> Status:
        """Returns what there is now."""
        with self._lock:
            return Status(
                self._config.name,
                self._scaler.wanted,
                {_short(each.name): each.report for each in self._engines},
                {each.report.address or _short(each.name): each.report for each in self._services.values()},
                placement.shown(self._demand, self._config.hosts),
                self._engine_pauses.failures,
                self._engine_pauses.why,
                self._served,
            )

    def stop(self) -> None:
        """Ends services, then engines, each with its own grace time, and forgets them."""
        self._ending.set()
        self._thread.join()
        self._end(list(self._services.values()))
        self._end(self._engines, 0.0)
        self._services, self._engines = {}, []

    def _end(self, members: list[Member], *arguments: float) -> None:
        # What has not answered yet has no process, or will not hear.
        ended = [each for each in members if each.has_answered and not each.is_gone]
        for each in ended:
            each.stop(*arguments)
        for each in ended:
            # One whose node is lost is waited for until Ray says so.
            each.wait_stopped(600.0)
        for each in members:
            each.remove()

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            with self._lock:
                if self._ending.is_set():
                    return
                try:
                    self._look(time.monotonic())
                except Exception:
                    # What Ray raises while a node or its own head comes and goes.
                    _log.exception("a look at the deployment failed; the next one begins anew")

    def _look(self, now_s: float) -> None:
        """One comparison of what there is with what should be."""
        living = nodes.living()
        for each in (*self._engines, *self._services.values()):
            each.look()
        self._drop_lost_engines(now_s)
        self._end_leaving(now_s)
        self._to_hear = [each for each in self._to_hear if _is_awaited(each, now_s) and each in self._engines]
        staying = [each for each in self._engines if each.leaving_since_s is None]
        self._note_serving(staying)
        loads = [each.report.load for each in staying if each.report.state == "serving" and each.report.load]
        before = self._scaler.wanted
        wanted = self._scaler.decide(now_s, loads)
        if wanted != before:
            _log.info("%d engines are wanted, before %d", wanted, before)
        if not self._to_hear:
            self._match(now_s, living, staying, wanted)
        self._place_elsewhere(now_s)
        self._keep_services(now_s, living)
        if not self._to_hear:
            self._inform_services()

    # -- engines

    def _match(self, now_s: float, living: list[Node], staying: list[Member], wanted: int) -> None:
        """Has as many engines stay as are wanted."""
        if len(staying) > wanted:
            self._give_up(now_s, staying, len(staying) - wanted)
        elif len(staying) < wanted and self._engine_pauses.is_over(now_s):
            self._add(living, wanted - len(staying))

    def _drop_lost_engines(self, now_s: float) -> None:
        for each in [each for each in self._engines if each.loss]:
            why = each.loss
            _log.warning("%s is replaced: %s", each.name, why)
            self._drop(each)
            # One that served is replaced at once; one that never did may have no reason to do
            # better next time.
            if not each.has_served:
                self._engine_pauses.failed(now_s, why)

    def _end_leaving(self, now_s: float) -> None:
        for each in list(self._engines):
            if each.leaving_since_s is None and each.report.state == "draining":
                # An earlier controller gave it up.
                each.leaving_since_s = now_s
            if each.leaving_since_s is None:
                continue
            if each.has_stopped() or not each.has_answered:
                self._drop(each)
            elif not each.is_stopping and now_s - each.leaving_since_s >= _LEAVING_S:
                each.stop(self._config.engines.drain_s)

    def _note_serving(self, staying: list[Member]) -> None:
        if any(each.report.state == "serving" for each in staying):
            self._served = True
        if staying and all(each.has_served for each in staying):
            self._engine_pauses.served()

    def _give_up(self, now_s: float, staying: list[Member], number: int) -> None:
        """Has engines end: first those that do not serve, then those with least to do."""

        def work(each: Member) -> tuple[bool, int]:
            load = each.report.load
            return each.report.state == "serving", load.running + load.waiting_tokens if load else 0

        for each in sorted(staying, key=work)[:number]:
            _log.info("%s is given up", each.name)
            each.leaving_since_s = now_s

    def _add(self, living: list[Node], number: int) -> None:
        for _ in range(number):
            placed = [each.node_id for each in self._engines]
            # Of several nodes Ray finds such as are free together.
            is_ours = self._config.hosts == 1
            self._launch(placement.choose(living, self._demand, placed) if is_ours else None)

    def _launch(self, node_id: str | None) -> None:
        self._last_number += 1
        name = f"{self._config.name}/engine-{self._last_number}"
        settings = {**self._config.engine, "device": self._device}
        spec = EngineSpec(name.replace("/", " "), settings, self._authority, self._config.engines.ports)
        ranks = functools.partial(RanksSpec, f"{spec.name} ranks", settings, self._authority)
        parts = [Part(Ranks, ranks)] * (self._config.hosts - 1)
        self._engines.append(member.engine(name, Engine, spec, self._demand, node_id, parts))
        _log.info("%s is placed on %s", name, node_id or "whichever node gets room")

    def _place_elsewhere(self, now_s: float) -> None:
        """Places engines anew that waited long for the node that was chosen for them."""
        for each in list(self._engines):
            is_late = now_s - each.since_s > _PLACING_S
            if is_late and each.target and not each.has_answered and not each.has_room():
                _log.info("%s finds no room on %s", each.name, each.target)
                self._drop(each)
                self._launch(None)

    def _drop(self, engine: Member) -> None:
        engine.remove()
        self._engines.remove(engine)

    # -- services

    def _keep_services(self, now_s: float, living: list[Node]) -> None:
        """Has each living node have one service, and no other."""
        wanted = {f"{self._config.name}/service-{node.node_id}": node for node in living}
        for each in list(self._services.values()):
            failed = each.is_gone or each.report.state == "failed"
            if each.report.state == "serving":
                self._service_pauses[each.name].served()
            if not failed and each.name in wanted:
                continue
            if failed and each.name in wanted:
                _log.warning("%s is replaced: %s", each.name, each.report.why)
                self._service_pauses[each.name].failed(now_s, each.report.why)
            each.remove()
            del self._services[each.name]
            self._given.pop(each.name, None)
        for name, node in wanted.items():
            if name not in self._services and self._service_pauses[name].is_over(now_s):
                shown = f"{self._config.name} service {node.address}"
                spec = ServiceSpec(shown, self._config.service, self._authority, self._config.services.port)
                self._services[name] = member.service(name, Service, spec, node.node_id)

    def _inform_services(self) -> None:
        """Gives each service the engines that there are, if they have changed."""
        used = [each for each in self._engines if each.has_served and each.leaving_since_s is None]
        addresses = tuple(sorted(each.report.address for each in used))
        for each in self._services.values():
            if each.has_answered and self._given.get(each.name) != addresses:
                each.actor.follow.remote(addresses)
                self._given[each.name] = addresses


def _is_awaited(engine: Member, now_s: float) -> bool:
    """Whether an engine that was found may still say where it is."""
    return not engine.has_answered and now_s - engine.since_s < _HEARING_S


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _short(name: str) -> str:
    return name.rpartition("/")[2]
