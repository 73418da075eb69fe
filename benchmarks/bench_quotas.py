"""What a noisy key does to a quiet one on two engines that share its quota.

Two backends whose workers compute nothing in steps of a set length, one service process, and two
keys. The quiet one asks at a steady rate. The noisy one asks for far more than it may have, comes
back when a refusal says, and its prompts go to both engines. In turns the quiet key is alone,
beside the noisy one with its quota, and beside one without. Reported are the quiet key's times to
the first token, the most generations that the engines had of the noisy one at a time, asked again
and again before the quiet one begins, and how many of its requests were admitted. What computing
for both costs a device is not in it (`tests/engine/limits/test_quota_fairness.py` simulates that).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.figures import environment, percentile, report
from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_service.auth.api_keys import ApiKey, KeyFile, Limits, digest_of

_ROWS = 16
_QUIET_PER_S, _QUIET_TOKENS = 8.0, 8
_NOISY_TOKENS = 100
# What a refusal for want of streams says.
_RETRY_S = 1.0
_ENGINES = 2
_ARMS = ("alone", "noisy", "unlimited")


class Noise:
    """What the noisy key was given."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.num_admitted = self.num_refused = 0
        # At a time, as the engines counted it while nobody else asked.
        self.most_active = 0


def _spec(tokens: int) -> inference_pb2.GenerateRequest:
    ids = [random.randrange(10, 500) for _ in range(64)]
    stop = generation_pb2.StopConditions(max_tokens=tokens, ignore_eos=True)
    return inference_pb2.GenerateRequest(
        spec=generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=ids), stop=stop)
    )


def _bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def _ttft_s(stub: Any) -> float:
    began_s = time.perf_counter()
    first_s = None
    async for answer in stub.Generate(_spec(_QUIET_TOKENS), metadata=_bearer("quiet")):
        if first_s is None and answer.event.HasField("delta"):
            first_s = time.perf_counter() - began_s
    assert first_s is not None
    return first_s


async def _quiet(stub: Any, seconds: float) -> list[float]:
    asked = []
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        asked.append(asyncio.create_task(_ttft_s(stub)))
        await asyncio.sleep(random.expovariate(_QUIET_PER_S))
    return list(await asyncio.gather(*asked))


async def _noisy(stub: Any, key: str, noise: Noise) -> None:
    """One of the noisy key's callers: it asks again and again."""
    while True:
        try:
            call = stub.Generate(_spec(_NOISY_TOKENS), metadata=_bearer(key))
            await call.read()
            noise.num_admitted += 1
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            noise.num_refused += 1
            await asyncio.sleep(_RETRY_S)


async def _arm(stub: Any, arm: str, seconds: float, callers: int) -> tuple[list[float], Noise]:
    noise = Noise()
    tasks = [asyncio.create_task(_noisy(stub, arm, noise)) for _ in range(callers if arm != "alone" else 0)]
    try:
        await _watch(stub, noise, seconds / 4)
        return await _quiet(stub, seconds), noise
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [error for error in ended if isinstance(error, Exception)]
        if failed:
            raise failed[0]


async def _watch(stub: Any, noise: Noise, seconds: float) -> None:
    """Notes what the engines have of the noisy key, while it is alone."""
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        load = await stub.GetLoad(inference_pb2.GetLoadRequest(), metadata=_bearer("quiet"))
        noise.most_active = max(noise.most_active, load.running_sequences + load.waiting_requests)
        await asyncio.sleep(0.02)


async def _measure(address: str, options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[float]] = {arm: [] for arm in _ARMS}
    noises: dict[str, list[Noise]] = {arm: [] for arm in _ARMS}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await _until_served(stub)
        for _ in range(options.rounds):
            for arm in _ARMS:
                found, noise = await _arm(stub, arm, options.seconds, options.callers)
                times[arm] += found
                noises[arm].append(noise)
    figures: dict[str, Any] = {}
    for arm in _ARMS:
        figures |= {f"{arm}_requests": len(times[arm])}
        for share in (0.5, 0.95):
            figures[f"{arm}_ttft_p{share * 100:g}_ms"] = round(1e3 * percentile(times[arm], share), 2)
        figures[f"{arm}_p95_ratio"] = round(percentile(times[arm], 0.95) / percentile(times["alone"], 0.95), 3)
        figures[f"{arm}_most_active"] = max(noise.most_active for noise in noises[arm])
        figures[f"{arm}_admitted"] = sum(noise.num_admitted for noise in noises[arm])
        figures[f"{arm}_refused"] = sum(noise.num_refused for noise in noises[arm])
    return figures


async def _until_served(stub: Any) -> None:
    """Waits until the engines have answered, and knew each other in some requests."""
    for _ in range(20 * _ENGINES):
        try:
            await _ttft_s(stub)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(1)


def _write_keys(path: pathlib.Path, streams: int) -> None:
    limits = {"quiet": Limits(), "noisy": Limits(concurrent_streams=streams), "unlimited": Limits()}
    keys = tuple(
        ApiKey(name, digest_of(name).hex(), ("generate", "read"), ("*",), limits=limit)
        for name, limit in limits.items()
    )
    path.write_bytes(KeyFile(keys).encode())
    path.chmod(0o600)


@contextlib.contextmanager
def _servers(options: argparse.Namespace) -> Iterator[str]:
    """The address of a service over two engines."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        folder = pathlib.Path(name)
        _write_keys(folder / "keys.json", options.streams)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        engines = [f"unix:{folder / f'engine-{index}.sock'}" for index in range(_ENGINES)]
        engine = {"model": str(options.model), "max_num_seqs": _ROWS, "num_blocks": 1024, "load": "dummy"}
        commands = [
            ("benchmarks.instant_backend", str(options.step_ms), {"engine": engine, "listen": listen})
            for listen in engines
        ]
        service = {"listen": [address], "engine": engines, "keys_file": str(folder / "keys.json")}
        for index, (module, *before, config) in enumerate([*commands, ("headrace_service", service)]):
            path = folder / f"config-{index}.json"
            path.write_text(json.dumps(config))
            log = ending.enter_context((folder / f"{index}.log").open("wb"))
            command = [sys.executable, "-m", str(module), *map(str, before), "--config-json", str(path)]
            process = subprocess.Popen(command, stderr=log, env=environment())
            ending.callback(process.wait)
            ending.callback(process.terminate)
        try:
            yield address
        except BaseException:
            for path in sorted(folder.glob("*.log")):
                print(path.read_text(errors="replace")[-1500:], file=sys.stderr)
            raise


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=8, help="the noisy key's quota")
    parser.add_argument("--callers", type=int, default=32, help="callers of the noisy key")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    with _servers(options) as address:
        figures = asyncio.run(_measure(address, options))
    about = {name: getattr(options, name) for name in ("step_ms", "streams", "callers", "seconds", "rounds")}
    report("quotas", {"engines": _ENGINES, **about, **figures}, options.json)


if __name__ == "__main__":
    main()
