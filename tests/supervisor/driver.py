"""A supervisor over fake processes, as a program.

Tests send it signals and look at what it leaves behind.

Usage: driver.py FOLDER BACKEND_SCRIPT SERVICE_SCRIPT GRACE_S [TELEMETRY_SCRIPT]. A fake is a Python
script (text) that finds FOLDER in its working directory. Every start appends "NAME PID" to
FOLDER/starts, and a fake whose signal handlers are in place calls `up`, which appends NAME to
FOLDER/up. The server counts as ready when FOLDER/ready exists, and so does its one model. GRACE_S
is the services' grace.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys

from headrace_protos.engine.v1 import engine_pb2
from headrace_supervisor import logs
from headrace_supervisor.config import SupervisorConfig
from headrace_supervisor.models.backend_table import Probe
from headrace_supervisor.models.memory_sums import Claim
from headrace_supervisor.models.model_launches import Launch
from headrace_supervisor.processes.managed_process import ProcessSpec
from headrace_supervisor.supervisor import Supervisor, TelemetryProcess

_PREFIX = """import os, signal, sys, time
open('starts', 'a').write(f'{NAME} {os.getpid()}\\n')
def up(): open('up', 'a').write(f'{NAME}\\n')
"""


def spec(name: str, script: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", f"NAME = {name!r}\n{_PREFIX}{script}"))


class OneModel:
    """Launches of a single model, whose backend is a script."""

    default = "model"

    def __init__(self, script: str) -> None:
        self._script = script

    def names(self) -> tuple[str, ...]:
        return (self.default,)

    def check(self, name: str, memory_bytes: int = 0) -> tuple[Claim, ...]:
        return (Claim(name, "cpu", memory_bytes),)

    def prepare(self, name: str, memory_bytes: int, replica: int) -> Launch:
        [claim] = self.check(name)
        return Launch(spec("backend", self._script), "unix:backend.sock", claim, pathlib.Path("refusal"))


async def ready(_: str) -> None:
    while not pathlib.Path("ready").exists():
        await asyncio.sleep(0.01)


async def model_ready(address: str) -> engine_pb2.EngineModel:
    await ready(address)
    return engine_pb2.EngineModel(device="cpu")


async def idle(_: str) -> None:
    return


async def main(backend: str, service: str, grace_s: float, telemetry: str = "") -> int:
    logs.configure("console", "info")
    config = SupervisorConfig(restart_backoff_s=0.05, start_attempts=4)
    services = [spec("service-0", service), spec("service-1", service)]
    return await Supervisor(
        config,
        OneModel(backend),
        ["model"],
        services,
        control=f"unix:{os.getcwd()}/control.sock",
        addresses=["127.0.0.1:1"],
        probes=["unix:probe-0.sock", "unix:probe-1.sock"],
        grace_s=grace_s,
        telemetry=TelemetryProcess(spec("telemetry", telemetry), 60.0) if telemetry else None,
        ready=ready,
        probe=Probe(model_ready, idle),
    ).run()


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(asyncio.run(main(sys.argv[2], sys.argv[3], float(sys.argv[4]), *sys.argv[5:])))
