"""Small models that client programs of this protocol are tried against.

They are served only where the server is started with them.

Owns what they have in common: a function from a checked request to the outputs of each response,
behind the product's own `Model`. What they compute is in `arithmetic`, `sequences` and `timing`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from headrace_service.auth.caller import Caller
from headrace_service.calls.call import Call
from headrace_service.kserve.accounting import Account
from headrace_service.kserve.messages import refusals, responses
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature
from headrace_service.kserve.messages.tensors import Tensor
from headrace_service.kserve.models import Responder

Outputs = Mapping[str, Tensor]
# Yields the outputs of each response, and whether it is the last.
Compute = Callable[[InferRequest], AsyncIterator[tuple[Outputs, bool]]]


class ConformanceModel:
    """One of them."""

    ready = True

    def __init__(self, name: str, signature: Signature, compute: Compute) -> None:
        self.name = name
        self.signature = signature
        self._compute = compute

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties that ModelMetadata reports."""
        return {"purpose": "conformance"}

    def check_allowed(self, caller: Caller) -> None:
        """Raises PERMISSION_DENIED if the caller may not use the model."""
        caller.check_model(self.name)

    async def answer(self, request: InferRequest, call: Call, account: Account) -> bytes:
        """Returns the one response to a request, serialized."""
        if self.signature.decoupled:
            raise refusals.unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        account.inputs_read()
        async for outputs, _ in self._compute(request):
            return responses.whole(request, outputs)
        raise AssertionError("one response per request")

    async def respond(self, request: InferRequest, call: Call, account: Account, responder: Responder) -> None:
        """Sends the responses to a request on a stream."""
        if not self.signature.decoupled:
            await responder.send(await self.answer(request, call, account))
            return
        account.inputs_read()
        final = False
        async for outputs, final in self._compute(request):
            await responder.send(responses.whole(request, outputs, decoupled=True, final=final))
        if not final and request.parameters.empty_final:
            account.next_is_empty()
            await responder.send(responses.empty_final(request))
