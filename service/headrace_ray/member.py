"""One actor of a deployment as the controller sees it: asked again and again how it is, removed.

Owns the questions that are under way, so that a node that hangs holds up nothing, and the actor's
name, by which a controller that is started again finds it. Every actor is detached: it outlives
whoever started it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

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
        parts: of an engine, the actors of its ranks on further nodes.
    """

    def __init__(
        self, name: str, actor: Any, group: Any = None, target: str = "", parts: Sequence[Member] = ()
    ) -> None:
        self.parts = parts
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

    @property
    def loss(self) -> str:
        """Why it has to be replaced; "": it has not."""
        for each in (self, *self.parts):
            if each.is_gone or each.report.state == "failed":
                return each.report.why or "it ended"
        return ""

    def look(self) -> None:
        """Takes its newest report, if it has come, and asks for the next one; so of its parts."""
        for each in self.parts:
            each.look()
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
        """Asks it to end its process; those of its parts end when it is removed."""
        self._stopping = self.actor.stop.remote(*arguments)

    def has_stopped(self) -> bool:
        """Whether its process has ended, as it was asked to, or with its node."""
        return self._stopping is not None and _is_ready(self._stopping)

    def wait_stopped(self, timeout_s: float) -> None:
        """Waits until its process has ended as it was asked to; at most `timeout_s` seconds."""
        ray.wait([self._stopping], timeout=timeout_s)

    def remove(self) -> None:
        """Ends the actor and its parts, with their processes, and gives their resources back."""
        for each in self.parts:
            each.remove()
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


class Part(NamedTuple):
    """An actor of an engine on a further node, before it is made.

    Attributes:
        kind: its class.
        spec: what it is made from, given the handle of the engine's own actor.
    """

    kind: Any
    spec: Callable[[Any], Any]


def engine(
    name: str, kind: Any, spec: Any, demand: Mapping[str, float], node_id: str | None, parts: Sequence[Part] = ()
) -> Member:
    """Starts an engine's actors in a placement group of its own.

    Args:
        name: of the actor and of the group.
        kind: the class of the actor that has the backend.
        spec: what that is made from.
        demand: what the group reserves on each node.
        node_id: the node; None: Ray finds one, or so many, or waits until there are.
        parts: actors on further nodes, each on one of its own.
    """
    selector = [{_NODE_LABEL: node_id}] if node_id is not None else None
    group = placement_group(
        [dict(demand) for _ in range(1 + len(parts))],
        strategy="STRICT_SPREAD" if parts else "STRICT_PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=selector,
    )
    actor = _detached(name, kind, spec, **_in_bundle(group, 0, demand))
    made = []
    for index, part in enumerate(parts, 1):
        of_part = part_name(name, index)
        made.append(
            Member(of_part, _detached(of_part, part.kind, part.spec(actor), **_in_bundle(group, index, demand)))
        )
    return Member(name, actor, group, node_id or "", made)


def part_name(engine_name: str, index: int) -> str:
    """Returns the name of an engine's actor on a further node; it begins as no engine's does."""
    deployment, _, short = engine_name.rpartition("/")
    return f"{deployment}/ranks-{index}-of-{short}"


def _in_bundle(group: Any, index: int, demand: Mapping[str, float]) -> dict[str, Any]:
    others = {resource: amount for resource, amount in demand.items() if resource not in ("CPU", "GPU")}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    takes = {"num_cpus": demand["CPU"], "num_gpus": demand.get("GPU", 0), "resources": others}
    return {"scheduling_strategy": strategy, **takes}


def service(name: str, kind: Any, spec: Any, node_id: str) -> Member:
    """Starts a service's actor on a node; it reserves nothing there."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return Member(name, _detached(name, kind, spec, scheduling_strategy=strategy, num_cpus=0), target=node_id)


def found(prefix: str, num_parts: int = 0) -> list[Member]:
    """Returns the members whose names begin so, which somebody else has started.

    Args:
        prefix: what their names begin with.
        num_parts: how many parts each of them has; one that lacks some is gone as a whole.
    """
    members = []
    for name in names(prefix):
        actor = actor_of(name)
        if actor is None:
            continue
        parts = [part_name(name, index) for index in range(1, num_parts + 1)]
        actors = [actor_of(part) for part in parts]
        member = Member(name, actor, group_of(name), "", [*map(Member, parts, actors)])
        for part in member.parts:
            part.is_gone = part.actor is None
        members.append(member)
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
