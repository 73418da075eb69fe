"""The pods of an engine on two hosts, run as processes: they join, answer and come back.

Slow, as `test_chart_processes`, whose pods and Secrets these are. What LeaderWorkerSet does in a
cluster is done here by hand: it names the first pod to the others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest
from tests.kubernetes import test_chart_processes
from tests.kubernetes.test_chart_processes import ENGINES_HOST, VALUES, Cluster, made_secrets
from tests.support.helm_chart import documents, named, rendered, templates
from tests.support.local_pods import Pod, pod_address, running
from tests.support.rpc import Transcript

pytestmark = test_chart_processes.pytestmark
LEADER = "t-headrace-engine-both-0.t-headrace-engine-both.default"
POOL = {"hosts": 2, "options": {"num-blocks": 512, "worker-threads": 1, "watchdog-s": 60}}
RANKS = {"rankOptions": {"worker-threads": 1}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("release")
    engines = {**VALUES["engines"], "pools": {"both": {**POOL, **RANKS}}}  # type: ignore[dict-item]  # a mapping
    values = {**VALUES, "services": {}, "engines": engines}
    (folder / "values.yaml").write_text(json.dumps(values))
    objects = documents(rendered("--values", folder / "values.yaml"))
    secrets, key = made_secrets(folder)
    specs = dict(zip(("-leader", "-ranks"), templates(named(objects, "LeaderWorkerSet")), strict=True))
    specs["-grpc"] = named(objects, "Deployment", "-grpc")["spec"]["template"]
    pods = {}
    for name, template in specs.items():
        (folder / name).mkdir()
        pods[name] = Pod(name, pod_address(), template["spec"], folder / name)
    (ranks,) = pods["-ranks"].spec["containers"]
    ranks["env"] = [{"name": "LWS_LEADER_ADDRESS", "value": LEADER}, *(ranks["env"] or ())]
    leader = pods["-leader"].address
    hosts = {ENGINES_HOST: [leader], LEADER: [leader]}
    with contextlib.ExitStack() as stack:
        for pod in pods.values():
            stack.enter_context(running(pod, hosts, secrets))
        for pod in pods.values():
            pod.until(pod.spec["containers"][0], "readinessProbe")
        yield Cluster(pods, secrets["headrace-api-tls"] / "ca.pem", key)


def test_answers_stream_through_an_engine_of_two_pods(cluster: Cluster) -> None:
    transcript = Transcript()
    with cluster.stub() as stub:
        for response in cluster.stream(stub, "The river", 24):
            transcript.take(response.event)
    assert len(transcript.tokens[0]) == 24
    assert "host joined" in cluster.pod("-leader").log("engine")
    # The further pod shows the services' certificate, and knows the engine by their name for it.
    assert "joined" in cluster.pod("-ranks").log("ranks")


def test_a_pod_that_ends_takes_the_readiness_of_its_engine_along(cluster: Cluster) -> None:
    assert cluster.pod("-ranks").end("ranks") == 0
    leader = cluster.pod("-leader")
    check = leader.spec["containers"][0]["readinessProbe"]["grpc"]
    test_chart_processes.wait_until(lambda: not leader._serves(check), 60, "an engine that is not ready")
    assert leader._serves(leader.spec["containers"][0]["livenessProbe"]["grpc"])
