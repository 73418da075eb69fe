"""The commands of the chart's containers, run as processes: they start, find each other and answer.

Slow: a whole chart of pods. Secrets are made by the commands of docs/kubernetes.md.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tests.support import local_pods
from tests.support.helm_chart import RELEASE, documents, rendered
from tests.support.local_pods import ENTRY_POINT, Pod, pod_address, running
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, greedy
from tests.support.running_server import DEMO, environment

from headrace.v1 import inference_pb2, inference_pb2_grpc

MISSING = local_pods.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "all is there"),
]

ENGINES_HOST = f"{RELEASE}-headrace-engines.default.svc"
API_HOST = f"{RELEASE}-headrace-grpc.default.svc"
POOL = {"replicas": 1, "options": {"kv-memory": "128MiB", "worker-threads": 1, "watchdog-s": 60}}
VALUES = {
    "model": {"path": str(DEMO)},
    "services": {"openai": {"enabled": True}},
    "engines": {
        # What runs at an engine that ends goes on elsewhere at once.
        "drainGraceS": 0,
        "token": {"secret": "headrace-engine-token"},
        "pools": {"first": POOL, "second": POOL},
    },
}


@dataclass
class Cluster:
    """All pods of a release, and what its callers hold."""

    pods: dict[str, Pod]
    ca: pathlib.Path
    key: str

    def engines(self) -> list[Pod]:
        """The engines' pods."""
        return [pod for name, pod in self.pods.items() if "-engine-" in name]

    def pod(self, suffix: str) -> Pod:
        """The pod of a workload."""
        return next(pod for name, pod in self.pods.items() if name.endswith(suffix))

    @contextlib.contextmanager
    def stub(self) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
        """A connection to the API, by its Service's name."""
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        options = [("grpc.ssl_target_name_override", API_HOST)]
        with grpc.secure_channel(f"{self.pod('-grpc').address}:50051", credentials, options) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    def stream(self, stub: Any, prompt: str, max_tokens: int) -> Any:
        """An answer that streams."""
        request = inference_pb2.GenerateRequest(spec=greedy(prompt, max_tokens))
        metadata = [("authorization", f"Bearer {self.key}")]
        return stub.Generate(request, timeout=CALL_TIMEOUT_S, metadata=metadata)


def command(*arguments: object) -> str:
    line = [ENTRY_POINT, *map(str, arguments)]
    ended = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def made_secrets(folder: pathlib.Path) -> tuple[dict[str, pathlib.Path], str]:
    """A folder for each Secret, made as the guide says, and the first caller's key."""
    names = ("api-tls", "api-keys", "engine-tls", "engine-client-tls", "engine-token")
    api, engine = folder / "api-certs", folder / "engine-certs"
    command("certs", "init", api, "--host", API_HOST)
    key = command("keys", "new", "team", "--keys-file", folder / "keys.json").strip()
    command("certs", "init", engine, "--host", ENGINES_HOST)
    command("certs", "client", engine, "service")
    (folder / "token").write_text("a secret of more than 16 bytes\n")
    folders = (api, folder, engine, engine, folder)
    return {f"headrace-{name}": place for name, place in zip(names, folders, strict=True)}, key


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("release")
    (folder / "values.yaml").write_text(json.dumps(VALUES))
    objects = documents(rendered("--values", folder / "values.yaml"))
    secrets, key = made_secrets(folder)
    pods = {}
    for workload in [each for each in objects if each["kind"] == "Deployment"]:
        name = workload["metadata"]["name"]
        (folder / name).mkdir()
        pods[name] = Pod(name, pod_address(), workload["spec"]["template"]["spec"], folder / name)
    cluster = Cluster(pods, secrets["headrace-api-tls"] / "ca.pem", key)
    hosts = {ENGINES_HOST: [pod.address for pod in cluster.engines()]}
    with contextlib.ExitStack() as stack:
        for pod in pods.values():
            stack.enter_context(running(pod, hosts, secrets))
        for pod in pods.values():
            pod.until(pod.spec["containers"][0], "readinessProbe")
        yield cluster


def gauge(pod: Pod, name: str) -> float | None:
    """A gauge of a pod, summed over its labels; None: the pod has none of that name."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)", pod.get(9464, "/metrics"), re.MULTILINE)
    return sum(map(float, found)) if found else None


def test_answers_stream_through_the_pods(cluster: Cluster) -> None:
    with cluster.stub() as stub:
        responses = list(cluster.stream(stub, "The river", 24))
        transcript = Transcript()
        for response in responses:
            transcript.take(response.event)
        assert len(transcript.tokens[0]) == 24 and len(responses) > 5
        # One without a key comes no further than the door.
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_prompts_are_spread_over_the_engines_that_the_name_resolves_to(cluster: Cluster) -> None:
    with cluster.stub() as stub:
        for number in range(12):
            list(cluster.stream(stub, f"{number} rivers", 2))
    for pod in cluster.engines():
        wait_until(lambda pod=pod: gauge(pod, "headrace_steps_total"), what=f"{pod.name} computed")


def test_metrics_are_where_the_chart_looks_for_them(cluster: Cluster) -> None:
    for pod in cluster.engines():
        wait_until(
            lambda pod=pod: gauge(pod, "headrace_requests_waiting_tokens") == 0, what=f"{pod.name} says its load"
        )
    service = cluster.pod("-grpc")
    assert gauge(service, "headrace_requests_waiting_tokens") is None
    # Reported by services as well, which the ServiceMonitor drops.
    wait_until(lambda: gauge(service, "headrace_step_tokens_count"), what="steps as a service hears of them")


def test_openais_api_answers_beside(cluster: Cluster) -> None:
    pod = cluster.pod("-openai")
    context = ssl.create_default_context(cafile=str(cluster.ca))
    context.check_hostname = False
    request = urllib.request.Request(
        f"https://{pod.address}:8000/v1/completions",
        data=json.dumps({"model": "demo", "prompt": "The river", "max_tokens": 8}).encode(),
        headers={"authorization": f"Bearer {cluster.key}", "content-type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(request, timeout=CALL_TIMEOUT_S) as answer:
        assert json.load(answer)["choices"][0]["text"]


def test_an_engine_that_ends_takes_no_stream_along_and_then_the_service_ends_in_time(cluster: Cluster) -> None:
    with cluster.stub() as stub:
        alone = [token for response in cluster.stream(stub, "Lost", 1500) for token in response.event.delta.token_ids]
        stream = cluster.stream(stub, "Lost", 1500)
        transcript = Transcript()
        for _ in range(4):
            transcript.take(next(stream).event)
        busy = wait_until(
            lambda: [pod for pod in cluster.engines() if gauge(pod, "headrace_requests_running")], what="who computes"
        )
        assert len(busy) == 1
        assert busy[0].end("engine") == 0
        for response in stream:
            transcript.take(response.event)
    assert any(event.HasField("resumed") for event in transcript.events)
    assert transcript.tokens[0] == alone
    service = cluster.pod("-grpc")
    service.until(service.spec["containers"][0], "readinessProbe")
    for container in ("service", "telemetry"):
        assert service.end(container) == 0
