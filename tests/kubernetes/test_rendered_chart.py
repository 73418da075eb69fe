"""What Helm makes of the chart, judged without a cluster by the API server's code and our commands.

Slow: Go builds Helm and the judge the first time. `test_chart_in_step` reads the chart without.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import pytest
import yaml
from tests.support.helm_chart import (
    CHART,
    EXAMPLES,
    RELEASE,
    complaints,
    containers,
    documents,
    helm,
    named,
    refusal,
    rendered,
    templates,
)
from tests.support.running_server import DEMO, run_command

from headrace_hub.command import pull
from headrace_supervisor import commands
from headrace_supervisor import config as configs
from headrace_supervisor.options import given

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VALUES = sorted(EXAMPLES.glob("[!p]*.yaml"))
DEMO_VALUES = ("--values", EXAMPLES / "demo.yaml")
GPU_VALUES = ("--values", EXAMPLES / "gpu.yaml")
HOSTS_VALUES = ("--values", EXAMPLES / "hosts.yaml")
SCALED_HOSTS = (
    *(*HOSTS_VALUES, "--set-json"),
    'engines.pools={"big":{"hosts":2,"gpus":8,"autoscaling":{"kind":"hpa","minReplicas":1,"maxReplicas":2,'
    '"waitingTokens":100}}}',
)
CASES: dict[str, tuple[Any, ...]] = {
    **{path.stem: ("--values", path) for path in VALUES},
    "no telemetry": (*DEMO_VALUES, "--set", "telemetry.enabled=false"),
    "no policies": (*DEMO_VALUES, "--set", "networkPolicy.enabled=false,disruptionBudget.enabled=false"),
    "openai alone": (*DEMO_VALUES, "--set", "services.grpc.enabled=false,services.openai.enabled=true"),
    "a path on a claim": (*DEMO_VALUES, "--set", "model.claim=models,model.path=/models/Qwen3-8B,model.name=qwen"),
    "several hosts, scaled": SCALED_HOSTS,
    "several hosts, a token, a model that is fetched": (
        *("--values", EXAMPLES / "fetched.yaml", "--set", "engines.token.secret=token,engines.pools.cpu.hosts=2"),
        *("--set", "engines.pools.cpu.rankOptions.worker-threads=4"),
    ),
    "headless": (*DEMO_VALUES, "--set", "services.grpc.service.headless=true"),
    "tls, keys, client certificates, a token too": (
        *("--values", EXAMPLES / "fetched.yaml", "--set", "engines.token.secret=token"),
        *("--set", "services.tls.secret=web,services.tls.clientCa=ca.crt,services.tls.certificate=tls.crt"),
    ),
    "a mirror of the hub": (*("--values", EXAMPLES / "fetched.yaml"), "--set", "model.hub.endpoint=http://hub:8080"),
    "placement": (
        *(*GPU_VALUES, "--set-json"),
        'services.grpc.pod={"annotations":{"a":"b"},"priorityClassName":"high","topologySpreadConstraints":'
        '[{"maxSkew":1,"topologyKey":"topology.kubernetes.io/zone","whenUnsatisfiable":"ScheduleAnyway"}]}',
    ),
}
LOADERS = {
    "service": configs.load_service,
    "backend": configs.load_backend,
    "ranks": configs.load_ranks,
    "telemetry": configs.load_telemetry,
}
COMMANDS = {
    "service": commands.service,
    "backend": commands.backend,
    "ranks": commands.ranks,
    "telemetry": commands.telemetry,
    "pull": pull,
}


@pytest.mark.parametrize("case", CASES)
def test_an_api_server_would_take_what_helm_renders(case: str) -> None:
    assert complaints(rendered(*CASES[case])) == []


def test_a_release_may_have_the_longest_name() -> None:
    assert complaints(rendered(*DEMO_VALUES, "--set", "services.openai.enabled=true", release="a" * 53)) == []


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_helm_finds_no_fault(path: pathlib.Path) -> None:
    done = helm("lint", CHART, "--strict", "--values", path)
    assert done.returncode == 0, done.stdout


def test_the_job_that_fetches_a_model_would_be_taken() -> None:
    text = (EXAMPLES / "pull-job.yaml").read_text()
    assert complaints(text) == []
    job, hub = named(documents(text), "Job"), yaml.safe_load((EXAMPLES / "gpu.yaml").read_text())["model"]
    # What it fetches, and where to, is what the example of GPUs serves.
    (container,) = containers(job["spec"]["template"]["spec"])
    assert container["args"] == ["pull", f"{hub['hub']['name']}@{hub['hub']['commit']}"]
    assert job["spec"]["template"]["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"] == hub["claim"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("runAsNonRoot: true", "runAsNonRoot: false"), "restricted pods"),
        (("periodSeconds: 2", "periodSecond: 2"), 'unknown field "periodSecond"'),
        (("{name: tmp, mountPath: /tmp}", "{name: tmq, mountPath: /tmp}"), 'Not found: "tmq"'),
        (("replicas: 2", "replicas: -2"), "must be greater than or equal to 0"),
        (("protocol: TCP, port: engine", "protocol: TCPP, port: engine"), "Unsupported value"),
        (('averageValue: "8192"', 'averageValue: "-8192"'), "must be positive"),
        (("minReplicaCount: 1", "minReplicaCount: one"), "must be of type integer"),
        (("pollingInterval", "pollInterval"), "unknown field spec.pollInterval"),
        (("interval: 15s", "intervall: 15s"), 'unknown field "intervall"'),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_an_api_server_would_refuse_is_seen(wrong: tuple[str, str], said: str) -> None:
    text = rendered(*GPU_VALUES).replace("  triggers:", "  pollingInterval: 30\n  triggers:")
    assert wrong[0] in text and said in "\n".join(complaints(text.replace(*wrong)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("runAsNonRoot: true", "runAsNonRoot: false"), "restricted pods"),
        (("restartPolicy: None", "restartPolicy: Sometimes"), "Unsupported value"),
        (("size: 2", "sizes: 2"), "unknown field spec.leaderWorkerTemplate.sizes"),
        (("{name: kernel-cache, mountPath", "{name: kernels, mountPath"), 'Not found: "kernels"'),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_an_api_server_would_refuse_of_a_group_is_seen(wrong: tuple[str, str], said: str) -> None:
    text = rendered(*HOSTS_VALUES)
    # The last one is the further hosts'.
    assert wrong[0] in text
    found = complaints(wrong[1].join(text.rsplit(wrong[0], 1)))
    assert said in "\n".join(found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("engines.pools=null", "engines.pools is empty"),
        ("services.insecure=false", "services.tls.secret and services.keys.secret are needed"),
        ("services.tls.clientCa=ca.pem", "services.tls.clientCa needs services.tls.secret"),
        ("services.grpc.enabled=false", "or nobody can call"),
        ("engines.token.secret=", "engines take no services that nothing vouches for"),
        ("engines.tls.secret=a", "engines.tls.secret and engines.tls.serviceSecret: one needs the other"),
        ("model.hub.name=a/b", "model.hub.name and model.hub.commit: one needs the other"),
        ("model.hub.commit=main", "'/model/hub/commit': 'main' does not match"),
        ("model.hub.name=a/b@main", "'/model/hub/name'"),
        ("model.path=demo", "'/model/path'"),
        ("telemetry.enabled=false,serviceMonitor.enabled=true", "there are no metrics"),
        ("services.grpc.options.listen=0.0.0.0:1", "services.grpc.options: listen is the chart's own"),
        ("engines.pools.cpu.options.tp=2", "engines.pools.cpu.options: tp is the chart's own"),
        ("telemetry.options.metrics-listen=:1", "telemetry.options: metrics-listen is the chart's own"),
        ("engines.pools.cpu.gpus=9", "'/engines/pools/cpu/gpus': maximum: got 9, want 8"),
        ("engines.pools.Big.gpus=1", "'Big' does not match"),
        ("engines.pool.cpu.gpus=1", "'/engines': additional properties 'pool' not allowed"),
        ("services.grpc.replicas=-1", "'/services/grpc/replicas': minimum: got -1, want 0"),
        ("services.grpc.port=443", "'/services/grpc/port': minimum: got 443, want 1"),
        ("engines.pools.cpu.autoscaling.kind=hpa", "missing properties 'minReplicas', 'maxReplicas', 'waitingTokens'"),
        ("engines.pools.cpu.options.max_num_seqs=1", "'max_num_seqs' does not match"),
        ("engines.port=50062", "probes"),
        ("engines.pools.cpu.hosts=9", "'/engines/pools/cpu/hosts': maximum: got 9, want 8"),
        ("engines.pools.cpu.options.hosts=2", "engines.pools.cpu.options: hosts is the chart's own"),
        ("engines.pools.cpu.hosts=2,engines.pools.cpu.options.pp=4", "options: pp is the chart's own"),
        ("engines.pools.cpu.rankOptions.worker-threads=2", "for the further hosts of an engine: hosts is 1"),
        ("engines.pools.cpu.hosts=2,engines.pools.cpu.rankOptions.join=a:1", "rankOptions: join is the chart's own"),
    ],
)
def test_values_that_make_no_sense_are_refused_in_a_sentence(changes: str, said: str) -> None:
    assert said in refusal(*DEMO_VALUES, "--set", changes)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"minReplicas": 3, "maxReplicas": 2}, "maxReplicas is less than minReplicas"),
        ({"kind": "keda"}, "kind keda needs prometheus"),
        ({"prometheus": "http://p"}, "kind hpa takes none"),
        ({}, "replicas and autoscaling: one of both"),
    ],
)
def test_autoscaling_that_makes_no_sense_is_refused_in_a_sentence(
    tmp_path: pathlib.Path, scaling: dict[str, Any], said: str
) -> None:
    asked = {"kind": "hpa", "minReplicas": 1, "maxReplicas": 2, "waitingTokens": 100, **scaling}
    pool = {"autoscaling": asked, **({} if scaling else {"replicas": 1})}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"engines": {"pools": {"other": pool}}}))
    assert said in refusal(*DEMO_VALUES, "--values", tmp_path / "values.yaml")


def workloads(*arguments: object) -> list[dict[str, Any]]:
    return [each for each in documents(rendered(*arguments)) if each["kind"] in ("Deployment", "LeaderWorkerSet")]


def pods(*arguments: object) -> list[dict[str, Any]]:
    return [template["spec"] for each in workloads(*arguments) for template in templates(each)]


@pytest.mark.parametrize("case", CASES)
def test_settings_of_a_container_exist_and_are_taken(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for pod in pods(*CASES[case]):
        for container in containers(pod):
            command, *arguments = container["args"]
            # A name would be fetched.
            arguments = [re.sub(r"^(--model|--model-folder)=\w+/.*@0+.*", rf"\1={DEMO}", word) for word in arguments]
            context = COMMANDS[command].make_context(command, arguments)
            if command in LOADERS:
                flags = {name: value for name, value in context.params.items() if name != "config_file"}
                # Raises where a value is impossible, or where one setting lacks another.
                LOADERS[command](given(flags), None)


@pytest.mark.parametrize("case", CASES)
def test_a_pod_may_do_no_more_than_it_needs_and_has_time_to_end(case: str) -> None:
    for pod in pods(*CASES[case]):
        assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
        (main,) = pod["containers"]
        graces = re.findall(r"--(?:shutdown|drain)-grace-s=(\d+)", " ".join(main["args"]))
        # Ranks have nothing to finish that is not their engine's.
        assert len(graces) == (main["name"] != "ranks")
        withdrawn = int(main["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in main else 0
        assert pod["terminationGracePeriodSeconds"] >= withdrawn + int([*graces, "0"][0]) + 10
        # Private keys have to be unreadable for others.
        for volume in pod["volumes"]:
            assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440


def test_variables_of_other_services_would_be_unknown_settings() -> None:
    ended = run_command("service", "--listen", "127.0.0.1:0", HEADRACE_GRPC_SERVICE_HOST="10.0.0.1")
    assert ended.returncode == 2 and "unknown setting HEADRACE_GRPC_SERVICE_HOST" in ended.stderr


def test_options_reach_the_command_as_they_are_written() -> None:
    options = (
        '{"max-message-bytes":16777216,"reflection":false,"kserve":true,"kserve-vllm-names":["a","b"],'
        '"log-level":"info"}'
    )
    (service,) = [
        each for each in workloads(*DEMO_VALUES, "--set-json", f"services.grpc.options={options}")
        if each["metadata"]["name"].endswith("-grpc")
    ]  # fmt: skip
    arguments = service["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[-6:] == [
        "--kserve", "--kserve-vllm-names=a", "--kserve-vllm-names=b", "--log-level=info",
        "--max-message-bytes=16777216", "--no-reflection",
    ]  # fmt: skip


def test_objects_find_each_other() -> None:
    found = documents(rendered(*GPU_VALUES))
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in found if each["kind"] == "Deployment"]

    def selected(selector: dict[str, str]) -> list[str]:
        return sorted(each["app.kubernetes.io/component"] for each in labels if selector.items() <= each.items())

    assert selected(named(found, "Service", "-grpc")["spec"]["selector"]) == ["grpc"]
    assert selected(named(found, "Service", "-engines")["spec"]["selector"]) == ["engine", "engine"]
    assert selected(named(found, "Service", "-metrics")["spec"]["selector"]) == ["engine", "engine", "grpc", "openai"]
    for kind, selector in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for suffix, components in (("-engines", ["engine"] * 2), ("-grpc", ["grpc"]), ("-openai", ["openai"])):
            by = named(found, kind, suffix)["spec"][selector]
            among = [each["values"] for each in by.get("matchExpressions", [])] or [["engine", "grpc", "openai"]]
            assert [each for each in selected(by["matchLabels"]) if each in among[0]] == components
    monitor = named(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= named(found, "Service", "-metrics")["metadata"]["labels"].items()
    scaled = {
        each["spec"]["scaleTargetRef"]["name"]
        for each in found
        if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    }
    unsized = {
        each["metadata"]["name"] for each in found if each["kind"] == "Deployment" and "replicas" not in each["spec"]
    }
    assert scaled == unsized and len(scaled) == 2, (
        "who is scaled has no number of replicas, which an upgrade would reset"
    )
    host = f"{named(found, 'Service', '-engines')['metadata']['name']}.default.svc"
    assert host == f"{RELEASE}-headrace-engines.default.svc"
    services = [each for each in workloads(*GPU_VALUES) if each["metadata"]["name"].endswith(("-grpc", "-openai"))]
    for service in services:
        assert f"--engines-dns={host}:50061" in service["spec"]["template"]["spec"]["containers"][0]["args"]


def test_an_engine_of_several_hosts_is_a_group_that_finds_itself() -> None:
    found = documents(rendered(*SCALED_HOSTS))
    group = named(found, "LeaderWorkerSet")["spec"]
    # A leader is ready once its workers have joined: they would wait for that for ever.
    assert group["startupPolicy"] == "LeaderCreated" and group["leaderWorkerTemplate"]["size"] == 2
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "None" and "replicas" not in group
    leader, worker = templates(named(found, "LeaderWorkerSet"))
    (first,), (further,) = leader["spec"]["containers"], worker["spec"]["containers"]
    assert {"backend", "--hosts=2", "--pp=2", "--tp=8"} <= set(first["args"])
    name = f"{RELEASE}-headrace-engines.default.svc"
    assert {"ranks", "--join=$(LWS_LEADER_ADDRESS):50061", f"--engine-tls-name={name}"} <= set(further["args"])
    for container in (first, further):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    labels = [each["metadata"]["labels"] for each in (leader, worker)]

    def selects(selector: dict[str, Any]) -> list[bool]:
        among = [(each["key"], each["values"]) for each in selector.get("matchExpressions", [])]
        return [
            selector["matchLabels"].items() <= each.items() and all(each[key] in values for key, values in among)
            for each in labels
        ]

    # Services ask the first host alone; who talks to whom between hosts is open to both.
    assert selects({"matchLabels": named(found, "Service", "-engines")["spec"]["selector"]}) == [True, False]
    assert selects(named(found, "NetworkPolicy", "-engines")["spec"]["podSelector"]) == [True, False]
    between = named(found, "NetworkPolicy", "-hosts-big")["spec"]
    assert selects(between["podSelector"]) == [True, True]
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        (peer,) = between[direction][0][peers]
        assert selects(peer["podSelector"]) == [True, True] and "ports" not in between[direction][0]
    assert selects(named(found, "PodDisruptionBudget", "-engines")["spec"]["selector"]) == [True, True]
    target = named(found, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", named(found, "LeaderWorkerSet")["metadata"]["name"])


def test_gpus_are_asked_for_and_shared_by_as_many_ranks() -> None:
    for workload in workloads(*GPU_VALUES):
        container = workload["spec"]["template"]["spec"]["containers"][0]
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert gpus == {"h200": 1, "l40s": 2}.get(workload["metadata"]["labels"].get("headrace/pool", ""), 0)
        assert (f"--tp={gpus}" in container["args"]) == (gpus > 0)
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"]) == (gpus > 1)
        assert container["image"].endswith("-backend-gpu:0.1.0") == (gpus > 0)


def test_an_upgrade_of_the_chart_alone_starts_no_pod_anew(tmp_path: pathlib.Path) -> None:
    before = {each["metadata"]["name"]: each["spec"]["template"] for each in workloads(*DEMO_VALUES)}
    for path in CHART.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(CHART)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text().replace("\nversion: 0.1.0", "\nversion: 0.1.1"))
    done = helm("template", RELEASE, tmp_path, *DEMO_VALUES)
    after = [each for each in documents(done.stdout) if each["kind"] == "Deployment"]
    assert after and after[0]["metadata"]["labels"]["helm.sh/chart"] == "headrace-0.1.1"
    assert {each["metadata"]["name"]: each["spec"]["template"] for each in after} == before
