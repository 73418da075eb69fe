"""A real gRPC server with canned answers, for tests of the clients.

The prompt chooses the behaviour. The "model" answers with the words w0 w1 w2 ..., one token each:
token i has id 100 + i and the text "w<i> ". The server records what clients did to it
(cancellations, attempts, requests), so that tests can assert what a server observes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, timestamp_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from tests.clients.canned_admin import REVISION, CannedAdmin, canned_model
from tests.clients.canned_sessions import CannedSessions

from headrace.v1 import admin_pb2_grpc, inference_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import inference_pb2 as api

REQUEST_ID = "req-1"
PROMPT_TOKENS = 6


def word(index: int, output_index: int = 0) -> str:
    """Text of one token."""
    return f"w{index} " if output_index == 0 else f"v{output_index}.{index} "


def answer(tokens: int, output_index: int = 0) -> str:
    """Text of a whole answer."""
    return "".join(word(i, output_index) for i in range(tokens))


def token(index: int, output_index: int = 0) -> int:
    """Id of one token."""
    return 100 + index + 1000 * output_index


def delta(
    first: int, count: int = 1, output_index: int = 0, logprobs: int | None = None, with_text: bool = True
) -> pb.GenerationEvent:
    """The delta of `count` tokens from `first` on."""
    indices = range(first, first + count)
    text = "".join(word(i, output_index) for i in indices)
    event = pb.GenerationEvent(
        delta=pb.Delta(
            output_index=output_index,
            first_token_index=first,
            token_ids=[token(i, output_index) for i in indices],
            content=[pb.Content(text=text)] if with_text else [],
        )
    )
    if logprobs is not None:
        event.delta.logprobs.CopyFrom(_logprobs(indices, logprobs))
    return event


def _logprobs(indices: range, top: int) -> pb.Logprobs:
    return pb.Logprobs(
        sampled=[-0.5 * (i + 1) for i in indices],
        ranks=[1] * len(indices),
        top_counts=[top] * len(indices),
        top_token_ids=[100 + i + j for i in indices for j in range(top)],
        top_logprobs=[-0.5 * (i + 1) - j for i in indices for j in range(top)],
    )


def prompt_logprobs(tokens: int, top: int, part: int = 2) -> Iterator[pb.GenerationEvent]:
    """Returns the messages of a prompt of `tokens` tokens, in parts of `part` tokens."""
    for first in range(1, tokens, part):
        run = range(first, min(first + part, tokens))
        yield pb.GenerationEvent(
            prompt_logprobs=pb.PromptLogprobs(first_token_index=first, logprobs=_logprobs(run, top))
        )


def accepted(prompt_tokens: int = PROMPT_TOKENS) -> pb.GenerationEvent:
    """The first event of every stream."""
    return pb.GenerationEvent(
        accepted=pb.Accepted(request_id=REQUEST_ID, model_revision=REVISION, prompt_tokens=prompt_tokens)
    )


def finished(
    output_index: int = 0, reason: pb.FinishReason = pb.FINISH_REASON_STOP, **fields: Any
) -> pb.GenerationEvent:
    """The end of one output."""
    return pb.GenerationEvent(output_finished=pb.OutputFinished(output_index=output_index, reason=reason, **fields))


def done(output_tokens: int) -> pb.GenerationEvent:
    """The last event, with a ledger whose parts add up."""
    ledger = pb.Ledger(
        queued_ns=1_000_000,
        prefill_ns=2_000_000,
        decode_ns=6_000_000,
        detokenize_and_send_ns=1_000_000,
        end_to_end_ns=10_000_000,
        ttft_ns=3_000_000,
        step_count=output_tokens,
        preemptions=0,
    )
    usage = pb.Usage(prompt_tokens=PROMPT_TOKENS, output_tokens=output_tokens, cached_tokens=1)
    return pb.GenerationEvent(done=pb.Done(usage=usage, ledger=ledger))


def rich_status(code: int, message: str, *details: Any) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with google.rpc details."""
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Any) -> None:
    """Aborts the call with a status that carries details."""
    context.set_trailing_metadata(rich_status(code.value[0], message, *details))
    context.abort(code, message)


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    """RetryInfo with a delay."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(int(seconds * 1e9))
    return info


def _refuse_empty(spec: pb.GenerationSpec, context: grpc.ServicerContext) -> None:
    """Refuses a prompt without text as a server does: with all rules that the request breaks."""
    if spec.model not in ("", "canned"):
        refuse(context, grpc.StatusCode.NOT_FOUND, f"no model {spec.model}")
    broken = [("spec.text", "must not be empty")]
    if spec.sampling.temperature > 100:
        broken.append(("spec.sampling.temperature", "must be at most 100"))
    violation = error_details_pb2.BadRequest.FieldViolation
    bad = error_details_pb2.BadRequest(field_violations=[violation(field=f, description=d) for f, d in broken])
    refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "; ".join(f"{f}: {d}" for f, d in broken), bad)


@dataclass
class Observed:
    """What the server saw."""

    attempts: Counter[str] = field(default_factory=Counter)
    requests: list[Any] = field(default_factory=list)
    time_remaining: list[float | None] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)


class CannedService(CannedSessions, inference_pb2_grpc.InferenceServiceServicer):
    """Behaviour by prompt; see `_stream`."""

    def __init__(self) -> None:
        self.seen = Observed()
        # For "flaky": how many attempts of an RPC fail before one succeeds.
        self.failures = 0
        # For Subscribe: after how many events each attempt breaks; attempts beyond the list do not.
        self.breaks: list[int] = []
        self.outputs = 1
        self.tokens = 12
        # For Subscribe: after how many events each attempt calls `on_stall` and sends nothing more
        # until its connection is gone.
        self.stalls: list[int] = []
        # For Subscribe: whether the log holds the prompt's log probabilities, cut differently at
        # each attempt.
        self.with_prompt_logprobs = False
        self.on_stall: Callable[[], object] = lambda: None

    def _see(self, rpc: str, request: Any, context: grpc.ServicerContext) -> None:
        self.seen.attempts[rpc] += 1
        self.seen.requests.append(request)
        self.seen.time_remaining.append(context.time_remaining())
        self.seen.peers.append(context.peer())
        self.seen.metadata.append(dict(context.invocation_metadata()))

    def _fail_first(self, rpc: str, context: grpc.ServicerContext, *details: Any) -> None:
        if self.seen.attempts[rpc] <= self.failures:
            refuse(context, grpc.StatusCode.UNAVAILABLE, "restarting", *details)

    def _stream(
        self, prompt: str, spec: pb.GenerationSpec, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerationEvent]:
        tokens = spec.stop.max_tokens or 5
        if prompt == "invalid":
            violation = error_details_pb2.BadRequest.FieldViolation(
                field="spec.sampling.top_p", description="must be above 0 and at most 1 (given: 7)"
            )
            bad = error_details_pb2.BadRequest(field_violations=[violation])
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "invalid request", bad)
        if prompt == "overloaded":
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", retry_info(1.5))
        if prompt == "endless" and not context.add_callback(self.seen.cancelled.set):
            # It ended before it began.
            self.seen.cancelled.set()
        yield accepted()
        yield pb.GenerationEvent(started=pb.Started(cached_tokens=1))
        if prompt in ("endless", "fast"):
            index = 0
            while context.is_active():
                yield delta(index)
                index += 1
                time.sleep(0.01 if prompt == "endless" else 0)
            return
        if prompt == "broken":
            yield delta(0)
            info = error_details_pb2.RequestInfo(request_id="req-from-details")
            refuse(context, grpc.StatusCode.UNAVAILABLE, "the engine died", retry_info(2), info)
        if prompt == "failing":
            yield delta(0)
            error = status_pb2.Status(code=code_pb2.INTERNAL, message="a step produced NaN")
            yield finished(reason=pb.FINISH_REASON_ERROR, error=error)
            yield done(1)
            return
        if prompt == "no-done":
            yield delta(0)
            return
        if spec.HasField("prompt_logprobs"):
            yield from prompt_logprobs(PROMPT_TOKENS, spec.prompt_logprobs)
        for index in range(tokens):
            for output in range(spec.n or 1):
                logprobs = spec.logprobs if spec.HasField("logprobs") else None
                yield delta(index, 1, output, logprobs, with_text=not spec.token_ids_only)
            if prompt == "slow":
                time.sleep(0.05)
            if prompt == "resumed" and index == 1:
                yield pb.GenerationEvent(resumed=pb.Resumed(pause_ns=1_500_000_000))
        for output in range(spec.n or 1):
            reason = pb.FINISH_REASON_LENGTH if spec.stop.HasField("max_tokens") else pb.FINISH_REASON_STOP
            yield finished(output, reason)
        yield done(tokens * (spec.n or 1))

    def Generate(self, request: api.GenerateRequest, context: grpc.ServicerContext) -> Iterator[api.GenerateResponse]:
        self._see("Generate", request, context)
        prompt = request.spec.text
        if prompt == "flaky":
            self._fail_first("Generate", context)
        for event in self._stream(prompt, request.spec, context):
            yield api.GenerateResponse(event=event)

    def Chat(self, request: api.ChatRequest, context: grpc.ServicerContext) -> Iterator[api.ChatResponse]:
        self._see("Chat", request, context)
        for event in self._stream(request.messages[-1].parts[0].text, request.spec, context):
            yield api.ChatResponse(event=event)

    def Complete(self, request: api.CompleteRequest, context: grpc.ServicerContext) -> api.CompleteResponse:
        self._see("Complete", request, context)
        if request.spec.text == "flaky":
            self._fail_first("Complete", context)
        if request.spec.WhichOneof("prompt") == "text" and not request.spec.text:
            _refuse_empty(request.spec, context)
        end = done(2).done
        output = api.Output(
            token_ids=[token(0), token(1)],
            content=[pb.Content(text=answer(2))],
            logprobs=_logprobs(range(2), 2),
            finished=pb.OutputFinished(reason=pb.FINISH_REASON_STOP, matched_stop=pb.MatchedStop(token_id=7)),
        )
        if request.spec.text == "failing":
            output.finished.reason = pb.FINISH_REASON_ERROR
            output.finished.error.CopyFrom(status_pb2.Status(code=code_pb2.INTERNAL, message="a step produced NaN"))
        parts = (event.prompt_logprobs for event in prompt_logprobs(PROMPT_TOKENS, request.spec.prompt_logprobs))
        return api.CompleteResponse(
            request_id=REQUEST_ID,
            model_revision=REVISION,
            outputs=[output],
            usage=end.usage,
            ledger=end.ledger,
            prompt_logprobs=parts if request.spec.HasField("prompt_logprobs") else [],
        )

    def Submit(self, request: api.SubmitRequest, context: grpc.ServicerContext) -> api.SubmitResponse:
        self._see("Submit", request, context)
        self._fail_first("Submit", context)
        return api.SubmitResponse(request_id=REQUEST_ID, model_revision=REVISION, prompt_tokens=3)

    def Subscribe(
        self, request: api.SubscribeRequest, context: grpc.ServicerContext
    ) -> Iterator[api.SubscribeResponse]:
        self._see("Subscribe", request, context)
        if request.request_id != REQUEST_ID:
            refuse(context, grpc.StatusCode.NOT_FOUND, f"no request {request.request_id}")
        attempt = self.seen.attempts["Subscribe"] - 1
        limit = self.breaks[attempt] if attempt < len(self.breaks) else None
        stall = self.stalls[attempt] if attempt < len(self.stalls) else None
        for index, event in enumerate(self._log(request, attempt)):
            if index == limit:
                refuse(context, grpc.StatusCode.UNAVAILABLE, "connection lost", retry_info(0.01))
            if index == stall:
                self._stall(context)
                return
            yield api.SubscribeResponse(event=event)

    def _stall(self, context: grpc.ServicerContext) -> None:
        # What was sent has time to arrive; what did not arrive is asked for again.
        time.sleep(0.2)
        self.on_stall()
        while context.is_active():
            time.sleep(0.01)

    def _log(self, request: api.SubscribeRequest, attempt: int) -> Iterator[pb.GenerationEvent]:
        """The whole log from `from_token` on.

        Each attempt cuts it into deltas of another size, output by output at another pace.
        """
        outputs = [request.output_index] if request.HasField("output_index") else list(range(self.outputs))
        yield accepted()
        yield pb.GenerationEvent(started=pb.Started(cached_tokens=1))
        if self.with_prompt_logprobs:
            yield from prompt_logprobs(PROMPT_TOKENS, 1, part=1 + attempt % 3)
        position = dict.fromkeys(outputs, request.from_token)
        open_outputs = list(outputs)
        while open_outputs:
            for output in list(open_outputs):
                count = min(1 + (attempt + output) % 3, self.tokens - position[output])
                if count > 0:
                    yield delta(position[output], count, output, logprobs=2)
                    position[output] += count
                # Also at once, for a reader that asks for the token after the last one.
                if position[output] == self.tokens:
                    yield finished(output)
                    open_outputs.remove(output)
        yield done(self.tokens * self.outputs)

    def Cancel(self, request: api.CancelRequest, context: grpc.ServicerContext) -> api.CancelResponse:
        self._see("Cancel", request, context)
        if request.request_id != REQUEST_ID:
            refuse(context, grpc.StatusCode.NOT_FOUND, f"no request {request.request_id}")
        return api.CancelResponse(cancelled=True)

    def ListRequests(self, request: api.ListRequestsRequest, context: grpc.ServicerContext) -> api.ListRequestsResponse:
        self._see("ListRequests", request, context)
        first = int(request.page_token or 0)
        size = min(request.page_size or 2, 5 - first)
        rows = [
            api.RequestSummary(
                request_id=f"req-{i}",
                state=api.REQUEST_STATE_FINISHED,
                prompt_tokens=3,
                output_tokens=i,
                detached=True,
                model="canned",
                create_time=timestamp_pb2.Timestamp(seconds=1_700_000_000),
                finish_reasons=[pb.FINISH_REASON_STOP],
            )
            for i in range(first, first + size)
        ]
        following = first + size
        return api.ListRequestsResponse(requests=rows, next_page_token=str(following) if following < 5 else "")

    def Tokenize(self, request: api.TokenizeRequest, context: grpc.ServicerContext) -> api.TokenizeResponse:
        self._see("Tokenize", request, context)
        self._fail_first("Tokenize", context)
        return api.TokenizeResponse(token_ids=list(request.text.encode()))

    def Detokenize(self, request: api.DetokenizeRequest, context: grpc.ServicerContext) -> api.DetokenizeResponse:
        self._see("Detokenize", request, context)
        return api.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModel(self, request: api.GetModelRequest, context: grpc.ServicerContext) -> api.GetModelResponse:
        self._see("GetModel", request, context)
        if request.model not in ("", "canned"):
            refuse(context, grpc.StatusCode.NOT_FOUND, f"no model {request.model}")
        return api.GetModelResponse(model=canned_model())

    def ListModels(self, request: api.ListModelsRequest, context: grpc.ServicerContext) -> api.ListModelsResponse:
        self._see("ListModels", request, context)
        return api.ListModelsResponse(models=[canned_model()])

    def GetLoad(self, request: api.GetLoadRequest, context: grpc.ServicerContext) -> api.GetLoadResponse:
        self._see("GetLoad", request, context)
        if request.model == "sleep":
            time.sleep(3)
        return api.GetLoadResponse(
            running_sequences=4,
            kv_cache_usage=0.5,
            kv_blocks=64,
            serving=True,
            model="canned",
            max_running_sequences=8,
            prefix_cache_hit_rate=0.25,
            draining=True,
            open_calls=5,
            max_open_calls=64,
        )


@dataclass
class CannedServer:
    """A running server: its address and its service."""

    address: str
    service: CannedService
    admin: CannedAdmin

    @property
    def seen(self) -> Observed:
        """What the server saw."""
        return self.service.seen


@contextlib.contextmanager
def canned_server(
    address: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> Iterator[CannedServer]:
    """Serves on a free loopback port (or the given address) until the block ends."""
    service, admin = CannedService(), CannedAdmin()
    # No port sharing: a second server on the same port would take some of the calls.
    options = [("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(16), interceptors=interceptors, options=options)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield CannedServer(f"127.0.0.1:{port}" if address.endswith(":0") else address, service, admin)
    finally:
        server.stop(None).wait()
