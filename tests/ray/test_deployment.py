"""A deployment on a real Ray cluster of two nodes, with the demo model on the CPU.

What is streamed, cancelled and timed out goes through services on both nodes; then engines, actors,
the controller and a whole node are killed, engines are added and given up, and in the end nothing
is left. The tests follow each other on one cluster, which takes half a minute to start. What needs
no Ray is in the files beside this one.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from tests.support.ports import free_port
from tests.support.processes import wait_until
from tests.support.ray_cluster import NEEDS_RAY, RayCluster, deployment_tables, ray_cluster
from tests.support.rpc import Transcript, connected, generate, greedy, idle_load, read

from headrace.v1 import inference_pb2
from headrace_ray import config

pytestmark = [pytest.mark.slow, NEEDS_RAY, pytest.mark.timeout(900)]

PROMPTS = [f"{beginning} river" for beginning in ("The", "A", "My", "Our", "This", "One")]
LONG = 200
ENGINES = {"min": 2, "max": 2, "drain_s": 60.0}
# Few rows, so that requests wait.
ENGINE = {"max_num_seqs": 4}


def num_rows(address: str) -> int:
    """Rows of all engines that a service knows."""
    with connected(address) as stub:
        load = stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=60)
    return int(load.max_running_sequences)


@dataclasses.dataclass
class Running:
    """A cluster of two nodes and the deployment on it."""

    cluster: RayCluster
    second: Any
    tables: dict[str, Any]
    deployment: Any

    @property
    def status(self) -> Any:
        return self.deployment.status("demo")

    @property
    def services(self) -> list[str]:
        """Addresses of the services that serve, the second node's first (it is on loopback)."""
        return sorted(each.address for each in self.status.services.values() if each.state == "serving")

    @property
    def engines(self) -> dict[str, Any]:
        return {name: each for name, each in self.status.engines.items() if each.state == "serving"}

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return wait_until(condition, 300.0, f"{what}: {self.status}")

    def up(self, **tables: Any) -> Any:
        """Has the deployment be as these tables say."""
        self.tables = {**self.tables, **tables}
        return self.deployment.up(config.parse(self.tables), wait_s=300.0)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    from headrace_ray import deployment

    with ray_cluster(cpus=2) as cluster:
        second = cluster.add_node()
        tables = deployment_tables(free_port(), engines=ENGINES, engine=ENGINE)
        deployment.up(config.parse(tables), cluster.address, wait_s=300.0)
        yield Running(cluster, second, tables, deployment)


@pytest.fixture(scope="module")
def golden(running: Running) -> dict[str, list[int]]:
    """The tokens that each prompt gets, undisturbed."""
    running.until(lambda: len(running.services) == 2 and len(running.engines) == 2, "both nodes serve")
    return Streams(running.services[0]).tokens()


def process_of(running: Running, module: str, address: str) -> psutil.Process:
    """The process of ours that listens at an address."""
    port = int(address.rpartition(":")[2])
    for process in running.cluster.ours(module):
        if any(each.laddr.port == port for each in process.net_connections(kind="tcp") if each.status == "LISTEN"):
            return process
    raise AssertionError(f"nothing of {module} listens at {address}")


class Streams:
    """Generations of all prompts at one service, read in threads.

    Args:
        address: of the service.
        tail: what all prompts end with.
    """

    def __init__(self, address: str, tail: str = "") -> None:
        self.transcripts = {prompt: Transcript() for prompt in PROMPTS}
        self.failures: list[str] = []
        self.threads = [
            threading.Thread(target=self._read, args=(address, prompt, tail), daemon=True) for prompt in PROMPTS
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, address: str, prompt: str, tail: str) -> None:
        try:
            with connected(address) as stub:
                for response in stub.Generate(
                    inference_pb2.GenerateRequest(spec=greedy(prompt + tail, LONG)), timeout=600
                ):
                    self.transcripts[prompt].take(response.event)
        except grpc.RpcError as error:
            self.failures.append(str(error))

    def have_begun(self) -> bool:
        """Whether tokens of some have come, and no generation has ended."""
        assert not any(transcript.done for transcript in self.transcripts.values())
        return sum(bool(transcript.tokens.get(0)) for transcript in self.transcripts.values()) >= 2

    def tokens(self) -> dict[str, list[int]]:
        """Waits for the ends."""
        for thread in self.threads:
            thread.join(600)
        assert not self.failures
        return {prompt: transcript.tokens[0] for prompt, transcript in self.transcripts.items()}

    def num_resumed(self) -> int:
        return sum(
            any(event.HasField("resumed") for event in transcript.events) for transcript in self.transcripts.values()
        )


