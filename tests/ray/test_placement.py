"""Which node gets the next engine, and how many there is room for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_ray import placement
from headrace_ray.placement import Node

DEMAND = {"CPU": 4.0, "GPU": 2.0}
nodes = st.lists(
    st.builds(
        lambda cpus, gpus: {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)},
        st.integers(0, 64),
        st.integers(0, 8),
    ),
    max_size=8,
).map(lambda totals: [Node(f"n{index}", "10.0.0.1", total) for index, total in enumerate(totals)])


@settings(max_examples=examples(200))
@given(nodes, st.integers(0, 40))
def test_engines_fill_what_there_is_evenly_and_no_more(nodes: list[Node], wanted: int) -> None:
    placed: list[str] = []
    for _ in range(wanted):
        node_id = placement.choose(nodes, DEMAND, placed)
        if node_id is None:
            break
        # No node with room has fewer engines than the one that was chosen.
        fewest = min(
            placed.count(node.node_id) for node in nodes if placement.room(node, DEMAND) > placed.count(node.node_id)
        )
        assert placed.count(node_id) == fewest
        placed.append(node_id)
    held = {node.node_id: placement.room(node, DEMAND) for node in nodes}
    assert all(placed.count(node_id) <= held[node_id] for node_id in placed)
    assert len(placed) == min(wanted, sum(held.values()))


def test_the_ranks_of_an_engine_take_gpus_of_one_node() -> None:
    assert placement.demand(4, 2.0, {"fast_disk": 1.0}, on_gpus=True) == {"CPU": 2.0, "GPU": 4.0, "fast_disk": 1.0}
    assert placement.demand(4, 2.0, {}, on_gpus=False) == {"CPU": 2.0}
    eight = [Node("a", "10.0.0.1", {"CPU": 64.0, "GPU": 3.0}), Node("b", "10.0.0.2", {"CPU": 64.0, "GPU": 3.0})]
    assert placement.choose(eight, placement.demand(4, 1.0, {}, on_gpus=True), []) is None
    assert placement.choose(eight, placement.demand(3, 1.0, {}, on_gpus=True), ["a"]) == "b"


def test_engines_of_nodes_that_are_lost_count_for_none() -> None:
    living = [Node("b", "10.0.0.2", {"CPU": 8.0})]
    assert placement.choose(living, {"CPU": 4.0}, ["a", "a", "b"]) == "b"
    assert placement.choose(living, {"CPU": 4.0}, ["a", "b", "b"]) is None


def test_a_cluster_has_gpus_if_a_node_has() -> None:
    assert not placement.has_gpus([Node("a", "10.0.0.1", {"CPU": 8.0, "GPU": 0.0})])
    assert placement.has_gpus([Node("a", "10.0.0.1", {"CPU": 8.0}), Node("b", "10.0.0.2", {"GPU": 1.0})])
    assert placement.shown({"CPU": 1.5, "GPU": 2.0}) == "2 GPU, 1.5 CPU"
