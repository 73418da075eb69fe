"""One of several engines is killed under many streams: what is lost, and how long readers wait.

Real backends with a real model, each a process of its own, and one or two service processes that
know all of them. Every prompt and seed is asked twice: undisturbed, and with `kill -9` of the
engine that has most of the streams, once a quarter of the tokens has come. Each reader's ids and
text are compared with those of the undisturbed run, so that a token that is lost, doubled or
another one shows. A reader's pause is the time between the last token before its engine was lost
and the next one; it has queue, prompt and emitted tokens, which another engine computes anew, in
it.

Ways of reading: `generate`, a stream that ends with its call; `submit`, where what is submitted at
one service is read at the other.

    python -m benchmarks.bench_engine_loss --json benchmarks/results/engine-loss.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import figures
from benchmarks.backend_process import BackendProcess
from benchmarks.front_parties import free_port
from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_service.config import ServiceConfig
from headrace_service.engines import request_ids

_START_TIMEOUT_S = 300.0
_PROMPT_TOKENS = 24
_KILL_AT = 0.25
_WAYS = ("generate", "submit")


@dataclasses.dataclass
class Answer:
    """What one reader got."""

    request_id: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    # When each message with tokens came, and when the reader heard that another engine went on.
    came_s: list[float] = dataclasses.field(default_factory=list)
    resumed_s: float = 0.0
    error: str = ""

    def take(self, event: generation_pb2.GenerationEvent) -> None:
        """Takes one event."""
        now_s = time.perf_counter()
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.request_id = event.accepted.request_id
        elif kind == "resumed":
            self.resumed_s = now_s
        elif kind == "delta":
            self.tokens += event.delta.token_ids
            self.text += "".join(part.text for part in event.delta.content)
            self.came_s.append(now_s)

    @property
    def pause_s(self) -> float:
        """How long the reader waited for the token after the loss; nan: nothing followed."""
        before = [came_s for came_s in self.came_s if came_s < self.resumed_s]
        after = [came_s for came_s in self.came_s if came_s >= self.resumed_s]
        return after[0] - before[-1] if before and after else float("nan")

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two messages with tokens."""
        gaps = [later - earlier for earlier, later in zip(self.came_s, self.came_s[1:], strict=False)]
        return max(gaps, default=0.0)


