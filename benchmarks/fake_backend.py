"""An engine without a model: it serves the engine protocol.

Every request gets its tokens at a set rate, or as fast as its stream takes them.

For benchmarks of what stands in front of the engine. Owns a minimal EngineService: add, abort,
detach, load and list are answered, attach finds nothing. Each step gives one token to every active
request of a stream in one StepOutputs, as the engine does; nothing is computed, nothing validated.

    python -m benchmarks.fake_backend --model models/demo --listen
    unix:/path/in/a/private/folder/engine.sock [--rate 50]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import pathlib
import signal
import time
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import uvloop
from google.rpc import code_pb2, status_pb2

from headrace_model_folder import ModelFolder
from headrace_protos.engine.v1 import engine_pb2, engine_pb2_grpc
from headrace_request.request import Request

_STALE_AFTER_NS = 3_000_000_000
_HEARTBEAT_S = 1.0
_CYCLE = 4096
# Steps between two looks at the event loop's other work, when a stream takes everything at once.
_BREATHE_STEPS = 16


def text_tokens(folder: ModelFolder) -> npt.NDArray[np.uint32]:
    """[4096] ids of ordinary tokens with plain ASCII text.

    So the detokenizer does real work and always ends at a character.
    """
    table = folder.token_table
    if table is None:
        raise SystemExit(f"{folder.path} has no tokenizer.json")
    ids = [
        number
        for number, text in enumerate(table.token_bytes)
        if text and number not in table.special_ids and text.isascii() and text.decode().isprintable()
    ]
    return np.resize(np.asarray(ids, np.uint32), _CYCLE)


@dataclasses.dataclass(slots=True)
class _Active:
    handle: int
    request_id: str
    prompt_tokens: int
    added_at_ns: int
    # Outputs, and how many tokens each gets.
    n: int
    max_tokens: int
    position: int = 0
    cancelled: bool = False


class _Stream:
    """One service's requests."""

    def __init__(self, context: Any, tokens: npt.NDArray[np.uint32], rate: float) -> None:
        self._context = context
        self._tokens = tokens
        self._period_s = 1 / rate if rate else 0.0
        self._active: list[_Active] = []
        self._answers: list[engine_pb2.FromEngine] = []
        self._wake = asyncio.Event()
        self._step_id = 0

    def send(self, answer: engine_pb2.FromEngine) -> None:
        self._answers.append(answer)
        self._wake.set()

    def take(self, message: engine_pb2.ToEngine) -> None:
        """One message of the service."""
        kind = message.WhichOneof("message")
        if kind == "add":
            self._add(message.add)
        elif kind == "abort":
            found = [active for active in self._active if active.request_id == message.abort.request_id]
            for active in found:
                active.cancelled = True
            aborted = engine_pb2.Aborted(query_id=message.abort.query_id, found=bool(found), was_active=bool(found))
            self.send(engine_pb2.FromEngine(aborted=aborted))
        elif kind == "detach":
            self._active = [active for active in self._active if active.handle != message.detach.handle]
        elif kind == "attach":
            status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="the fake backend keeps no logs")
            refused = engine_pb2.Refused(handle=message.attach.handle, status=status)
            self.send(engine_pb2.FromEngine(refused=refused))
        elif kind == "load":
            load = engine_pb2.Load(query_id=message.load.query_id, running_sequences=len(self._active))
            self.send(engine_pb2.FromEngine(load=load))
        elif kind == "list":
            self.send(engine_pb2.FromEngine(list=engine_pb2.RequestList(query_id=message.list.query_id)))

    def _add(self, add: engine_pb2.AddRequest) -> None:
        request = Request.decode(add.request)
        prompt_tokens = len(request.prompt_token_ids) // 4
        added = engine_pb2.Added(
            handle=add.handle, query_id=add.query_id, request_id=add.request_id, prompt_tokens=prompt_tokens
        )
        self.send(engine_pb2.FromEngine(added=added))
        if add.handle:
            now = time.monotonic_ns()
            self._active.append(
                _Active(add.handle, add.request_id, prompt_tokens, now, request.n, request.stop.max_tokens)
            )

    async def run_writer(self) -> None:
        """Answers first, then a step, for ever."""
        next_step_s = time.monotonic()
        while True:
            answers, self._answers = self._answers, []
            for answer in answers:
                await self._context.write(answer)
            if not self._active:
                self._wake.clear()
                if not self._answers:
                    await self._wake.wait()
                next_step_s = time.monotonic()
                continue
            await self._context.write(engine_pb2.FromEngine(step=self._step()))
            next_step_s += self._period_s
            delay_s = next_step_s - time.monotonic()
            if delay_s > 0 or self._step_id % _BREATHE_STEPS == 0:
                await asyncio.sleep(max(delay_s, 0))

    def _step(self) -> engine_pb2.StepOutputs:
        """One token for every output of every active request."""
        self._step_id += 1
        now = time.monotonic_ns()
        active = [one for one in self._active if not one.cancelled]
        counts = np.asarray([one.n for one in active], np.int64)
        handles = np.repeat(np.asarray([one.handle for one in active], "<u4"), counts)
        positions = np.repeat(np.asarray([one.position for one in active], np.int64), counts)
        outputs = np.concatenate([np.arange(n, dtype="<u2") for n in counts]) if active else np.empty(0, "<u2")
        step = engine_pb2.StepOutputs(
            step_id=self._step_id,
            handles=handles.tobytes(),
            output_indices=outputs.tobytes(),
            tokens=self._tokens[(handles + positions + outputs) % _CYCLE].tobytes(),
            planned_at_ns=now,
            settled_at_ns=now,
            batch_sequences=len(handles),
            batch_tokens=len(handles),
        )
        for one in self._active:
            self._add_events(step, one, now)
        self._active = [one for one in self._active if not one.cancelled and one.position < one.max_tokens]
        return step

    def _add_events(self, step: engine_pb2.StepOutputs, one: _Active, now: int) -> None:
        if one.position == 0:
            step.events.add(handle=one.handle).started.cached_tokens = 0
            step.events[-1].started.SetInParent()
        one.position += not one.cancelled
        if not one.cancelled and one.position < one.max_tokens:
            return
        reason = engine_pb2.OUTPUT_END_REASON_CANCELLED if one.cancelled else engine_pb2.OUTPUT_END_REASON_LENGTH
        for index in range(one.n):
            end = engine_pb2.OutputEnd(output_index=index, reason=reason)
            step.events.add(handle=one.handle, output_end=end)
        done = engine_pb2.RequestDone(
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.position * one.n,
            decode_ns=now - one.added_at_ns,
            step_count=one.position,
        )
        step.events.add(handle=one.handle, done=done)


