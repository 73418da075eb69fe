"""One actor of a deployment as the controller sees it: asked again and again how it is, removed.

Owns the questions that are under way, so that a node that hangs holds up nothing, and the actor's
name, by which a controller that is started again finds it. Every actor is detached: it outlives
whoever started it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

import ray
import ray.util
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headrace_ray.reports import Report

NAMESPACE = "headrace"
_SILENCE_S = 15.0
_NODE_LABEL = "ray.io/node-id"
Answer = TypeVar("Answer")


class Member:
    """An actor of the deployment.

    Attributes:
        name: its name in the namespace, DEPLOYMENT/MEMBER.
        actor: Ray's handle of it.
        group: its placement group; None: it reserves nothing.
        target: id of the node that it is meant for; "": any.
        report: what it said last.
        has_answered: whether it ever said anything.
        has_served: whether it ever said that it serves.
        is_gone: whether it is dead for good; `report.why` says how.
        since_s: when it was made or found.
        leaving_since_s: when it was decided that it ends; None: it stays.
    """

    def __init__(self, name: str, actor: Any, group: Any = None, target: str = "") -> None:
        self.name = name
        self.actor = actor
        self.group = group
        self.target = target
        self.report = Report("placing")
        self.has_answered = self.has_served = self.is_gone = False
        self.since_s = self._heard_s = time.monotonic()
        self.leaving_since_s: float | None = None
        self._question: Any = None
        self._stopping: Any = None

    @property
    def node_id(self) -> str:
        """The node on which it is, or is meant to be."""
        return self.report.node_id or self.target

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping is not None

    def look(self) -> None:
        """Takes its newest report, if it has come, and asks for the next one."""
        if self._question is not None and not _is_ready(self._question):
            if self.has_answered and time.monotonic() - self._heard_s > _SILENCE_S:
                self.report = self.report._replace(state="starting", load=None, why="does not answer")
            return
        if self._question is not None:
            self._take_answer()
        if not self.is_gone:
            self._question = self.actor.report.remote()

    def has_room(self) -> bool:
        """Whether Ray has reserved what it takes."""
        return self.group is None or placement_group_table(self.group).get("state") == "CREATED"

    def stop(self, *arguments: float) -> None:
        """Asks it to end its process."""
        self._stopping = self.actor.stop.remote(*arguments)

    def has_stopped(self) -> bool:
        """Whether its process has ended, as it was asked to, or with its node."""
        return self._stopping is not None and _is_ready(self._stopping)

    def wait_stopped(self, timeout_s: float) -> None:
        """Waits until its process has ended as it was asked to; at most `timeout_s` seconds."""
        ray.wait([self._stopping], timeout=timeout_s)

    def remove(self) -> None:
        """Ends the actor, and its process with it, and gives its resources back."""
        remove(self.actor, self.group)

    def _take_answer(self) -> None:
        try:
            self.report = ray.get(self._question)
        except ActorUnavailableError:
            return
        except RayActorError as error:
            self.is_gone = True
            self.report = self.report._replace(state="failed", load=None, why=_first_line(error))
            return
        self._heard_s = time.monotonic()
        self.has_answered = True
        self.has_served = self.has_served or self.report.state == "serving"


def engine(name: str, kind: Any, spec: Any, demand: Mapping[str, float], node_id: str | None) -> Member:
    """Starts an engine's actor in a placement group of its own.

    Args:
        name: of the actor and of the group.
        kind: the actor's class.
        spec: what it is made from.
        demand: what the group reserves on one node.
        node_id: that node; None: Ray finds one, or waits until there is one.
    """
    selector = [{_NODE_LABEL: node_id}] if node_id is not None else None
    group = placement_group(
        [dict(demand)], strategy="STRICT_PACK", name=name, lifetime="detached", bundle_label_selector=selector
    )
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    others = {resource: amount for resource, amount in demand.items() if resource not in ("CPU", "GPU")}
    takes = {"num_cpus": demand["CPU"], "num_gpus": demand.get("GPU", 0), "resources": others}
    actor = _detached(name, kind, spec, scheduling_strategy=strategy, **takes)
    return Member(name, actor, group, node_id or "")


def service(name: str, kind: Any, spec: Any, node_id: str) -> Member:
    """Starts a service's actor on a node; it reserves nothing there."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return Member(name, _detached(name, kind, spec, scheduling_strategy=strategy, num_cpus=0), target=node_id)


def found(prefix: str) -> list[Member]:
    """Returns the members whose names begin so, which somebody else has started."""
    members = []
    for name in names(prefix):
        actor = actor_of(name)
        if actor is not None:
            members.append(Member(name, actor, group_of(name)))
    return members


def names(prefix: str) -> list[str]:
    """Returns the names of living actors of Headrace that begin so, in order."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in listed if each["namespace"] == NAMESPACE and each["name"].startswith(prefix))


def actor_of(name: str) -> Any:
    """Returns the handle of an actor of Headrace; None: there is none of this name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def group_of(name: str) -> Any:
    """Returns the placement group of a name; None: there is none."""
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def remove(actor: Any, group: Any) -> None:
    """Ends an actor for good and removes its placement group; either may be None or gone."""
    if actor is not None:
        ray.kill(actor, no_restart=True)
    if group is not None:
        remove_placement_group(group)


def _detached(name: str, kind: Any, spec: Any, **options: Any) -> Any:
    """Starts an actor, and its process."""
    remote = ray.remote(kind)
    actor = remote.options(name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=0, **options).remote(spec)
    actor.start.remote()
    return actor


def _is_ready(question: Any) -> bool:
    ready, _ = ray.wait([question], timeout=0)
    return bool(ready)


def _first_line(error: RayError) -> str:
    """Returns what matters of Ray's many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__