def test_every_node_has_a_service_and_engines_are_spread_over_nodes(running: Running) -> None:
    status = running.until(lambda: len(running.engines) == 2 and running.status, "both engines serve")
    assert len({each.node_id for each in status.engines.values()}) == 2
    running.until(lambda: len(running.services) == 2, "both services serve")
    assert status.takes == "1 CPU" and not status.failures
    answers = {tuple(generate(address, greedy("The river", 16)).tokens[0]) for address in running.services}
    assert len(answers) == 1


def test_tokens_come_one_by_one_and_a_reader_that_leaves_ends_its_generation(running: Running) -> None:
    for address in running.services:
        with connected(address) as stub:
            stream = stub.Generate(inference_pb2.GenerateRequest(spec=greedy("The river", 1900)), timeout=600)
            transcript = Transcript()
            for response in stream:
                transcript.take(response.event)
                if transcript.tokens.get(0):
                    break
            # It goes on: the first token did not wait for the last one.
            assert stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=60).running_sequences == 1
            stream.cancel()
        wait_until(lambda address=address: idle_load(address), what="the generation ends with its reader")


def test_a_deadline_ends_a_generation(running: Running) -> None:
    (address, *_) = running.services
    with connected(address) as stub, pytest.raises(grpc.RpcError) as ended:
        read(stub.Generate(inference_pb2.GenerateRequest(spec=greedy("The river", 1900)), timeout=1))
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    wait_until(lambda: idle_load(address), what="nothing runs after the deadline")


def test_bad_input_is_refused_as_everywhere(running: Running) -> None:
    with connected(running.services[0]) as stub, pytest.raises(grpc.RpcError) as refused:
        read(stub.Generate(inference_pb2.GenerateRequest(spec=greedy("x", 0)), timeout=60))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_engines_answer_nobody_without_a_certificate_of_the_deployment(running: Running) -> None:
    for engine in running.engines.values():
        with grpc.insecure_channel(engine.address) as plain, pytest.raises(grpc.RpcError):
            plain.unary_unary("/headrace_engine.v1.EngineService/Connect")(b"", timeout=20)


def test_a_backend_that_dies_is_started_again_and_its_streams_go_on(
    running: Running, golden: dict[str, list[int]]
) -> None:
    before = running.engines
    streams = Streams(running.services[0])
    wait_until(streams.have_begun, what="streams have begun")
    name, engine = min(before.items())
    process_of(running, "headrace_backend", engine.address).kill()
    assert streams.tokens() == golden
    after = running.until(lambda: len(running.engines) == 2 and running.engines, "both engines serve again")
    assert after.keys() == before.keys()
    assert after[name].address == engine.address and after[name].restarts == 1


def test_an_engine_whose_actor_dies_is_replaced(running: Running, golden: dict[str, list[int]]) -> None:
    before = running.engines
    name, engine = max(before.items())
    streams = Streams(running.services[0])
    wait_until(streams.have_begun, what="streams have begun")
    actor = process_of(running, "headrace_backend", engine.address).parent()
    assert actor is not None
    actor.kill()
    assert streams.tokens() == golden
    after = running.until(lambda: len(running.engines) == 2 and running.engines, "two engines serve again")
    assert name not in after and len(after.keys() - before.keys()) == 1


def test_a_controller_that_dies_takes_over_what_it_finds(running: Running) -> None:
    before, services = running.engines, running.services
    pids = {process.pid for process in running.cluster.ours("headrace_backend")}
    streams = Streams(running.services[0])
    wait_until(streams.have_begun, what="streams have begun")
    (controller,) = running.cluster.actors("Controller")
    controller.kill()
    streams.tokens()
    assert streams.num_resumed() == 0
    running.until(lambda: running.engines.keys() == before.keys(), "the same engines are known")
    assert running.services == services
    assert {process.pid for process in running.cluster.ours("headrace_backend")} == pids


