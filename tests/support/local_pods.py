"""Pods of a rendered chart as processes of this machine, each container's very command.

A container gets a mount namespace (unshare): its volumes where it mounts them, the root read-only,
and names of Services in /etc/hosts. A pod's address is one of 127.0.0.0/8, which takes the place of
0.0.0.0, because all pods share this machine's ports.

Owns volumes, probes and the ends of processes; knows neither Helm nor Headrace but for the image's
entry point.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.processes import wait_until
from tests.support.running_server import environment

ENTRY_POINT = pathlib.Path(sys.executable).with_name("headrace")
_START_S = 600.0


def why_not() -> str:
    """Why pods can't be run here; empty if they can."""
    if shutil.which("unshare") is None:
        return "needs unshare"
    if ENTRY_POINT.is_relative_to("/tmp"):
        return "needs a checkout outside of /tmp, which a pod's own /tmp hides"
    done = subprocess.run([*_NAMESPACE, "mount -t tmpfs tmpfs /run"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "needs mount namespaces"


_NAMESPACE = ["unshare", "--map-root-user", "--mount", "sh", "-euc"]


def pod_address() -> str:
    """An address of this machine that nobody else uses."""
    return f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"


@dataclass
class Pod:
    """A pod that runs.

    Attributes:
        name: Its name.
        address: Address that its containers listen on.
        spec: Its PodSpec.
        folder: Its volumes, and a log of each container.
        processes: The processes of its containers, by name.
    """

    name: str
    address: str
    spec: dict[str, Any]
    folder: pathlib.Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def log(self, container: str) -> str:
        """What a container has written."""
        return (self.folder / f"{container}.log").read_text(errors="replace")

    def run(self, container: dict[str, Any], hosts: Mapping[str, list[str]], secrets: Mapping[str, Any]) -> None:
        """Starts a container."""
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {name}\n" for name, addresses in hosts.items() for address in addresses)
        )
        arguments = [self._expanded(word, container) for word in container["args"]]
        script = "\n".join([*self._mounts(container, secrets), f"exec {shlex.join([str(ENTRY_POINT), *arguments])}"])
        with (self.folder / f"{container['name']}.log").open("wb") as log:
            self.processes[container["name"]] = subprocess.Popen(
                [*_NAMESPACE, script], env=self._environment(container), stdout=log, stderr=subprocess.STDOUT
            )

    def until(self, container: dict[str, Any], probe: str) -> None:
        """Waits until a probe of a container succeeds."""
        check = container[probe]

        def passes() -> bool:
            process = self.processes[container["name"]]
            assert process.poll() is None, f"{self.name}: {self.log(container['name'])[-3000:]}"
            return self._serves(check["grpc"]) if "grpc" in check else self._answers(container, check["httpGet"])

        wait_until(passes, _START_S, f"{self.name}: {container['name']}: {probe}")

    def get(self, port: int, path: str) -> str:
        """What the pod answers to HTTP GET."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self.address}:{port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def end(self, container: str) -> int:
        """Ends a container as a kubelet does, within the pod's time; returns the exit code."""
        process = self.processes[container]
        process.send_signal(signal.SIGTERM)
        return process.wait(self.spec["terminationGracePeriodSeconds"] + 60)

    def _expanded(self, word: str, container: dict[str, Any]) -> str:
        for name, value in self._variables(container).items():
            word = word.replace(f"$({name})", value)
        return word.replace("=0.0.0.0:", f"={self.address}:")

    def _variables(self, container: dict[str, Any]) -> dict[str, str]:
        entries = container.get("env") or ()
        return {entry["name"]: entry["value"] if "value" in entry else self.name for entry in entries}

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        return {**environment(), **self._variables(container), "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}

    def _mounts(self, container: dict[str, Any], secrets: Mapping[str, Any]) -> list[str]:
        """Commands that mount the container's volumes; /tmp last, which hides what lies there."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        lines = [f"mount --bind {self.folder}/hosts /etc/hosts", "mount -t tmpfs tmpfs /run"]
        for mount in sorted(container["volumeMounts"], key=lambda mount: mount["mountPath"] == "/tmp"):
            source, target = self._volume(volumes[mount["name"]], secrets), mount["mountPath"]
            lines += [f"mkdir -p {target}", f"mount --bind {source} {target}"]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {target}")
        assert container["securityContext"]["readOnlyRootFilesystem"]
        return [*lines, "mount -o remount,bind,ro /"]

    def _volume(self, volume: dict[str, Any], secrets: Mapping[str, Any]) -> pathlib.Path:
        folder = self.folder / volume["name"]
        folder.mkdir(exist_ok=True)
        for item in volume["secret"]["items"] if "secret" in volume else ():
            file = folder / item["path"]
            if not file.exists():
                file.write_bytes((secrets[volume["secret"]["secretName"]] / item["key"]).read_bytes())
                file.chmod(volume["secret"]["defaultMode"])
        return folder

    def _serves(self, check: dict[str, Any]) -> bool:
        with grpc.insecure_channel(f"{self.address}:{check['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=check.get("service", ""))
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _answers(self, container: dict[str, Any], check: dict[str, Any]) -> bool:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        try:
            return bool(self.get(ports[check["port"]], check["path"]))
        except OSError:
            return False


@contextlib.contextmanager
def running(pod: Pod, hosts: Mapping[str, list[str]], secrets: Mapping[str, pathlib.Path]) -> Iterator[Pod]:
    """Starts a pod's containers in a kubelet's order: sidecars first, one after the other.

    Args:
        pod: The pod.
        hosts: Addresses of each name that pods look up.
        secrets: A folder with the keys of each Secret.
    """
    try:
        for container in [*(pod.spec.get("initContainers") or ()), *pod.spec["containers"]]:
            pod.run(container, hosts, secrets)
            pod.until(container, "startupProbe")
        yield pod
    finally:
        for name in reversed(pod.processes):
            process = pod.processes[name]
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
