"""A soak: thousands of random requests with cancels through one backend.

Afterwards nothing is left, late, or other than it was.

Prompts and answers of all lengths, every kind of sampling, shared beginnings, several outputs,
stops; a tenth is cancelled at some moment. The exit code is 1 if anything that must hold does not:

- every request ended once, with the number of tokens it had to have, and its tokens keep the
  request's own rules;
- nothing was compiled or captured after the workers were ready;
- no block, row, queue entry or descriptor stayed behind, and the workers are the same processes;
- memory of backend, workers and card is flat from the second quarter to the last;
- a greedy request on the idle engine has the same tokens before and after.

    python -m benchmarks.bench_soak --shape llama-3.1-8b --dtype bf16 --load dummy --seed 0 --json
    FILE

With `--through server` the same is asked of a whole server as users run it (`soak_server`): every
kind of call over gRPC, and each of its processes flat within a few MiB, which takes half an hour to
tell.

    python -m benchmarks.bench_soak --through server --seconds 1800 --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from benchmarks import soak_checks, soak_server
from benchmarks.engine_options import START_TIMEOUT_S, checked_config, engine_settings, model_folder, which_engine
from benchmarks.engine_session import EngineSession, Prompt, engine_session
from benchmarks.figures import provenance, write_json
from benchmarks.gpu_watch import GpuMemory
from benchmarks.soak_checks import Check, Sent
from benchmarks.soak_requests import CPU_SIZES, GPU_SIZES, RequestMaker, Sizes
from benchmarks.soak_watch import Watch
from headrace_backend.device_defaults import expects_gpu
from headrace_protos.engine.v1 import engine_pb2

# Logs of ended requests are kept on purpose; with few of them the backend's memory is flat too.
_SETTINGS = {"max_logs": 256}
# A small cache is full soon: its pages are all touched early, blocks are evicted, and sequences
# preempted.
_CPU_SETTINGS = {"num_blocks": 64}
_CANARY_TOKENS = 64
_SECONDS = 300.0
# After the last request was sent, or the time is up.
_DRAIN_S = 60.0
_IDLE_S = 10.0
_IDLE_POLL_S = 0.05
# How long requests take before any has ended.
_FIRST_LIFE_S = 0.1
_LIFE_WEIGHT = 1 / 16


class Soak:
    """One soak on one session."""

    def __init__(self, session: EngineSession, make: RequestMaker, sizes: Sizes, seconds: float) -> None:
        """Sends nothing yet; after `seconds` nothing more."""
        self._session = session
        self._make = make
        self._sizes = sizes
        self._seconds = seconds
        self._until_s = 0.0
        self._life_s = _FIRST_LIFE_S
        self._num_canaries = 0
        # The first canary's tokens, on the idle engine.
        self.first_canary: list[int] = []
        self.sent: list[Sent] = []
        # How many of its first tokens a canary among others had as the one before; None: none was
        # sent. In other batches sums may round otherwise, so that nothing follows from a
        # difference.
        self.canary_same_tokens: int | None = None
        self.wall_s = 0.0
        self.timed_out = False

    async def canary(self) -> list[int]:
        """The tokens of the greedy request that is always the same.

        Its salt is new: nothing of it comes from the prefix cache.
        """
        self._num_canaries += 1
        salt = f"canary {self._num_canaries}".encode()
        answer = await self._session.ask(Prompt.of(self._make.canary(), _CANARY_TOKENS, salt))
        tokens = answer.token_ids
        self.first_canary = self.first_canary or tokens
        return tokens

    async def fill(self) -> None:
        """Lets the engine take the memory that its longest prompt needs."""
        await self._session.generate(self._make.longest(), 1)

    async def run(self) -> None:
        """Sends everything, `concurrency` requests at a time, and waits for their ends."""
        begin_s = time.perf_counter()
        self._until_s = begin_s + self._seconds
        indices = iter(range(self._sizes.requests))
        callers = [asyncio.create_task(self._call(indices)) for _ in range(self._sizes.concurrency)]
        limit_s = self._seconds + _DRAIN_S
        ended, pending = await asyncio.wait(callers, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for caller in ended:
            caller.result()
        # Those that still wait are left alone: what the engine has of them is looked at next.
        self.timed_out = bool(pending)
        self.wall_s = time.perf_counter() - begin_s

    async def _call(self, indices: Iterator[int]) -> None:
        for index in indices:
            if time.perf_counter() > self._until_s:
                return
            await self._one(index)
            if index == self._sizes.requests // 2:
                during = await self.canary()
                self.canary_same_tokens = len(os.path.commonprefix([during, self.first_canary]))

    async def _one(self, index: int) -> None:
        request = self._make(index)
        answer = await self._session.send(request.prompt)
        sent = Sent(index, request, answer)
        self.sent.append(sent)
        if request.cancel is not None:
            await asyncio.wait([answer.finished], timeout=request.cancel.moment * self._life_s)
            sent.aborted = await self._session.abort(answer, request.cancel.cause)
        await answer.finished
        if request.cancel is None:
            self._life_s += (time.perf_counter() - answer.start_s - self._life_s) * _LIFE_WEIGHT


async def _at_rest(session: EngineSession) -> engine_pb2.Load:
    """The load once nothing runs, waits or is held; as it is, if that does not come."""
    until_s = time.perf_counter() + _IDLE_S
    load = await session.load()
    while load.running_sequences + load.waiting_requests + load.used_blocks and time.perf_counter() < until_s:
        await asyncio.sleep(_IDLE_POLL_S)
        load = await session.load()
    return load


@dataclasses.dataclass(frozen=True, slots=True)
class _Before:
    """The idle engine before the soak."""

    canary: list[int]
    workers: list[int]
    descriptors: int

    @classmethod
    async def of(cls, session: EngineSession, soak: Soak) -> _Before:
        canary = await soak.canary()
        process = session.process
        return cls(canary, [worker.pid for worker in process.workers()], process.open_descriptors())


async def _soaked(session: EngineSession, soak: Soak, watch: Watch) -> list[Check]:
    """Soaks, then looks at everything."""
    await soak.fill()
    before = await _Before.of(session, soak)
    watching = asyncio.create_task(watch.run())
    try:
        await soak.run()
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    load = await _at_rest(session)
    checks = [soak_checks.answers_check(soak.sent), *soak_checks.engine_checks(load)]
    if not soak.timed_out:
        after = await _Before.of(session, soak)
        late = (await session.load()).late_work
        checks += [
            soak_checks.same_check("canary", before.canary, after.canary, f"the same {_CANARY_TOKENS} tokens"),
            soak_checks.same_check("workers", before.workers, after.workers, "the same processes"),
            soak_checks.same_check("idle late work", load.late_work, late, "none on the idle engine"),
            soak_checks.descriptors_check(before.descriptors, after.descriptors),
        ]
    checks += [soak_checks.memory_check(name, samples) for name, samples in watch.memory.items()]
    return checks


def _figures(soak: Soak, watch: Watch, load: engine_pb2.Load, checks: list[Check]) -> dict[str, Any]:
    """What is to be said of a soak, checks aside."""
    ended = [sent.answer.done for sent in soak.sent if sent.answer.done is not None]
    prompt_tokens = sum(done.prompt_tokens for done in ended)
    output_tokens = sum(done.output_tokens for done in ended)
    reasons = collections.Counter(soak_checks.reason_name(end) for sent in soak.sent for end in sent.answer.ends)
    return {
        "requests": len(soak.sent),
        "wall_s": round(soak.wall_s, 2),
        "output_tok_s": round(output_tokens / soak.wall_s, 1),
        "input_tok_s": round(prompt_tokens / soak.wall_s, 1),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(done.cached_tokens for done in ended),
        "longest_prompt": max(sent.request.prompt.num_tokens for sent in soak.sent),
        "kinds": dict(collections.Counter(sent.request.kind for sent in soak.sent)),
        "ends": dict(reasons),
        "cancels": sum(sent.aborted is not None for sent in soak.sent),
        "cancels_in_time": sum(sent.was_cancelled for sent in soak.sent),
        "preemptions": load.preemptions,
        "steps": load.step_count,
        "most_running": watch.most_running,
        "most_waiting": watch.most_waiting,
        "late_work": load.late_work,
        "late_work_grew": watch.late_work,
        "canary_during_same_tokens": soak.canary_same_tokens,
        "memory_gib": {name: _quarters(samples) for name, samples in watch.memory.items()},
        "checks": [dataclasses.asdict(check) for check in checks],
        "ok": all(check.ok for check in checks),
    }


def _quarters(samples: list[int]) -> list[float]:
    """The maximum of each quarter of the time, in GiB."""
    ends = [place * len(samples) // 4 for place in range(5)]
    return [
        round(max(samples[first:last]) / 2**30, 4) for first, last in zip(ends, ends[1:], strict=False) if last > first
    ]


def _lines(result: dict[str, Any]) -> list[str]:
    """A soak as people read it in a terminal."""
    names = "prompt_tokens", "output_tokens", "cached_tokens", "longest_prompt", "preemptions", "steps", "most_running"
    ends = ", ".join(f"{count} by {reason}" for reason, count in sorted(result["ends"].items()))
    shown = [f"soak: {result['requests']} requests in {result['wall_s']:.1f} s, seed {result['seed']}"]
    shown += [f"  {name:<16}{result[name]:>12,}" for name in names]
    shown.append(f"  outputs ended: {ends}; {result['cancels_in_time']} of {result['cancels']} cancels in time")
    shown += [f"  memory of {name:<8} by quarter, GiB: {quarters}" for name, quarters in result["memory_gib"].items()]
    if result["late_work_grew"]:
        shown.append(f"  late work (at s, count): {result['late_work_grew'][:20]}")
    shown += [
        f"  {'ok    ' if check['ok'] else 'FAILED'}  {check['name']}: {check['message']}" for check in result["checks"]
    ]
    return shown


async def run(options: argparse.Namespace, settings: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Starts a backend, soaks it, and returns the record."""
    gpu = GpuMemory() if expects_gpu(options.device) else None
    async with engine_session(settings, START_TIMEOUT_S) as session:
        startup_s = round(time.perf_counter() - session.process.started_s, 2)
        model = session.model
        phases_s = session.process.phases_s()
        print(f"start-up {startup_s} s on {model.device}; phases {phases_s}", flush=True)
        make = RequestMaker(options.seed, sizes, model.vocabulary_size, model.max_context_tokens)
        soak, watch = Soak(session, make, sizes, options.seconds or _SECONDS), Watch(session, gpu)
        checks = await _soaked(session, soak, watch)
        if not options.seconds:
            message = f"{len(soak.sent)} of {sizes.requests} in {soak.wall_s:.0f} s"
            checks.append(Check("all sent", len(soak.sent) == sizes.requests, message))
        figures = _figures(soak, watch, await session.load(), checks)
        if not figures["ok"]:
            print(f"the end of the backend's log: {session.process.log_tail()}", flush=True)
    on_gpu = model.device.startswith("cuda")
    about = provenance(options.git)
    head = {
        "name": "soak",
        "gpu": gpu.name if gpu and on_gpu else "",
        "gpus": int(on_gpu),
        "shape": options.model.name if options.model else options.shape,
        "dtype": model.dtype,
        "seed": options.seed,
        **{name: about.pop(name) for name in ("git", "date", "command")},
    }
    tail = {"concurrency": sizes.concurrency, "startup_s": startup_s, "phases_s": phases_s}
    engine = {name: value for name, value in settings.items() if name != "model"}
    if gpu:
        gpu.close()
    return head | figures | tail | about | {"engine": engine}


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    which_engine(parser)
    parser.add_argument(
        "--through",
        choices=("engine", "server"),
        default="engine",
        help="engine: a backend alone, requests as token ids; server: all processes, the calls of the public client "
        "(takes --model, --device, --threads, --seed, --concurrency, --seconds)",
    )
    parser.add_argument("--requests", type=int, default=0, help="0: 10,000, on a CPU 200")
    parser.add_argument(
        "--concurrency", type=int, default=0, help="requests open at once; 0: 300, on a CPU 24; of a server 16"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help=f"send nothing more after so long, and be content with that; 0: {_SECONDS:.0f}, and all must be sent",
    )
    options = parser.parse_args()
    if options.through == "server" and not options.seconds:
        options.seconds = _SECONDS
    for name in ("requests", "concurrency", "seconds", "seed"):
        if getattr(options, name) < 0:
            parser.error(f"--{name}: should be 0 or more, is {getattr(options, name)}")
    return options


def _sizes(options: argparse.Namespace, on_gpu: bool) -> Sizes:
    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    chosen = {name: getattr(options, name) for name in ("requests", "concurrency") if getattr(options, name)}
    return dataclasses.replace(sizes, **chosen)


def main() -> int:
    """Command line; 1 if something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = _options(parser)
    result = uvloop.run(soak_server.run(options)) if options.through == "server" else _engine_soak(parser, options)
    if result is None:
        return 1
    print(json.dumps(result), flush=True)
    write_json(result, options.json)
    return 0 if result["ok"] else 1


def _engine_soak(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any] | None:
    """The soak of a backend alone, printed; None: it could not be made."""
    on_gpu = expects_gpu(options.device)
    with tempfile.TemporaryDirectory(prefix="headrace-shape-") as parent:
        folder = model_folder(options, pathlib.Path(parent)).resolve()
        settings = _SETTINGS | ({} if on_gpu else _CPU_SETTINGS) | engine_settings(options, folder)
        checked_config(parser, settings)
        try:
            result = uvloop.run(run(options, settings, _sizes(options, on_gpu)))
        except RuntimeError as error:
            print(f"soak: FAILED: {error}", flush=True)
            return None
    print("\n".join(_lines(result)), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
