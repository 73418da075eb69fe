"""A supervisor over fake processes, as a program: tests send it signals and look at what it leaves behind.

Usage: driver.py FOLDER BACKEND_SCRIPT SERVICE_SCRIPT. A fake is a Python script (text) that finds FOLDER in its working directory. Every start
appends "NAME PID" to FOLDER/starts. The server counts as ready when FOLDER/ready exists.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys

from headrace_supervisor.config import SupervisorConfig
from headrace_supervisor.processes import ProcessSpec
from headrace_supervisor.supervisor import Supervisor

_PREFIX = "import os, signal, sys, time\nopen('starts', 'a').write(f'{NAME} {os.getpid()}\\n')\n"


def spec(name: str, script: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", f"NAME = {name!r}\n{_PREFIX}{script}"))


async def ready(_: str) -> None:
    while not pathlib.Path("ready").exists():
        await asyncio.sleep(0.01)


async def main(backend: str, service: str) -> int:
    config = SupervisorConfig(restart_backoff_s=0.05, start_attempts=4)
    services = [spec("service-0", service), spec("service-1", service)]
    return await Supervisor(
        config, spec("backend", backend), services, addresses=["127.0.0.1:1"], grace_s=1.0, ready=ready
    ).run()


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(asyncio.run(main(*sys.argv[2:4])))
