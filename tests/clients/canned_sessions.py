"""The Session call of the canned server.

There is one message per step, in which every open generation gets one token.

Prompts choose the behaviour as in canned_service: "invalid" is refused, "endless" goes on until it
is cancelled, everything else answers with w0 w1 w2 ... With log probabilities the tokens come as
deltas, as from the real server.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import inference_pb2 as api


@dataclass
class _Open:
    """One generation of a session and what is still to come of it."""

    stream_id: int
    events: Iterator[pb.GenerationEvent]
    cancelled: bool = False


class CannedSessions:
    """To be mixed into the canned service, whose `_stream` and `_log` it plays."""

    seen: Any
    # Pause between two steps, and after how many of them the call breaks.
    step_seconds = 0.0
    session_breaks_after: int | None = None

    def Session(
        self, requests: Iterator[api.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[api.SessionResponse]:
        self._see("Session", None, context)  # type: ignore[attr-defined]
        context.add_callback(self.seen.cancelled.set)
        pending: queue.SimpleQueue[api.SessionRequest | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(requests, pending), daemon=True).start()
        generations: dict[int, _Open] = {}
        closed, steps = False, 0
        while context.is_active() and not (closed and not generations):
            response = api.SessionResponse()
            closed = self._take_requests(pending, generations, response, context) or closed
            for generation in list(generations.values()):
                if not self._step(generation, response):
                    generations.pop(generation.stream_id, None)
            if response.events or response.tokens.stream_ids:
                steps += 1
                yield response
            if steps == self.session_breaks_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")
            time.sleep(self.step_seconds)

    def _take_requests(
        self,
        pending: queue.SimpleQueue[api.SessionRequest | None],
        generations: dict[int, _Open],
        response: api.SessionResponse,
        context: grpc.ServicerContext,
    ) -> bool:
        """Does what was asked for; whether the caller has closed its side.

        Waits where there is nothing else to do.
        """
        closed = False
        while not closed and (not pending.empty() or not generations):
            try:
                asked = pending.get(timeout=0.05)
            except queue.Empty:
                return False
            if asked is None:
                closed = True
            else:
                self.seen.requests.append(asked)
                self._do(asked, generations, response, context)
        return closed

    def _do(
        self,
        asked: api.SessionRequest,
        generations: dict[int, _Open],
        response: api.SessionResponse,
        context: grpc.ServicerContext,
    ) -> None:
        if asked.HasField("cancel"):
            generation = generations.get(asked.stream_id)
            if generation is None:
                response.events.append(
                    _error(asked.stream_id, code_pb2.NOT_FOUND, "names no generation of this session")
                )
            elif asked.cancel.detach:
                del generations[asked.stream_id]
            else:
                generation.cancelled = True
        elif asked.HasField("attach"):
            request = api.SubscribeRequest(request_id=asked.attach.request_id, from_token=asked.attach.from_token)
            if asked.attach.request_id != "req-1":
                response.events.append(_error(asked.stream_id, code_pb2.NOT_FOUND, f"no request {request.request_id}"))
                return
            generations[asked.stream_id] = _Open(asked.stream_id, self._log(request, 0))  # type: ignore[attr-defined]
        else:
            spec = asked.submit.spec
            prompt = asked.submit.messages[-1].parts[0].text if asked.submit.messages else spec.text
            if prompt == "invalid":
                response.events.append(
                    _error(asked.stream_id, code_pb2.INVALID_ARGUMENT, "invalid request", "spec.text")
                )
                return
            generations[asked.stream_id] = _Open(
                asked.stream_id,
                self._stream(prompt, spec, context),  # type: ignore[attr-defined]
            )

    def _step(self, generation: _Open, response: api.SessionResponse) -> bool:
        """Adds a generation's events up to and with its next tokens; False once it has ended."""
        stream_id = generation.stream_id
        if generation.cancelled:
            finished = pb.OutputFinished(reason=pb.FINISH_REASON_CANCELLED)
            response.events.add(stream_id=stream_id, event=pb.GenerationEvent(output_finished=finished))
            response.events.add(stream_id=stream_id, event=pb.GenerationEvent(done=pb.Done()))
            return False
        for event in generation.events:
            if not event.HasField("delta"):
                response.events.add(stream_id=stream_id, event=event)
                if event.HasField("done"):
                    return False
            elif event.delta.HasField("logprobs"):
                response.events.add(stream_id=stream_id, event=event)
                return True
            else:
                _add_tokens(response.tokens, stream_id, event.delta)
                return True
        return False


def _add_tokens(tokens: api.SessionTokens, stream_id: int, delta: pb.Delta) -> None:
    """Appends to the columns, which stay empty as long as they say nothing."""
    count, before = len(delta.token_ids), len(tokens.stream_ids)
    if delta.output_index or tokens.output_indices:
        tokens.output_indices.extend([0] * (before - len(tokens.output_indices)) + [delta.output_index] * count)
    if delta.content or tokens.texts:
        text = "".join(piece.text for piece in delta.content)
        tokens.texts.extend([""] * (before - len(tokens.texts)) + [""] * (count - 1) + [text])
    tokens.stream_ids.extend([stream_id] * count)
    tokens.token_ids.extend(delta.token_ids)


def _error(stream_id: int, code: int, message: str, field: str = "") -> api.SessionEvent:
    status = status_pb2.Status(code=code, message=message)
    if field:
        packed = any_pb2.Any()
        packed.Pack(
            error_details_pb2.BadRequest(
                field_violations=[error_details_pb2.BadRequest.FieldViolation(field=field, description=message)]
            )
        )
        status.details.append(packed)
    return api.SessionEvent(stream_id=stream_id, error=status)


def _read(requests: Iterator[api.SessionRequest], pending: queue.SimpleQueue[api.SessionRequest | None]) -> None:
    try:
        for request in requests:
            pending.put(request)
    except Exception:  # the call has ended
        pass
    pending.put(None)
