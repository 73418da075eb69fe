"""The nodes of the cluster, and the one on which this process runs, as Ray knows them."""

from __future__ import annotations

import ray

from headrace_ray.placement import Node


def living() -> list[Node]:
    """Returns the nodes that live, as far as Ray knows."""
    return [
        Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def own() -> Node:
    """Returns the node of the actor that asks."""
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in living() if node.node_id == own)
