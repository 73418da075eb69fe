"""What actors of a deployment say of themselves, and what is said of all of them.

Owns no behaviour: these cross from process to process.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from headrace_ray.autoscaling import Load

# placing: Ray has not found it a node yet. starting: its process does not serve, or not now.
# draining: it gets no new requests. failed: it gave up, or its actor is gone.
State = Literal["placing", "starting", "serving", "draining", "failed"]


class Report(NamedTuple):
    """What one actor said last.

    Attributes:
        state: what its process does.
        node_id: Ray's id of its node, in hex; "" while it has none.
        address: HOST:PORT at which its process listens; "" before it does.
        load: of an engine that serves; else None.
        why: for people: why it does not serve; "" where that is not known.
        restarts: how often the process ended by itself and was started again.
    """

    state: State
    node_id: str = ""
    address: str = ""
    load: Load | None = None
    why: str = ""
    restarts: int = 0


class Status(NamedTuple):
    """What a deployment is at one moment.

    Attributes:
        name: the deployment's.
        wanted: how many engines it should have.
        engines: the report of each engine by its name.
        services: the report of each service by its node's address.
        takes: the resources of each engine, for people.
        failures: starts of engines that failed in a row, none having served in between.
        why: why the last one failed; "" where none did.
        served: whether any engine ever served.
    """

    name: str
    wanted: int
    engines: dict[str, Report]
    services: dict[str, Report]
    takes: str
    failures: int = 0
    why: str = ""
    served: bool = False
