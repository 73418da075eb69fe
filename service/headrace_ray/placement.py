"""What an engine takes of a node, and which node gets the next one.

Owns the arithmetic alone; Ray reserves. An engine is one bundle of resources, because its ranks
exchange partial sums in every layer, or one on each of several nodes where it is to be on so many.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

Resources = Mapping[str, float]


class Node(NamedTuple):
    """A node of the cluster that lives.

    Attributes:
        node_id: Ray's id of it, in hex.
        address: its IP address in the cluster.
        total: its resources, used or not, by Ray's names.
    """

    node_id: str
    address: str
    total: Resources


def has_gpus(nodes: Collection[Node]) -> bool:
    """Returns whether any node has a GPU."""
    return any(node.total.get("GPU", 0) > 0 for node in nodes)


def demand(ranks: int, cpus: float, others: Resources, *, on_gpus: bool) -> dict[str, float]:
    """Returns an engine's resources of a node: a GPU for each rank there where it is on GPUs."""
    gpus = {"GPU": float(ranks)} if on_gpus else {}
    return {"CPU": cpus, **gpus, **others}


def room(node: Node, demand: Resources) -> int:
    """Returns how many engines a node holds that runs nothing else."""
    return min(int(node.total.get(name, 0) / amount) for name, amount in demand.items() if amount > 0)


def choose(nodes: Sequence[Node], demand: Resources, placed: Sequence[str]) -> str | None:
    """Returns the node for one more engine: of those with room, the one with fewest engines.

    Of equals it is the one with most room, so that a lost node takes few engines along.

    Args:
        nodes: the living nodes.
        demand: an engine's resources; one of them at least is above 0.
        placed: the node of each engine that there is.

    Returns:
        A node's id; None: no node has room.
    """
    left = {node.node_id: room(node, demand) - placed.count(node.node_id) for node in nodes}
    open_nodes = [node.node_id for node in nodes if left[node.node_id] > 0]
    return min(open_nodes, key=lambda node: (placed.count(node), -left[node], node), default=None)


def shown(demand: Resources, hosts: int = 1) -> str:
    """Returns resources for people, as in "2 GPU, 4 CPU" or "2 GPU, 4 CPU on each of 2 nodes"."""
    each = ", ".join(f"{amount:g} {name}" for name, amount in sorted(demand.items(), reverse=True))
    return each if hosts == 1 else f"{each} on each of {hosts} nodes"
