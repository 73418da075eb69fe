"""A backend and agents of other hosts on loopback, with fake workers, and a network that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tests.backend.backend_harness import ENVIRONMENT, BackendProcess, running_backend, until, write_model_folder
from tests.support.forked_processes import ForkedProcess, ForkingPython
from tests.support.ports import free_address
from tests.support.processes import alive

SECRET = "a secret of sixteen bytes or more"
METADATA = (("authorization", f"Bearer {SECRET}"),)
_SCRIPT = pathlib.Path(__file__).with_name("run_agent.py")
_AGENTS = ForkingPython(["tests.backend.hosts.run_agent"], ENVIRONMENT)


def write_secret(path: pathlib.Path, text: str = SECRET) -> pathlib.Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def write_two_layers(folder: pathlib.Path) -> pathlib.Path:
    """Writes the folder of a model that two pipeline stages can share."""
    write_model_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    return folder


@dataclasses.dataclass
class Agent:
    """The process of an agent."""

    process: ForkedProcess
    log_path: pathlib.Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def worker_pids(self) -> list[int]:
        pid = self.process.pid
        with contextlib.suppress(OSError):
            return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    async def wait_exit(self) -> int:
        return await asyncio.to_thread(self.process.wait, 240.0)


@contextlib.contextmanager
def running_agent(
    folder: pathlib.Path, model: pathlib.Path, address: str, *worker_arguments: str, **settings: Any
) -> Iterator[Agent]:
    """Runs an agent and ends it with SIGTERM unless the test has; no worker may be left."""
    number = time.monotonic_ns()
    secret = write_secret(folder / f"agent-secret-{number}")
    config = {"join": address, "model": str(model), "device": "cpu", "log_format": "json", "log_level": "debug"}
    config_path = folder / f"agent-{number}.json"
    config_path.write_text(json.dumps({**config, "engine_token_file": str(secret), **settings}))
    log_path = config_path.with_suffix(".log")
    log_path.touch()
    process = _AGENTS.start(_SCRIPT, [str(config_path), "fake_worker.py", *worker_arguments], log_path)
    agent = Agent(process, log_path)
    workers: list[int] = []
    try:
        yield agent
        if process.poll() is None:
            workers = agent.worker_pids()
            process.terminate()
            assert process.wait(60) == 0, agent.log
        assert "Traceback" not in agent.log and "never retrieved" not in agent.log, agent.log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)
        deadline = time.monotonic() + 60
        while alive(workers):
            assert time.monotonic() < deadline, "workers outlive their agent"
            time.sleep(0.01)


@contextlib.asynccontextmanager
async def backend_of_hosts(
    folder: pathlib.Path,
    model: pathlib.Path,
    *worker_arguments: str,
    backend: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[tuple[BackendProcess, str]]:
    """Runs a backend with hosts 2 on a TCP port; gives it and its address."""
    address = free_address()
    secret = write_secret(folder / "engine-secret")
    settings = {"listen": address, "token_file": str(secret), **(backend or {})}
    engine = {"device": "cpu", "hosts": 2, "max_worker_restarts": 20, **engine}
    async with running_backend(folder, model, *worker_arguments, backend=settings, **engine) as process:
        await asyncio.to_thread(process.wait_listening)
        yield process, address


async def joined(agent: Agent) -> None:
    await until(lambda: agent.log_lines("joined"))


class Network:
    """A TCP proxy whose connections can be cut, or hold all bytes back."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return "{}:{}".format(*self._server.sockets[0].getsockname())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            onward = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, onward[1]}
            await asyncio.gather(self._pump(reader, onward[1]), self._pump(onward[0], writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Closes all connections; new ones are made."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def hold(self) -> None:
        """Lets no byte through from now on, and closes nothing."""
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    async def close(self) -> None:
        self.release()
        self.cut()
        if self._server is not None:
            self._server.close()


@contextlib.asynccontextmanager
async def network(target: str) -> AsyncIterator[tuple[Network, str]]:
    """A network to a target, and the address at which it is entered."""
    proxy = Network(target)
    try:
        yield proxy, await proxy.start()
    finally:
        await proxy.close()
