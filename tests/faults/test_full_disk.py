"""The disk that logs go to is full.

What dies is replaced and serving goes on, without a line of log.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
import urllib.request

import pytest
from tests.support.ports import free_address
from tests.support.processes import alive, wait_until
from tests.support.rpc import generate, greedy, serves
from tests.support.running_server import DEMO, RunningServer, environment, serve_command

OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "256")
LOST = "headrace_log_lost_lines_total"


def lost_lines(address: str) -> dict[str, float]:
    """By the kind of process."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    reported = [line.rsplit(" ", 1) for line in lines if line.startswith(LOST)]
    return {labels.split('process_kind="')[1].split('"')[0]: float(value) for labels, value in reported}


def replace(server: RunningServer, module: str) -> None:
    """Kills the one process that runs a module, and waits for the next one to serve."""
    [victim] = server.descendants(module)
    victim.kill()
    wait_until(lambda: not alive([victim.pid]), 60, "it is gone")
    wait_until(lambda: server.descendants(module) and serves(server.address), 240, "SERVING again")


# Workers and services are replaced in test_processes_die, with a log that can be written.
@pytest.mark.slow
def test_a_server_whose_log_can_not_be_written_serves_and_replaces_what_dies() -> None:
    address, metrics = free_address(), free_address()
    with pathlib.Path("/dev/full").open("wb") as full:
        command = serve_command(DEMO, address, (*OPTIONS, "--metrics-listen", metrics))
        process = subprocess.Popen(command, stdout=full, stderr=full, env=environment())
    pids = [process.pid]
    try:
        server = RunningServer(process, address, [])
        wait_until(lambda: process.poll() is not None or serves(address), 240, "SERVING")
        pids = server.all_pids()
        answer = generate(address, greedy([5, 6, 7], 20)).tokens
        for module in ("headrace_backend.worker", "headrace_service"):
            replace(server, module)
            assert generate(address, greedy([5, 6, 7], 20)).tokens == answer
        # Of the backend, which said that it lost a worker, and of the service, which said that it
        # listens.
        wait_until(lambda: {kind for kind, lines in lost_lines(metrics).items() if lines} == {"backend", "service"}, 60)
        pids += server.all_pids()
        assert server.stop(signal.SIGTERM) == 0
        wait_until(lambda: not alive(pids), 30, "nothing left")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
