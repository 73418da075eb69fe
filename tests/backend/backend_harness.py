"""Starts backend processes with fake workers, and speaks the engine protocol to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2
from tests.backend.fake_worker import VOCABULARY
from tests.backend.subscription import Subscription as Subscription
from tests.support.engine_requests import greedy_request
from tests.support.forked_processes import ForkedProcess, ForkingPython
from tests.support.processes import alive

from headrace_protos.engine.v1 import engine_pb2, engine_pb2_grpc
from headrace_request.request import LAYOUT, Request

_REPOSITORY = pathlib.Path(__file__).parents[2]
_PACKAGES = [str(_REPOSITORY / part) for part in ("backend", "both_sides", "kernels", "protos/python", ".")]
_PYTHONPATH = os.pathsep.join([*_PACKAGES, os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": _PYTHONPATH.rstrip(os.pathsep)}
_SCRIPT = pathlib.Path(__file__).with_name("run_backend.py")
# Has imported what a backend does; none is started as in a server here, because of its worker.
_BACKENDS = ForkingPython(["tests.backend.run_backend"], ENVIRONMENT)
# Of what must come at all; nothing of it takes longer than a moment on a quiet machine.
LIMIT_S = 240.0


def write_model_folder(folder: pathlib.Path, context: int = 2048) -> pathlib.Path:
    """Writes a folder for dummy weights: a tiny Llama's config and a byte-level tokenizer.

    The tokenizer's token 4 + b is the byte b.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s0>": 0, "<s1>": 1, "<s2>": 2, "<s3>": 3} | {text: 4 + i for i, text in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclasses.dataclass
