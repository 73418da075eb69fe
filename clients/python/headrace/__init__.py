"""Headrace's Python client: typed sync and asyncio clients, and a private server for scripts.

    import headrace

    with headrace.Client("127.0.0.1:50051") as client:
        for piece in client.chat("What is a KV cache?").text():
            print(piece, end="", flush=True)

This module owns the public names and nothing else. `headrace.v1` holds the generated protobuf stubs.
"""

from headrace.aio import AsyncClient, AsyncStream
from headrace.answers import Load, MemoryPlan, Model, RequestState, RequestSummary, Submitted
from headrace.channel import RetryPolicy
from headrace.client import Client, Stream
from headrace.completion import Completion, Output
from headrace.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unavailable,
    Unimplemented,
    Violation,
)
from headrace.events import (
    Accepted,
    Delta,
    Done,
    Event,
    FinishReason,
    Ledger,
    Logprobs,
    OutputFinished,
    Reconnecting,
    Resumed,
    Started,
    Usage,
)
from headrace.local_server import LocalServer, local
from headrace.server_process import LocalServerError
from headrace.spec import GenerationOptions, Message

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "Done",
    "Event",
    "FinishReason",
    "GenerationOptions",
    "HeadraceError",
    "Internal",
    "InvalidRequest",
    "Ledger",
    "Load",
    "LocalServer",
    "LocalServerError",
    "Logprobs",
    "MemoryPlan",
    "Message",
    "Model",
    "NotFound",
    "Output",
    "OutputFinished",
    "Overloaded",
    "PermissionDenied",
    "Reconnecting",
    "RequestState",
    "RequestSummary",
    "Resumed",
    "RetryPolicy",
    "Started",
    "Stream",
    "Submitted",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "Violation",
    "__version__",
    "local",
]
