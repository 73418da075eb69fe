"""Headrace's Python client: typed sync and asyncio clients, and a private server for scripts.

    import headrace

    with headrace.Client("127.0.0.1:50051") as client:
        for piece in client.chat("What is a KV cache?").text():
            print(piece, end="", flush=True)

This module owns the public names and nothing else. `headrace.v1` holds the generated protobuf
stubs.
"""

# Before anything that imports grpc.
from headrace import grpc_log  # noqa: F401
from headrace.admin import AdminClient, AsyncAdminClient
from headrace.admin_calls import Draining, Loaded, ModelState, RepositoryModel
from headrace.aio import AsyncClient
from headrace.answers import (
    Load,
    MeasuredLoss,
    MemoryPlan,
    Model,
    Quantization,
    RequestState,
    RequestSummary,
    Submitted,
)
from headrace.client import Client
from headrace.completion import Completion, Output
from headrace.connections.channel import RetryPolicy
from headrace.connections.connection import ConnectionOptions
from headrace.conversations.content import (
    AnswerText,
    Content,
    ReasoningText,
    ToolCall,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from headrace.conversations.messages import Message, Tool
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
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Violation,
)
from headrace.events import (
    Accepted,
    Delta,
    Done,
    Event,
    Failed,
    FinishReason,
    Ledger,
    Logprobs,
    OutputFinished,
    PromptLogprobs,
    Reconnecting,
    Resumed,
    Started,
    Usage,
)
from headrace.grpc_words import ConnectionProblem
from headrace.local_server.process import LocalServerError
from headrace.local_server.server import LocalServer, local
from headrace.security import Tls
from headrace.sessions.aio_session import AsyncSession, AsyncSessionGeneration
from headrace.sessions.session import Session, SessionGeneration
from headrace.sessions.session_state import SessionEvent, SessionStep
from headrace.spec import BeamSearch, GenerationOptions, StructuralTag
from headrace.streams.aio_stream import AsyncStream
from headrace.streams.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "AdminClient",
    "AlreadyExists",
    "AnswerText",
    "AsyncAdminClient",
    "AsyncClient",
    "AsyncSession",
    "AsyncSessionGeneration",
    "AsyncStream",
    "BeamSearch",
    "Cancelled",
    "Client",
    "Completion",
    "ConnectionOptions",
    "ConnectionProblem",
    "Content",
    "DeadlineExceeded",
    "Delta",
    "Done",
    "Draining",
    "Event",
    "Failed",
    "FinishReason",
    "GenerationOptions",
    "HeadraceError",
    "Internal",
    "InvalidRequest",
    "Ledger",
    "Load",
    "Loaded",
    "LocalServer",
    "LocalServerError",
    "Logprobs",
    "MeasuredLoss",
    "MemoryPlan",
    "Message",
    "Model",
    "ModelState",
    "NotFound",
    "Output",
    "OutputFinished",
    "Overloaded",
    "PermissionDenied",
    "PromptLogprobs",
    "Quantization",
    "ReasoningText",
    "Reconnecting",
    "RepositoryModel",
    "RequestState",
    "RequestSummary",
    "Resumed",
    "RetryPolicy",
    "Session",
    "SessionEvent",
    "SessionGeneration",
    "SessionStep",
    "Started",
    "Stream",
    "StructuralTag",
    "Submitted",
    "Tls",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallFinished",
    "ToolCallStarted",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "Violation",
    "__version__",
    "local",
]
