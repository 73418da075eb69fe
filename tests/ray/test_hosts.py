"""An engine whose ranks are on two nodes of a real Ray cluster, with the demo model on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.ports import free_port
from tests.support.processes import wait_until
from tests.support.ray_cluster import NEEDS_RAY, RayCluster, deployment_tables, ray_cluster
from tests.support.rpc import generate, greedy
from tests.support.running_server import RunningServer

from headrace_ray import config

# Settings and placement are in the files beside this one, every day; agents in tests/backend/hosts.
pytestmark = [pytest.mark.slow, NEEDS_RAY, pytest.mark.timeout(900)]
AGENT = "headrace_backend.rank_agent"
PROMPT = greedy("The river", 24)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(cpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    engine = {"pp": 2, "hosts": 2, "dtype": "fp32"}
    return deployment_tables(free_port(), engines={"min": 1, "max": 1, "drain_s": 5.0}, engine=engine)


@pytest.fixture(scope="module")
def deployment(cluster: RayCluster, tables: dict[str, Any]) -> Iterator[Any]:
    """The deployment, once a second node has given it room."""
    from headrace_ray import deployment

    with pytest.raises(TimeoutError, match="no node has room for 1 CPU on each of 2 nodes"):
        deployment.up(config.parse(tables), cluster.address, wait_s=15.0)
    cluster.add_node()
    deployment.up(config.parse(tables), wait_s=400.0)
    yield deployment
    deployment.down("demo")
    wait_until(lambda: not cluster.ours(AGENT), 60.0, "no agent is left")


def address(deployment: Any) -> str:
    """A service that serves."""

    def serving() -> list[str]:
        return [each.address for each in deployment.status("demo").services.values() if each.state == "serving"]

    return str(wait_until(serving, 300.0, "a service that serves")[0])


def answers(deployment: Any, shared_server: RunningServer) -> None:
    expected = generate(shared_server.address, PROMPT).tokens
    assert generate(address(deployment), PROMPT).tokens == expected and len(expected[0]) == 24


def test_its_answers_are_those_of_one_rank(deployment: Any, cluster: RayCluster, shared_server: RunningServer) -> None:
    answers(deployment, shared_server)
    assert len(cluster.actors("Engine")) == len(cluster.actors("Ranks")) == len(cluster.ours(AGENT)) == 1


def test_an_agent_that_dies_is_started_again_and_joins(
    deployment: Any, cluster: RayCluster, shared_server: RunningServer
) -> None:
    [agent] = cluster.ours(AGENT)
    engines = set(deployment.status("demo").engines)
    agent.kill()
    wait_until(lambda: any(each.pid != agent.pid for each in cluster.ours(AGENT)), 60.0, "another agent")
    answers(deployment, shared_server)
    assert set(deployment.status("demo").engines) == engines


def test_an_engine_that_loses_an_actor_is_replaced_as_a_whole(
    deployment: Any, cluster: RayCluster, shared_server: RunningServer
) -> None:
    engines = set(deployment.status("demo").engines)
    [part] = cluster.actors("Ranks")
    part.kill()
    wait_until(lambda: engines.isdisjoint(deployment.status("demo").engines), 120.0, "another engine")
    answers(deployment, shared_server)
    assert len(cluster.actors("Engine")) == len(cluster.actors("Ranks")) == 1