class FakeBackend(engine_pb2_grpc.EngineServiceServicer):
    """Serves any number of services."""

    def __init__(self, folder: ModelFolder, rate: float) -> None:
        """`rate`: tokens per second and request; 0 is as fast as the stream takes them."""
        self._folder = folder
        self._tokens = text_tokens(folder)
        self._rate = rate

    def _state(self) -> engine_pb2.EngineState:
        return engine_pb2.EngineState(serving=True, reason="serving", stale_after_ns=_STALE_AFTER_NS)

    def _welcome(self) -> engine_pb2.FromEngine:
        config = self._folder.config
        model = engine_pb2.EngineModel(
            name=self._folder.name,
            revision=self._folder.revision,
            architecture=config.architecture,
            parameter_count=self._folder.parameter_count,
            dtype="fp32",
            vocabulary_size=config.vocab_size,
            max_context_tokens=config.max_position_embeddings,
            max_outputs=16,
            end_of_text_token_ids=self._folder.generation_defaults.eos_token_ids,
            kv_block_tokens=16,
            kv_blocks=1024,
            device="none",
            folder=str(self._folder.path),
            max_waiting_requests=1024,
        )
        return engine_pb2.FromEngine(welcome=engine_pb2.Welcome(protocol_version=4, model=model, state=self._state()))

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # the RPC's name
        """One service's stream."""
        stream = _Stream(context, self._tokens, self._rate)
        tasks = [asyncio.ensure_future(self._heartbeat(stream)), asyncio.ensure_future(stream.run_writer())]
        try:
            while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if message.WhichOneof("message") == "hello":
                    stream.send(self._welcome())
                else:
                    stream.take(message)
        finally:
            for task in tasks:
                task.cancel()

    async def _heartbeat(self, stream: _Stream) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            stream.send(engine_pb2.FromEngine(state=self._state()))


async def _serve(folder: ModelFolder, listen: str, rate: float) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(FakeBackend(folder, rate), server)
    server.add_insecure_port(listen)
    await server.start()
    print(f"fake backend for {folder.revision} on {listen}", flush=True)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await server.stop(0)


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=pathlib.Path, required=True, help="model folder with a tokenizer (weights are not read)"
    )
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT; not protected by itself")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="tokens per second and request; 0: as fast as the stream takes"
    )
    options = parser.parse_args()
    folder = ModelFolder.open(options.model, require_weights=False)
    uvloop.run(_serve(folder, options.listen, options.rate))


if __name__ == "__main__":
    main()
