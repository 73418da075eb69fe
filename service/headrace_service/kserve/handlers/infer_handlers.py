"""ModelInfer, and what every inference goes through on either RPC.

Find the model, check the request, count how it ended.

Owns the accounting around a request: whatever raises after the model was found counts as a failure
of that model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.kserve.accounting import Account
from headrace_service.kserve.messages import infer_request, responses
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.shared_memory import SharedMemoryRegions
from headrace_service.kserve.models import Model, ModelDirectory
from headrace_service.kserve.statistics import Statistics


class Inference:
    """The steps that unary and streamed requests share.

    Args:
        models: what there is to infer.
        regions: where tensors may be besides the message.
        statistics: counts what becomes of requests.
        max_bytes: largest message.

    Attributes:
        max_bytes: likewise.
    """

    def __init__(
        self, models: ModelDirectory, regions: SharedMemoryRegions, statistics: Statistics, max_bytes: int
    ) -> None:
        self.max_bytes = max_bytes
        self._models = models
        self._regions = regions
        self._statistics = statistics

    @contextlib.contextmanager
    def request(self, message: pb.ModelInferRequest, call: Call) -> Iterator[tuple[Model, InferRequest, Account]]:
        """Checks a request, and counts what becomes of it within the block.

        Raises:
            ServiceError: the model is not found, or the request breaks a rule.
        """
        if len(message.id) > responses.MAX_ID_CHARS:
            raise errors.invalid_field(
                "id", f"must have at most {responses.MAX_ID_CHARS} characters: every response repeats it"
            )
        model = self._models.find(message.model_name, message.model_version, call.caller)
        counters = self._statistics.of(model.name)
        account = Account(counters, call.arrival_ns, decoupled=model.signature.decoupled)
        try:
            request = infer_request.parse(message, model.signature, self._regions.of(call.caller))
            account.batch_size = request.batch_size if model.signature.max_batch_size else 1
            yield model, request, account
        except BaseException as error:
            account.failed(cancelled=isinstance(error, asyncio.CancelledError))
            raise
        account.succeeded()

    def check_size(self, message: bytes) -> None:
        """Raises RESOURCE_EXHAUSTED for an answer that is larger than a message.

        gRPC would end a whole stream for it.
        """
        if len(message) > self.max_bytes:
            raise errors.too_large("the answer", len(message), self.max_bytes, "use stream, or ask for less at once")

    def is_decoupled(self, message: pb.ModelInferRequest, call: Call) -> bool:
        """Returns whether a request may have any number of responses.

        One that names no model has one, its error.
        """
        try:
            model = self._models.find(message.model_name, message.model_version, call.caller)
        except errors.ServiceError:
            return False
        return model.signature.decoupled

    async def infer(self, message: pb.ModelInferRequest, call: Call) -> bytes:
        """Answers one request by one response."""
        call.check_deadline()
        with self.request(message, call) as (model, request, account):
            response = await model.answer(request, call, account)
            self.check_size(response)
            account.responded(time.monotonic_ns())
        return response
