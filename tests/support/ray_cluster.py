"""A real Ray cluster of several nodes on this machine, and a deployment of the demo model on it.

Owns the start and the end of its processes, and its folder. Each node has an address of its own, so
that each has its service at the same port. Ray's driver speaks to a head at the machine's address
only; the other nodes are on loopback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tests.support.processes import alive, wait_until
from tests.support.running_server import DEMO, environment

# `make test-slow` installs it.
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, which `make ray` installs")
# Ray starts its processes with this environment, and these ours.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's 15 would have engines wait for every other process of a busy machine.
    "RAY_worker_niceness": "0",
}
_STORE_BYTES = 80 << 20
# Enough for a busy machine, and less than Ray's half a minute.
_SYSTEM = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 8}


class RayCluster:
    """A head and further nodes, whose CPUs are numbers and no cores."""

    def __init__(self, folder: pathlib.Path, cpus: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._cpus = cpus
        self._last = 1
        self.folder = folder
        self._started = set(psutil.Process().children(recursive=True))
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_system_config": _SYSTEM,
            },
        )
        self.address = str(self._cluster.address)

    def add_node(self) -> Any:
        """Adds a node at another loopback address."""
        self._last += 1
        return self._cluster.add_node(
            num_cpus=self._cpus, node_ip_address=f"127.0.0.{self._last}", object_store_memory=_STORE_BYTES
        )

    def kill_node(self, node: Any) -> None:
        """Kills a node's processes, those of ours on it too, as if its machine were gone."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        below = raylet.children(recursive=True)
        for process in (raylet, *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Ends all processes; fails if one of them is left."""
        pids = [process.pid for process in self._below()]
        self._ray.shutdown()
        self._cluster.shutdown()
        wait_until(lambda: not alive(pids), 60.0, f"processes left behind: {pids}")

    def ours(self, module: str) -> list[psutil.Process]:
        """Returns the processes below the nodes that run `python -m module`."""
        found = []
        for process in self._below():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def actors(self, name: str) -> list[psutil.Process]:
        """Returns the processes of living actors of a class."""
        found = []
        for process in self._below():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(part.startswith(f"ray::{name}") for part in process.cmdline()):
                    found.append(process)
        return found

    def _below(self) -> list[psutil.Process]:
        return [each for each in psutil.Process().children(recursive=True) if each not in self._started]


@contextlib.contextmanager
def ray_cluster(cpus: int = 2) -> Iterator[RayCluster]:
    """A cluster of one node, to which others can be added; nothing of it is left behind."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="hr-ray-"))
    settings = {**_SETTINGS, "RAY_TMPDIR": str(folder), "PYTHONPATH": environment()["PYTHONPATH"]}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    cluster = RayCluster(folder, cpus)
    try:
        yield cluster
    finally:
        try:
            cluster.close()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            shutil.rmtree(folder, ignore_errors=True)


def deployment_tables(port: int, **tables: Any) -> dict[str, Any]:
    """Returns the tables of a deployment of the demo model, on the CPU and quick to end.

    Args:
        port: of the services.
        tables: what is otherwise, by table.
    """
    engine = {
        "model": str(DEMO),
        "device": "cpu",
        "worker_threads": 1,
        "watchdog_s": 60.0,
        "kv_memory": "64MiB",
        "drain_grace_s": 1.0,
    }
    # The head's address is the machine's own.
    service = {"insecure": True, "shutdown_grace_s": 1.0, "template_timeout_s": 30.0}
    made = {"name": "demo", "services": {"port": port}, "engine": engine, "service": service}
    return {**made, **{name: {**made.get(name, {}), **table} for name, table in tables.items()}}
