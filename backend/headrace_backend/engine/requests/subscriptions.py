"""Who reads which request.

Owns the subscriptions of all streams and enters them as readers of requests and logs. Does not
decide what a lost reader means for a request (`readers`) nor what it may see (`token_log`).
"""

from __future__ import annotations

from headrace_backend.engine.errors import RefusalCode, RequestRefused, Violation
from headrace_backend.engine.events import OutputSnapshot
from headrace_backend.engine.request import Subscriber
from headrace_backend.engine.requests.outbox import Outboxes
from headrace_backend.engine.requests.sequence import LiveRequest


class Subscriptions:
    """Readers by stream and handle."""

    def __init__(self, outboxes: Outboxes) -> None:
        """None."""
        self._outboxes = outboxes
        self._requests: dict[int, dict[int, LiveRequest]] = {}

    def __len__(self) -> int:
        """Subscriptions of all streams."""
        return sum(len(handles) for handles in self._requests.values())

    def check_free(self, subscriber: Subscriber) -> None:
        """Raises RequestRefused INVALID_ARGUMENT if the stream already uses the handle."""
        if subscriber.handle in self._requests.get(subscriber.stream_id, {}):
            raise RequestRefused.invalid([Violation("handle", "is in use on this stream")])

    def add(self, subscriber: Subscriber, request: LiveRequest, output_index: int | None) -> None:
        """Subscribes a reader to one output or to all: to what is released and what follows."""
        stream_id, handle = subscriber
        reader = (self._outboxes.stream(stream_id), handle)
        self._requests.setdefault(stream_id, {})[handle] = request
        request.readers.append(reader)
        for log in request.logs if output_index is None else [request.logs[output_index]]:
            log.readers.append(reader)

    def remove(self, subscriber: Subscriber) -> LiveRequest | None:
        """Ends a subscription. Returns its request; None if there was no such subscription."""
        stream_id, handle = subscriber
        request = self._requests.get(stream_id, {}).pop(handle, None)
        if request is not None:
            reader = (self._outboxes.stream(stream_id), handle)
            request.readers.remove(reader)
            for log in request.logs:
                log.readers = [other for other in log.readers if other != reader]
        return request

    def handles(self, stream_id: int) -> list[Subscriber]:
        """A stream's subscriptions."""
        return [Subscriber(stream_id, handle) for handle in self._requests.get(stream_id, {})]

    def forget_stream(self, stream_id: int) -> None:
        """Drops a stream without subscriptions and what it was not sent."""
        remaining = self._requests.pop(stream_id, {})
        assert not remaining, "subscriptions end before their stream is forgotten"
        self._outboxes.forget(stream_id)

    def end_request(self, request: LiveRequest) -> None:
        """Ends the subscriptions of a request whose last event was sent."""
        for stream, handle in request.readers:
            del self._requests[stream.stream_id][handle]
        request.readers.clear()
        for log in request.logs:
            log.readers.clear()


def read_outputs(request: LiveRequest, output_index: int | None, from_token: int) -> list[OutputSnapshot]:
    """Snapshots of the outputs of a request that a reader asks for, one or all.

    Raises:
        RequestRefused: OUT_OF_RANGE.
    """
    if output_index is not None and not 0 <= output_index < len(request.logs):
        message = f"output_index: must be below the number of outputs, {len(request.logs)}"
        raise RequestRefused(RefusalCode.OUT_OF_RANGE, message)
    logs = request.logs if output_index is None else [request.logs[output_index]]
    fewest = min(log.num_released for log in logs)
    if not 0 <= from_token <= fewest:
        raise RequestRefused(RefusalCode.OUT_OF_RANGE, f"from_token: the output has {fewest} tokens so far")
    return [log.snapshot() for log in logs]