class Engines:
    """Backends, each in a folder of its own, that may be killed and started again."""

    def __init__(self, folder: pathlib.Path, number: int, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._folders = [folder / str(index) for index in range(number)]
        for each in self._folders:
            each.mkdir(mode=0o700)
        self.processes = [BackendProcess(settings, each) for each in self._folders]

    @property
    def addresses(self) -> list[str]:
        """Addresses at which they listen."""
        return [process.address for process in self.processes]

    def kill(self, index: int) -> None:
        """Ends one as `kill -9` does; its workers die with it."""
        self.processes[index].kill()

    def start_again(self, index: int) -> None:
        """Starts one that was killed."""
        self.processes[index] = BackendProcess(self._settings, self._folders[index])

    def stop(self) -> None:
        """Ends all."""
        for process in self.processes:
            if process.exit_code is None:
                process.stop()


@contextlib.contextmanager
def services(engines: Sequence[str], number: int) -> Iterator[list[str]]:
    """Service processes that know all engines; yields their addresses."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(number)]
    running = [_service(address, engines) for address in addresses]
    try:
        yield addresses
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)


def _service(address: str, engines: Sequence[str]) -> subprocess.Popen[bytes]:
    config = ServiceConfig(listen=(address,), engine=tuple(engines), log_level="error").model_dump_json()
    command = [sys.executable, "-m", "headrace_service", "--config-json", "-"]
    process = subprocess.Popen(command, env=figures.environment(), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(config.encode())
    process.stdin.close()
    return process


class Readers:
    """Many readers of one run, spread over the services."""

    def __init__(self, stubs: Sequence[Any], specs: Sequence[generation_pb2.GenerationSpec], way: str) -> None:
        self._stubs = stubs
        self._specs = specs
        self._way = way
        self.answers = [Answer() for _ in specs]

    async def read_all(self) -> None:
        """Reads every answer to its end."""
        await asyncio.gather(*(self._read(index) for index in range(len(self._specs))))

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return sum(len(answer.tokens) for answer in self.answers)

    async def _read(self, index: int) -> None:
        answer = self.answers[index]
        try:
            async for response in await self._call(index):
                answer.take(response.event)
        except grpc.aio.AioRpcError as error:
            answer.error = f"{error.code().name}: {error.details()}"

    async def _call(self, index: int) -> Any:
        spec, number = self._specs[index], len(self._stubs)
        stub, next_stub = self._stubs[index % number], self._stubs[(index + 1) % number]
        if self._way == "generate":
            return stub.Generate(inference_pb2.GenerateRequest(spec=spec))
        made = await stub.Submit(inference_pb2.SubmitRequest(spec=spec))
        return next_stub.Subscribe(inference_pb2.SubscribeRequest(request_id=made.request_id))


def _specs(number: int, max_tokens: int) -> list[generation_pb2.GenerationSpec]:
    """Prompts that begin differently, so that they are spread, each with a seed of its own."""
    rng = random.Random(11)
    specs = []
    for index in range(number):
        ids = [rng.randrange(10, 3900) for _ in range(_PROMPT_TOKENS)]
        spec = generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=ids))
        spec.stop.max_tokens, spec.stop.ignore_eos = max_tokens, True
        spec.sampling.temperature, spec.sampling.seed = 0.8, index
        specs.append(spec)
    return specs


async def _until_serving(channels: Sequence[grpc.aio.Channel], engines: Engines) -> None:
    """Waits until every service says that every engine serves."""
    end_s = time.monotonic() + _START_TIMEOUT_S
    for channel in channels:
        health = health_pb2_grpc.HealthStub(channel)
        for address in engines.addresses:
            while not await _is_serving(health, f"engine/{address}"):
                ended = [process.log_tail() for process in engines.processes if process.exit_code is not None]
                if ended or time.monotonic() > end_s:
                    raise SystemExit(f"not all engines serve: {ended}")
                await asyncio.sleep(0.1)


async def _is_serving(health: Any, name: str) -> bool:
    with contextlib.suppress(grpc.aio.AioRpcError):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False


async def _kill_when_due(readers: Readers, engines: Engines, name: str, due: int) -> int:
    """Kills the engine with most of the streams once so many tokens came; returns its index."""
    while readers.num_tokens < due:
        await asyncio.sleep(0.005)
    tags = [request_ids.tag_of(answer.request_id) for answer in readers.answers]
    own = [request_ids.model_tag(name, request_ids.number_of(address)) for address in engines.addresses]
    index = max(range(len(own)), key=lambda each: tags.count(own[each]))
    engines.kill(index)
    return index


def _compared(readers: Readers, wanted: Sequence[Answer]) -> dict[str, Any]:
    """What readers lost, and how long those waited whose engine was killed."""
    pairs = list(zip(readers.answers, wanted, strict=True))
    moved = [answer for answer in readers.answers if answer.resumed_s]
    others = [answer.longest_gap_s for answer in readers.answers if not answer.resumed_s]
    pauses = [answer.pause_s for answer in moved]
    return {
        "streams": len(pairs),
        "streams_of_the_lost_engine": len(moved),
        "streams_lost": sum(bool(answer.error) for answer in readers.answers),
        "errors": sorted({answer.error for answer in readers.answers if answer.error}),
        "tokens_lost_or_doubled": sum(abs(len(answer.tokens) - len(whole.tokens)) for answer, whole in pairs),
        "streams_with_other_tokens": sum(answer.tokens != whole.tokens for answer, whole in pairs),
        "streams_with_other_text": sum(answer.text != whole.text for answer, whole in pairs),
        "pause_p50_s": figures.percentile(pauses, 0.5),
        "pause_p99_s": figures.percentile(pauses, 0.99),
        "pause_max_s": max(pauses, default=float("nan")),
        "longest_gap_of_others_p50_s": figures.percentile(others, 0.5),
        "longest_gap_of_others_p99_s": figures.percentile(others, 0.99),
    }


async def _measure(
    addresses: Sequence[str], engines: Engines, options: argparse.Namespace, ways: Sequence[str]
) -> dict[str, Any]:
    """Both ways of reading through these services: undisturbed, then with the loss."""
    measured: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in addresses]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        specs = _specs(options.streams, options.tokens)
        for way in ways:
            await _until_serving(channels, engines)
            name = (await stubs[0].GetModel(inference_pb2.GetModelRequest())).model.name
            undisturbed = Readers(stubs, specs, way)
            began_s = time.perf_counter()
            await undisturbed.read_all()
            whole_s = time.perf_counter() - began_s
            readers = Readers(stubs, specs, way)
            due = int(_KILL_AT * undisturbed.num_tokens)
            killing = asyncio.create_task(_kill_when_due(readers, engines, name, due))
            await readers.read_all()
            gaps = [answer.longest_gap_s for answer in undisturbed.answers]
            measured[way] = {
                **_compared(readers, undisturbed.answers),
                "undisturbed_s": whole_s,
                "undisturbed_longest_gap_p50_s": figures.percentile(gaps, 0.5),
                "undisturbed_longest_gap_p99_s": figures.percentile(gaps, 0.99),
            }
            engines.start_again(await killing)
    return measured


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures with each number of services on the same engines."""
    settings = {
        "model": str(options.model),
        "device": "cpu",
        "dtype": "fp32",
        "max_num_seqs": options.rows,
        "num_blocks": options.rows * (-(-(_PROMPT_TOKENS + options.tokens) // 16) + 1),
        "worker_threads": 1,
    }
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-loss-") as name:
        engines = Engines(pathlib.Path(name), options.engines, settings)
        try:
            for number in options.services:
                with services(engines.addresses, number) as addresses:
                    measured[f"services_{number}"] = asyncio.run(_measure(addresses, engines, options, options.ways))
        finally:
            engines.stop()
    return {"engines": options.engines, "rows": options.rows, "tokens": options.tokens, **measured}


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=figures.ROOT / "models" / "demo")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--services", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=120, help="of each answer")
    parser.add_argument(
        "--rows", type=int, default=128, help="of each engine's batch, with room for a lost one's share"
    )
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    figures.report("engine_loss", run(options), options.json)


if __name__ == "__main__":
    main()
