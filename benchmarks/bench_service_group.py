"""How many messages a second a group of services carries, against one of them.

    python -m benchmarks.bench_service_group --services 4 --turns 2 --json FILE

Each service stands for a host of its own: it has a core, and beside it a core for a fake engine and
two for the client processes that read from it, so that nobody shares the service's core and a host
is as wide alone as it is in the group. Hyper-threads of one core are of one host. Where the machine
has fewer cores all processes share them (`shares_cores`), and the figure says nothing of a group.
Every service knows every engine and sends to all of them, as services of one model do.

Clients read as fast as messages come, so the services' own cores are the limit: the figure is only
worth something where `cpu_share` of a service is near 1, and messages a second count what clients
read within the window. Cores of one machine are not equally quick, so each service is measured
alone, and then all at once, in turns in one set of processes; who is not read from does nothing
meanwhile but hear its engines' heartbeats. `times_mean` is the group against the mean of those that
were alone, `times_best` against the quickest of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil

from benchmarks import figures, front_parties
from benchmarks.front_client import WARM_UP_S
from headrace_service.config import ServiceConfig

_CORES_OF_HOST = 4
_CLIENTS_OF_HOST = 2
_CLIENT_START_S = 2.0


class Host(NamedTuple):
    """One service of the group, and the cores that stand for its host."""

    service: frozenset[int]
    engine: frozenset[int]
    clients: frozenset[int]

    @classmethod
    def deal(cls, cores: Sequence[int], num_hosts: int) -> list[Host]:
        """Deals cores out, siblings one behind the other, four to each host; too few are shared."""
        if len(cores) < _CORES_OF_HOST * num_hosts:
            return [cls(*[frozenset(cores)] * 3)] * num_hosts
        order = sorted(cores, key=lambda core: (_siblings(core), core))
        blocks = [order[first : first + _CORES_OF_HOST] for first in range(0, len(order), _CORES_OF_HOST)]
        return [
            cls(frozenset(block[:1]), frozenset(block[2:3]), frozenset(block[1::2])) for block in blocks[:num_hosts]
        ]


class Group(NamedTuple):
    """Services that run, each at an address of its own."""

    hosts: list[Host]
    addresses: list[str]
    processes: list[psutil.Process]


def _siblings(core: int) -> int:
    """Returns the first of the cores that share this one's hardware; itself if that is unknown."""
    path = pathlib.Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core


@contextlib.contextmanager
def running(hosts: list[Host], model: pathlib.Path, folder: str) -> Iterator[Group]:
    """Starts engines and services, and ends them."""
    engines = tuple(f"unix:{folder}/engine-{index}.sock" for index in range(len(hosts)))
    with contextlib.ExitStack() as stack:
        for host, engine in zip(hosts, engines, strict=True):
            backend = ("-m", "benchmarks.fake_backend", "--model", str(model), "--listen", engine)
            stack.enter_context(front_parties.process(host.engine, *backend))
        addresses, processes = [], []
        for host in hosts:
            address = f"127.0.0.1:{front_parties.free_port()}"
            config = ServiceConfig(listen=(address,), engine=engines, log_level="error").model_dump_json()
            command = ("-m", "headrace_service", "--config-json", "-")
            service = stack.enter_context(front_parties.process(host.service, *command, stdin=config))
            addresses.append(address)
            processes.append(psutil.Process(service.pid))
        for address in addresses:
            front_parties.wait_until_answering(address)
        yield Group(hosts, addresses, processes)


def measure(group: Group, services: Sequence[int], streams: int, seconds: float) -> dict[str, Any]:
    """Reads from some services of a group for a while.

    Args:
        group: Services that run.
        services: Which of them are read from.
        streams: Generations at once through each of them.
        seconds: Length of the window.
    """
    start_s = time.monotonic() + _CLIENT_START_S
    clients = [
        _client(group, index, streams // _CLIENTS_OF_HOST, seconds, start_s)
        for index in services
        for _ in range(_CLIENTS_OF_HOST)
    ]
    time.sleep(max(0.0, start_s + WARM_UP_S - time.monotonic()))
    processes = [group.processes[index] for index in services]
    before = [_cpu_s(process) for process in processes]
    time.sleep(seconds)
    cpu_s = [_cpu_s(process) - start for process, start in zip(processes, before, strict=True)]
    results = [json.loads(client.communicate(timeout=60)[0]) for client in clients]
    messages = [result["messages"] for result in results]
    return {
        "services": list(services),
        "messages_per_s": round(sum(messages) / seconds),
        "messages_per_s_of_each": [
            round(sum(messages[first : first + _CLIENTS_OF_HOST]) / seconds)
            for first in range(0, len(messages), _CLIENTS_OF_HOST)
        ],
        "tokens_per_message": round(sum(result["tokens"] for result in results) / max(1, sum(messages)), 3),
        "cpu_share_of_each": [round(spent_s / seconds, 3) for spent_s in cpu_s],
    }


def _client(group: Group, index: int, streams: int, seconds: float, start_s: float) -> subprocess.Popen[str]:
    command = ["-m", "benchmarks.front_client", "generate", group.addresses[index], streams, seconds, start_s]
    with front_parties.on_cores(group.hosts[index].clients):
        return subprocess.Popen(
            [sys.executable, *map(str, command)], env=figures.environment(), stdout=subprocess.PIPE, text=True
        )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    parser.add_argument("--services", type=int, default=4, help="services of the group, from 2 on")
    parser.add_argument("--turns", type=int, default=2, help="times that each and all are measured")
    parser.add_argument("--streams", type=int, default=64, help="generations at once through each service")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument(
        "--model", type=pathlib.Path, default=figures.ROOT / "models" / "demo", help="folder with a tokenizer"
    )
    return parser.parse_args()


def main() -> None:
    """Measures each service alone and all of them in turns, and reports."""
    options = _options()
    if options.services < 2:
        raise SystemExit(f"--services: {options.services} is no group; from 2 on")
    hosts = Host.deal(sorted(os.sched_getaffinity(0)), options.services)
    turns = []
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, running(hosts, options.model, folder) as group:
        for _ in range(options.turns):
            turns.append(_turn(group, options.streams, options.seconds))
            print(json.dumps(turns[-1]), file=sys.stderr, flush=True)
    result = {
        "shares_cores": hosts[0] == hosts[1],
        "hosts": [[sorted(cores) for cores in host] for host in hosts],
        "times_mean": statistics.median(turn["times_mean"] for turn in turns),
        "times_best": statistics.median(turn["times_best"] for turn in turns),
        "turns": turns,
    }
    figures.report("service_group", result, options.json)


def _turn(group: Group, streams: int, seconds: float) -> dict[str, Any]:
    everyone = range(len(group.hosts))
    alone = [measure(group, [index], streams, seconds) for index in everyone]
    together = measure(group, everyone, streams, seconds)
    rates = [one["messages_per_s"] for one in alone]
    return {
        "times_mean": round(together["messages_per_s"] / statistics.mean(rates), 3),
        "times_best": round(together["messages_per_s"] / max(rates), 3),
        "alone": alone,
        "together": together,
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
