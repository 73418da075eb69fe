"""What a step plan costs to cross to another host, beside the ring of this one.

    python -m benchmarks.bench_hosts --json FILE

The plan is the scheduler's own, of 64 decoding rows. It goes to a worker that answers at once: over
the ring of this host; then over a real RanksService, loopback TCP, a real rank agent and that one's
ring; in turns, so that a busy machine treats both alike. CPU time is that of all processes on the
way but the workers', for a plan and its result together; the times there and back are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import psutil
import uvloop

from benchmarks import figures
from benchmarks.bench_scheduler import Case, InstantWorker, build_engine
from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.server.hosts.host_table import HostTable
from headrace_backend.server.hosts.joined_host import JoinedHost
from headrace_backend.server.hosts.ranks_service import RanksService
from headrace_backend.server.logs import configure_logs
from headrace_backend.server.workers.host_ranks import HostRanks, WorkerLaunch, plan_ring_bytes
from headrace_backend.server.workers.worker_process import RankDescriptors, Record
from headrace_backend.step.messages import RecordKind
from headrace_backend.step.plan import StepResult
from headrace_model_folder import ModelFolder

_ROWS = 64
_MODEL = figures.ROOT / "models" / "demo"
_WORKER = (sys.executable, "-m", "benchmarks.echo_worker")
_AGENT = """
import sys
from headrace_backend.rank_agent.main import main
sys.exit(main(sys.argv[1:], worker_command=(sys.executable, "-m", "benchmarks.echo_worker")))
"""
_WARM_UP = 50


def decode_plan() -> bytes:
    """The plan of a step in which all rows decode, as the engine sends it."""
    engine: Engine = build_engine(Case(_ROWS, 0), 100)
    worker = InstantWorker()
    while True:
        plan = engine.plan()
        assert plan is not None, "there is always somebody to decode"
        if plan.sample.rows.size == _ROWS and not plan.admissions and plan.forward.token_ids.size == 0:
            return plan.encode()
        engine.settle(StepResult.decode(worker.run(plan.encode())))
        engine.take_outboxes()


class Answers:
    """Hears the results of one way, as a group of workers would."""

    def __init__(self) -> None:
        """Nothing came yet."""
        self.came = asyncio.Event()
        self.lost = ""

    def on_records(self, rank: int, records: list[Record]) -> None:
        """Takes results."""
        self.came.set()

    def on_counters(self, rank: int, counters: Sequence[int]) -> None:
        """Takes marks, which mean nothing here."""

    def on_exit(self, rank: int, exit_code: int, cause: str) -> None:
        """Takes what must not happen."""
        self.on_host_lost(f"worker {rank} ended with {exit_code}{cause}")

    def on_host_lost(self, reason: str) -> None:
        """Takes what must not happen."""
        self.lost = reason
        self.came.set()


class Way:
    """One way to a worker and back, with the CPU time of the processes on it."""

    def __init__(self, name: str, answers: Answers, send: Callable[[bytes], None], others: Sequence[int]) -> None:
        """Takes a way that is open.

        Args:
            name: For the results.
            answers: Hears what comes back.
            send: Sends a plan.
            others: Processes on the way beside this one.
        """
        self.name = name
        self._answers, self._send = answers, send
        self._others = [psutil.Process(pid) for pid in others]
        self.cpu_us: list[float] = []
        self.times_us: list[float] = []

    async def turn(self, plan: bytes, count: int) -> None:
        """Sends a plan so many times, each after the answer to the one before."""
        began_s = self._cpu_s()
        for _ in range(count):
            self._answers.came.clear()
            sent = time.perf_counter()
            self._send(plan)
            await self._answers.came.wait()
            assert not self._answers.lost, self._answers.lost
            self.times_us.append((time.perf_counter() - sent) * 1e6)
        self.cpu_us.append((self._cpu_s() - began_s) / count * 1e6)

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._others]
        return time.process_time() + sum((each.user + each.system for each in times), start=0.0)

    def result(self) -> dict[str, Any]:
        """Returns CPU time of the median turn, and the median time there and back."""
        return {
            "way": self.name,
            "cpu_us": statistics.median(self.cpu_us),
            "there_and_back_us": statistics.median(self.times_us),
        }


async def measure(turns: int, count: int, folder: pathlib.Path) -> dict[str, Any]:
    """Opens both ways and takes turns."""
    plan = decode_plan()
    config = EngineConfig(model=_MODEL, device="cpu", tp=2, hosts=2, max_num_seqs=_ROWS)
    opened = ModelFolder.open(_MODEL)
    launch = WorkerLaunch(config, 2048, _WORKER, vocab_size=opened.config.vocab_size)
    answers = Answers()
    ranks = HostRanks(launch, plan_ring_bytes(launch), answers.on_records)
    with_board = RankDescriptors.create(1)
    ranks.spawn(with_board)
    with_board.close()
    table = HostTable(config, 60.0)
    service = RanksService(config, opened.revision, table, None, plan_ring_bytes(launch))
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    agent_config = folder / "agent.json"
    agent_config.write_text(json.dumps({"join": f"127.0.0.1:{port}", "model": str(_MODEL), "device": "cpu"}))
    command = (sys.executable, "-c", _AGENT, "--config-json", str(agent_config))
    agent = await asyncio.create_subprocess_exec(*command, env=figures.environment())
    try:
        [host] = await table.gathered(lambda missing: None)
        ways = [
            Way("ring", answers, lambda sent: ranks.plans.write(RecordKind.STEP_PLAN, sent, 1.0), ()),
            remote_way(host, table, agent.pid),
        ]
        for way in ways:
            await way.turn(plan, _WARM_UP)
            way.cpu_us.clear()
            way.times_us.clear()
        for _ in range(turns):
            for way in ways:
                await way.turn(plan, count)
    finally:
        agent.terminate()
        await agent.wait()
        await server.stop(0)
        ranks.kill()
        await ranks.wait_exited(10.0)
        ranks.close()
    return {"plan_bytes": len(plan), "rows": _ROWS, "results": [way.result() for way in ways]}


def remote_way(host: JoinedHost, table: HostTable, agent_pid: int) -> Way:
    """The way over another host's agent, whose worker is started."""
    answers = Answers()
    descriptors = table.new_meeting()
    assert descriptors.meeting is not None, "hosts have a place to meet"
    host.begin(descriptors.meeting, answers)
    descriptors.close()
    return Way("host", answers, lambda sent: host.send(RecordKind.STEP_PLAN, sent), (agent_pid,))


def rows(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The results for people."""
    yield "way   CPU us  there and back us"
    for result in results:
        yield f"{result['way']:4s}  {result['cpu_us']:6.0f}  {result['there_and_back_us']:17.0f}"


def main() -> None:
    """Measures both ways, prints them, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    parser.add_argument("--turns", type=int, default=10, help="turns of each way")
    parser.add_argument("--plans", type=int, default=200, help="plans of a turn")
    arguments = parser.parse_args()
    configure_logs("console", "error")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(figures.environment())
        measured = uvloop.run(measure(arguments.turns, arguments.plans, pathlib.Path(folder)))
    print("\n".join(rows(measured["results"])))
    first, second = (result["cpu_us"] for result in measured["results"])
    print(f"a plan of {measured['plan_bytes']} bytes: {second / first:.1f} times the CPU time of the ring")
    figures.report("hosts", {"turns": arguments.turns, "plans": arguments.plans, **measured}, arguments.json)


if __name__ == "__main__":
    main()
