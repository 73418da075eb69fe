"""The chart of deploy/kubernetes, rendered by Helm and judged by the API server's own code.

Owns the two programs: Helm, at the version of tools/kubernetes/go.mod, and tools/kubernetes. Go
builds them into build/ from its module proxy, which takes minutes the first time (its build
cache keeps them).
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml
from tests.support.compose_files import DEPLOY, ROOT
from tests.support.toolchains import Toolchain, require

CHART = DEPLOY / "kubernetes"
EXAMPLES = CHART / "examples"
TEMPLATES = CHART / "templates"
RELEASE = "t"
# The oldest one that the chart is for. Helm asks no cluster here.
_KUBERNETES = "1.29.0"
_TOOLS = ROOT / "tools" / "kubernetes"
_BUILT = ROOT / "build"
# Their own repositories, where the definitions of their kinds lie.
_KEDA = "github.com/kedacore/keda/v2@v2.21.0"
_LEADER_WORKER_SET = "sigs.k8s.io/lws@v0.8.0"
_GO = Toolchain(
    name="the Helm chart",
    program="go",
    version=("env", "GOVERSION"),
    oldest=(1, 23),
    how="install Go 1.23 or newer (.ci/install_go does it on Debian) and let it reach a Go module proxy",
)


def _go(*arguments: str, folder: pathlib.Path = _TOOLS) -> str:
    """What a go command prints."""
    # A Go that is older than go.mod asks for fetches the one it needs.
    environment = {**os.environ, "GOTOOLCHAIN": "auto", "GOFLAGS": "-mod=readonly"}
    command = [require(_GO), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout


@functools.cache
def _built(name: str, package: str) -> str:
    """Path of a program, built if need be; tests in other processes wait."""
    _BUILT.mkdir(exist_ok=True)
    with (_BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _go("build", "-o", str(_BUILT / name), package)
    return str(_BUILT / name)


@functools.cache
def _definition(module: str, name: str) -> str:
    """Path of a kind's definition, in the module that owns it."""
    folder = json.loads(_go("mod", "download", "-json", module, folder=ROOT.parent))["Dir"]
    return str(pathlib.Path(folder) / "config" / "crd" / "bases" / f"{name}.yaml")


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a helm command until it has ended."""
    command = [_built("helm", "helm.sh/helm/v3/cmd/helm"), *map(str, arguments), "--kube-version", _KUBERNETES]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def rendered(*arguments: object, release: str = RELEASE) -> str:
    """The chart's objects as YAML, with options of `helm template`."""
    done = helm("template", release, CHART, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*arguments: object) -> str:
    """What Helm says to values that the chart refuses."""
    done = helm("template", RELEASE, CHART, *arguments)
    assert done.returncode != 0, "these values were taken"
    return done.stderr


def complaints(objects: str) -> list[str]:
    """What an API server would say to these objects; none: it would take them."""
    definitions = (
        _definition(_KEDA, "keda.sh_scaledobjects"),
        _definition(_LEADER_WORKER_SET, "leaderworkerset.x-k8s.io_leaderworkersets"),
    )
    command = [_built("kubernetes", "."), *definitions]
    done = subprocess.run(command, input=objects, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines() if done.returncode else []


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of YAML documents."""
    return [document for document in yaml.safe_load_all(text) if document]


def named(objects: Sequence[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The one object of a kind whose name ends so."""
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    return found


def templates(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a Deployment or of a LeaderWorkerSet."""
    if workload["kind"] == "Deployment":
        return [workload["spec"]["template"]]
    group = workload["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """A pod's containers, those that run first included."""
    return [*(pod.get("initContainers") or ()), *pod["containers"]]
