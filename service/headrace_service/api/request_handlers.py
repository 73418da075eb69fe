"""Cancel and ListRequests: a caller's own requests, by id.

The engine owns the requests; this is the form in which callers ask for them.
"""

from __future__ import annotations

from typing import cast

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_request import limits
from headrace_service import validation
from headrace_service.api import event_wire, request_pages
from headrace_service.calls.call import Call
from headrace_service.engines.served_model import ServedModel
from headrace_service.service_core import ServiceCore
from headrace_service.violations import Violations

_DEFAULT_PAGE_SIZE = 100


class RequestHandlers:
    """Handlers of the RPCs that list and end requests."""

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    async def cancel(self, request: inference_pb2.CancelRequest, call: Call) -> inference_pb2.CancelResponse:
        """Ends a request of the caller's."""
        validation.check_request_id(request.request_id)
        was_active = await self._core.generations.cancel(request.request_id, call)
        return inference_pb2.CancelResponse(cancelled=was_active)

    async def list_requests(
        self, request: inference_pb2.ListRequestsRequest, call: Call
    ) -> inference_pb2.ListRequestsResponse:
        """Lists a page of the caller's requests, newest first, of one model or of all."""
        models = self._core.models
        asked = list(models.find(request.model, call.caller).engines) if request.model else models.known()
        page = await request_pages.page(asked, _query(request, call.tenant), request.page_token)
        return inference_pb2.ListRequestsResponse(
            requests=[_summary(row, model) for row, model in page.rows], next_page_token=page.next_page_token
        )


def _query(request: inference_pb2.ListRequestsRequest, tenant: str) -> engine_pb2.ListQuery:
    found = Violations()
    page_size = request.page_size if request.HasField("page_size") else _DEFAULT_PAGE_SIZE
    limit = limits.MAX_PAGE_SIZE
    found.require(1 <= page_size <= limit, "page_size", f"must be at least 1 and at most {limit}")
    found.require(request.state in inference_pb2.RequestState.values(), "state", "must be a RequestState of this API")
    found.require(
        request_pages.is_token(request.page_token), "page_token", "must be a next_page_token of an earlier page"
    )
    found.raise_if_any()
    return engine_pb2.ListQuery(tenant=tenant, state=request.state, page_size=page_size)


def _summary(row: engine_pb2.RequestRow, model: ServedModel) -> inference_pb2.RequestSummary:
    summary = inference_pb2.RequestSummary(
        request_id=row.request_id,
        state=cast(inference_pb2.RequestState, row.state),
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        finish_reasons=_reasons(row),
        detached=row.detached,
        model=model.name,
    )
    summary.create_time.FromNanoseconds(row.created_at_ns)
    return summary


def _reasons(row: engine_pb2.RequestRow) -> list[generation_pb2.FinishReason]:
    return [event_wire.finish_reason(reason) for reason in row.finish_reasons]