class BackendProcess:
    process: subprocess.Popen[str] | ForkedProcess
    address: str
    socket: pathlib.Path
    log_path: pathlib.Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        # The last line may be half written.
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def worker_pids(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_listening(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.log_lines("listening"):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.02)

    async def wait_exit(self, timeout_s: float = LIMIT_S) -> int:
        return await asyncio.to_thread(self.process.wait, timeout_s)


def start_backend(
    folder: pathlib.Path,
    model: pathlib.Path,
    *worker_arguments: str,
    name: str = "engine.sock",
    backend: dict[str, Any] | None = None,
    inside: Sequence[str] = (),
    worker: str = "fake_worker.py",
    **engine: Any,
) -> BackendProcess:
    """Starts one, with a worker from this folder.

    `engine` are fields of EngineConfig, `backend` of BackendConfig. With `inside`, the beginning of
    its command line, it is a command of its own; else it is forked from a Python that has imported
    what it needs.
    """
    private = folder / "private"
    socket = private / name
    listen = f"unix:{socket}"
    fields = {"model": str(model), "load": "dummy", "num_blocks": 256, **engine}
    config = {"engine": fields, "listen": listen, "log_format": "json", "log_level": "debug", **(backend or {})}
    config_path = folder / f"config-{time.monotonic_ns()}.json"
    config_path.write_text(json.dumps(config))
    log_path = config_path.with_suffix(".log")
    arguments = [str(config_path), str(folder), worker, *worker_arguments]
    process: subprocess.Popen[str] | ForkedProcess
    if inside:
        with log_path.open("w") as log:
            command = [*inside, sys.executable, str(_SCRIPT), *arguments]
            process = subprocess.Popen(command, env=ENVIRONMENT, stderr=log, text=True)
    else:
        log_path.touch()
        process = _BACKENDS.start(_SCRIPT, arguments, log_path)
    return BackendProcess(process, config["listen"], socket, log_path)


@contextlib.asynccontextmanager
async def running_backend(*arguments: Any, **options: Any) -> AsyncIterator[BackendProcess]:
    """Runs a backend and ends it with SIGTERM unless the test has ended it.

    It must leave nothing behind.
    """
    backend = start_backend(*arguments, **options)
    try:
        yield backend
        children = backend.worker_pids() if backend.process.poll() is None else []
        backend.process.terminate()
        exit_code = await backend.wait_exit()
        assert exit_code in (0, -9, 1, 2, 3), backend.log
        await until(lambda: not alive(children))
        assert "Traceback" not in backend.log, backend.log
        assert "never retrieved" not in backend.log, backend.log
    finally:
        if backend.process.poll() is None:
            backend.process.kill()
            backend.process.wait()


async def until(condition: Callable[[], Any], timeout_s: float = LIMIT_S) -> Any:
    """Waits for a condition and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)
    return value


class EngineClient:
    """One stream to a backend."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.subscriptions: dict[int, Subscription] = {}
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.states: list[tuple[float, engine_pb2.EngineState]] = []
        self.welcomes: list[engine_pb2.Welcome] = []
        self.unguarded: list[engine_pb2.OwnedRequest] = []
        self.error: grpc.aio.AioRpcError | None = None
        self.numbers = itertools.count(1)
        self.reader: asyncio.Task[None] | None = None
        self.quota_reports: list[engine_pb2.QuotaReport] = []
        # Of each message with tokens or events.
        self.step_records: list[bytes] = []

    async def send(self, **message: Any) -> None:
        await self.stream.write(engine_pb2.ToEngine(**message))

    async def hello(self, wants_step_records: bool = False, guards: bool = False) -> None:
        hello = engine_pb2.Hello(
            protocol_version=4,
            service_name="test",
            wants_step_records=wants_step_records,
            request_layout=LAYOUT,
            guards=guards,
        )
        await self.send(hello=hello)
        self.reader = asyncio.ensure_future(self._read())
        await until(lambda: self.welcomes or self.error)

    async def wait_serving(self) -> None:
        await until(lambda: self.states and self.states[-1][1].serving)

    async def _read(self) -> None:
        try:
            async for message in self.stream:
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error
        for subscription in self.subscriptions.values():
            subscription.settled.set()

    def _take(self, message: engine_pb2.FromEngine) -> None:
        kind = message.WhichOneof("message")
        value = getattr(message, kind)
        if kind == "welcome":
            self.welcomes.append(value)
            self.states.append((time.monotonic(), value.state))
        elif kind == "state":
            self.states.append((time.monotonic(), value))
        elif kind == "step":
            self._take_step(value)
        elif kind == "unguarded":
            self.unguarded += value.requests
        elif kind == "quota_report":
            self.quota_reports.append(value)
        elif kind == "refused" and value.handle in self.subscriptions:
            self.subscriptions[value.handle].refused = value.status
            self.subscriptions[value.handle].settled.set()
        elif kind in ("added", "attached") and value.handle:
            self._take_begin(kind, value)
        else:
            self.answers[value.query_id].set_result(value)

    def _take_begin(self, kind: str, value: Any) -> None:
        subscription = self.subscriptions[value.handle]
        setattr(subscription, kind, value)
        if kind == "added":
            subscription.request_id = value.request_id
            if value.existing:
                subscription.settled.set()
            return
        for part in value.prompt_logprobs:
            subscription.take_prompt(part)
        for log in value.outputs:
            tokens = np.frombuffer(log.token_ids, "<u4").tolist()
            subscription.outputs.setdefault(log.output_index, []).extend(tokens)
            if log.HasField("end"):
                subscription.ends[log.output_index] = log.end
        if value.HasField("done"):
            subscription.done = value.done
            subscription.settled.set()

    def _take_step(self, step: engine_pb2.StepOutputs) -> None:
        handles = np.frombuffer(step.handles, "<u4").tolist()
        outputs = np.frombuffer(step.output_indices, "<u2").tolist()
        tokens = np.frombuffer(step.tokens, "<u4").tolist()
        for event in step.events:
            if event.HasField("prompt_logprobs"):
                assert not any(self.subscriptions[event.handle].outputs.values()), (
                    "the prompt comes before the first token"
                )
                self.subscriptions[event.handle].take_prompt(event.prompt_logprobs)
        for handle, output, token in zip(handles, outputs, tokens, strict=True):
            self.subscriptions[handle].outputs.setdefault(output, []).append(token)
        for handle in set(handles):
            self.subscriptions[handle].num_messages += 1
        self.step_records.append(step.step_records)
        self._take_logprobs(step, handles)
        for event in step.events:
            if not event.HasField("prompt_logprobs"):
                self._take_event(self.subscriptions[event.handle], event)

    def _take_logprobs(self, step: engine_pb2.StepOutputs, handles: list[int]) -> None:
        columns = step.logprobs
        tops = iter(np.frombuffer(columns.top_token_ids, "<u4").tolist())
        for row, sampled, count in zip(
            np.frombuffer(step.logprob_rows, "<u4").tolist(),
            np.frombuffer(columns.sampled, "<f4").tolist(),
            np.frombuffer(columns.top_counts, "<u2").tolist(),
            strict=True,
        ):
            self.subscriptions[handles[row]].logprobs.append((sampled, [next(tops) for _ in range(count)]))

    def _take_event(self, subscription: Subscription, event: engine_pb2.RequestEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "started":
            subscription.started = True
        elif kind == "resumed":
            subscription.resumed += 1
        elif kind == "output_end":
            subscription.ends[event.output_end.output_index] = event.output_end
        else:
            assert subscription.done is None, "one Done"
            subscription.done = event.done
            subscription.settled.set()

    def subscription(self) -> Subscription:
        handle = next(self.numbers)
        subscription = self.subscriptions[handle] = Subscription(handle)
        return subscription

    async def add(self, prompt: list[int], max_tokens: int, **fields: Any) -> Subscription:
        """Sends an add; does not wait for its answer."""
        subscription = self.subscription()
        message = add_message(prompt, max_tokens, handle=subscription.handle, **fields)
        subscription.request_id = message.request_id
        await self.send(add=message)
        return subscription

    async def attach(self, request_id: str, from_token: int = 0, **fields: Any) -> Subscription:
        subscription = self.subscription()
        attach = engine_pb2.AttachRequest(
            handle=subscription.handle, request_id=request_id, from_token=from_token, **fields
        )
        await self.send(attach=attach)
        return subscription

    async def subscription_for_other_spec(self, idempotency_key: str) -> Subscription:
        """An add whose key is known and whose spec is another; waits for the answer."""
        subscription = self.subscription()
        message = add_message([9], 7, handle=subscription.handle, idempotency_key=idempotency_key, detached=True)
        message.spec_digest = b"\x01" * 32
        await self.send(add=message)
        return await settled(subscription)

    async def ask(self, kind: str, message: Any) -> Any:
        """Sends a question with a query id and waits for its answer."""
        message.query_id = next(self.numbers) + 1_000_000
        future = self.answers[message.query_id] = asyncio.get_running_loop().create_future()
        await self.send(**{kind: message})
        return await asyncio.wait_for(future, LIMIT_S)

    async def abort(self, request_id: str, cause: int = 1) -> engine_pb2.Aborted:
        aborted: engine_pb2.Aborted = await self.ask(
            "abort", engine_pb2.AbortRequest(request_id=request_id, cause=cause)
        )
        return aborted

    async def load(self) -> engine_pb2.Load:
        load: engine_pb2.Load = await self.ask("load", engine_pb2.LoadQuery())
        return load


_request_numbers = itertools.count(1)


def add_message(prompt: list[int], max_tokens: int, **fields: Any) -> engine_pb2.AddRequest:
    """A greedy request. Fields of `Request` go by their names, those of the message too."""
    wanted = {name: fields.pop(name) for name in Request.__struct_fields__ if name in fields}
    message = engine_pb2.AddRequest(
        request_id=f"request-{next(_request_numbers)}",
        request=greedy_request(prompt, max_tokens, **wanted).encode(),
        spec_digest=bytes(32),
    )
    message.MergeFrom(engine_pb2.AddRequest(**fields))
    return message


async def settled(subscription: Subscription, timeout_s: float = LIMIT_S) -> Subscription:
    """Waits until a subscription has ended, one way or another."""
    await asyncio.wait_for(subscription.settled.wait(), timeout_s)
    return subscription


@contextlib.asynccontextmanager
async def connected(
    address: str, metadata: tuple[tuple[str, str], ...] = (), wants_step_records: bool = False, guards: bool = False
) -> AsyncIterator[EngineClient]:
    """A stream on which hello was said."""
    options = [
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 50),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
        client = EngineClient(engine_pb2_grpc.EngineServiceStub(channel).Connect(metadata=metadata or None))
        await client.hello(wants_step_records, guards)
        try:
            yield client
        finally:
            client.stream.cancel()
            if client.reader is not None:
                await asyncio.wait([client.reader], timeout=5)


async def idle(client: EngineClient) -> None:
    """Waits until nothing runs or waits and no block is held, soon after the last request."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        load = await client.load()
        if load.running_sequences == load.waiting_requests == load.used_blocks == 0 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.02)
    assert (load.running_sequences, load.waiting_requests, load.used_blocks) == (0, 0, 0)
    assert load.free_blocks + load.cached_blocks == load.kv_blocks


def details(status: status_pb2.Status) -> dict[str, Any]:
    """The details of a status by type name."""
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = unpacked = kind()
                packed.Unpack(unpacked)
    return found


def error_status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status in an RPC's trailers."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()