def test_up_again_changes_nothing_and_other_settings_are_refused(running: Running) -> None:
    before = running.engines
    running.up()
    assert running.engines.keys() == before.keys()
    other = {**running.tables, "engine": {**running.tables["engine"], "block_size": 32}}
    with pytest.raises(running.deployment.DeploymentError, match="demo runs with other settings, of which only"):
        running.deployment.up(config.parse(other))
    with pytest.raises(running.deployment.DeploymentError, match="no deployment nothing; it has demo"):
        running.deployment.status("nothing")


def test_engines_are_added_while_tokens_wait_and_given_up_when_they_have_nothing_to_do(running: Running) -> None:
    eager = {"waiting_tokens": 20, "up_after_s": 0.5, "down_after_s": 4.0}
    running.up(engines={**ENGINES, "min": 1, "max": 2}, autoscaling=eager)
    running.until(lambda: running.status.wanted == 1 and len(running.status.engines) == 1, "one engine is given up")
    (address, *_) = running.services
    streams: list[Streams] = []

    def crowded() -> bool:
        # New ones until the second engine is wanted.
        if not streams or sum(thread.is_alive() for each in streams for thread in each.threads) < 12:
            streams.append(Streams(address, " river" * 40))
        return bool(running.status.wanted == 2)

    running.until(crowded, "a second engine is wanted")
    running.until(lambda: len(running.engines) == 2, "the second engine serves")
    first, *others = [each.tokens() for each in streams]
    assert all(other == first for other in others)
    running.until(lambda: running.status.wanted == 1 and len(running.status.engines) == 1, "it is given up again")
    # It was empty by then: nobody lost a stream, nobody was continued.
    assert all(each.num_resumed() == 0 for each in streams)
    running.up(engines=ENGINES, autoscaling={})
    running.until(lambda: len(running.engines) == 2, "two engines again")


def test_streams_go_on_when_a_node_is_lost_and_its_engine_is_replaced_elsewhere(
    running: Running, golden: dict[str, list[int]]
) -> None:
    lost, kept = running.services
    assert lost.startswith("127.")
    # Services read of an engine some time after the controller says that it serves.
    running.until(lambda: num_rows(kept) == 2 * ENGINE["max_num_seqs"], "the service knows both engines")
    streams = Streams(kept)
    wait_until(streams.have_begun, what="streams have begun")
    (name,) = [name for name, engine in running.engines.items() if engine.address.startswith("127.")]
    running.cluster.kill_node(running.second)
    assert streams.tokens() == golden
    assert streams.num_resumed() > 0
    running.until(lambda: len(running.engines) == 2 and name not in running.engines, "the engine is replaced")
    assert len({engine.node_id for engine in running.engines.values()}) == 1
    running.until(lambda: running.services == [kept], "the lost node's service is forgotten")


def test_a_node_that_joins_has_a_service(running: Running) -> None:
    running.cluster.add_node()
    running.until(lambda: len(running.services) == 2, "the new node's service serves")
    for address in running.services:
        assert generate(address, greedy("The river", 4)).tokens[0]


def test_nothing_is_left_when_it_is_down(running: Running) -> None:
    import ray

    begun = time.monotonic()
    running.deployment.down("demo")
    assert time.monotonic() - begun < 120
    assert not running.cluster.ours("headrace_backend") and not running.cluster.ours("headrace_service")
    assert ray.util.list_named_actors(all_namespaces=True) == []
    assert all(each["state"] == "REMOVED" for each in ray.util.placement_group_table().values())
    with pytest.raises(running.deployment.DeploymentError, match="no deployment demo; it has none"):
        running.deployment.down("demo")


def test_engines_that_refuse_to_start_say_why_and_nothing_is_left(running: Running) -> None:
    import ray

    tables = {**running.tables, "engine": {"model": "/nowhere/at/all", "device": "cpu"}}
    with pytest.raises(running.deployment.DeploymentError, match="its engines do not start: .*/nowhere/at/all"):
        running.deployment.up(config.parse(tables), wait_s=300.0)
    assert ray.util.list_named_actors(all_namespaces=True) == []


def test_what_no_node_has_room_for_waits_and_says_so(running: Running) -> None:
    tables = {**running.tables, "engines": {"cpus": 64.0}}
    with pytest.raises(TimeoutError, match="after 15 s; it goes on trying, and no node has room for 64 CPU"):
        running.deployment.up(config.parse(tables), wait_s=15.0)
    assert [each.state for each in running.status.engines.values()] == ["placing"]
    assert running.status.takes == "64 CPU"
    running.deployment.down("demo")
