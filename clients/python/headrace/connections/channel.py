"""How the clients connect: channel options, keepalive, and what gRPC itself may send again.

Owns the retry rules, which clients/service_config.json publishes, and how calls are spread over the
addresses of a target. UNAVAILABLE only, and only for calls that may be sent twice: the ones that
read, Cancel (a second one changes nothing) and Submit (this client always sends an idempotency
key). Generate, Chat and Complete are not sent again: the caller may have seen tokens of the first
attempt, and a second one costs a whole generation. RESOURCE_EXHAUSTED is not sent again either: the
server says when to come back (Overloaded.retry_after), and a crowd that repeats at once keeps it
overloaded. Subscribe is not in this list, because stream_state.py opens it again itself, from the
last token; nor is UnloadModel, whose second attempt may find the model gone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, get_args

from headrace.security import is_local

SERVICE = "headrace.v1.InferenceService"
IDEMPOTENT_RPCS = (
    "Submit",
    "Cancel",
    "ListRequests",
    "Tokenize",
    "Detokenize",
    "GetModel",
    "ListModels",
    "GetLoad",
)
ADMIN_SERVICE = "headrace.v1.AdminService"
# LoadModel leaves a model that serves already as it is.
IDEMPOTENT_ADMIN_RPCS = ("LoadModel", "ListRepository", "Drain", "GetMemoryPlan")
# A Complete answer with 128 outputs and 20 log probabilities a token passes gRPC's default of 4
# MiB.
MAX_RECEIVE_BYTES = 64 * 2**20
# A dead peer is noticed after keepalive time + timeout, also while a stream is silent.
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_MS = 10_000

ChannelOptions = list[tuple[str, int | str]]
LoadBalancing = Literal["pick_first", "round_robin", "weighted_round_robin"]
LOAD_BALANCING: tuple[str, ...] = get_args(LoadBalancing)
# Asks for load reports at the ends of calls, of which weighted_round_robin makes its weights.
ASKS_FOR_LOAD = ("endpoint-load-metrics-format", "bin")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon to try again after UNAVAILABLE.

    The defaults outlast the restart of a service: 8 s for calls, half a minute for subscriptions.

    Attributes:
        max_attempts: Attempts in a row, for subscriptions; gRPC itself makes at most 5 for a call.
            1 tries once.
        initial_backoff: Seconds before the second attempt (gRPC and this client spread it at random
            by a fifth).
        max_backoff: Longest pause in seconds.
        multiplier: Growth of the pause from attempt to attempt.
    """

    max_attempts: int = 10
    initial_backoff: float = 0.2
    max_backoff: float = 5.0
    multiplier: float = 3.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        if not (self.initial_backoff > 0 and self.max_backoff > 0 and self.multiplier > 0):
            raise ValueError("initial_backoff, max_backoff and multiplier must be above 0")

    def backoff(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row, from 1."""
        return min(self.max_backoff, self.initial_backoff * self.multiplier ** (failures - 1))


def channel_options(server: str, retry: RetryPolicy, load_balancing: str = "pick_first") -> ChannelOptions:
    """Options for a sync or asyncio channel to `server`."""
    options: ChannelOptions = [
        ("grpc.service_config", service_config(retry, load_balancing)),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # A server that comes back after a restart is found within the retries above.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name this is how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 3_000),
        # Otherwise channels with the same options share one connection, and with it one service
        # process.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return [*options, ("grpc.enable_http_proxy", 0)] if is_local(server) else options


def service_config(retry: RetryPolicy, load_balancing: str = "pick_first") -> str:
    """The gRPC service config.

    How addresses are used, and one retry policy for the calls that may be sent twice.
    """
    config: dict[str, object] = {"loadBalancingConfig": [{load_balancing: {}}]}
    if retry.max_attempts > 1:
        config["methodConfig"] = [_method_config(retry)]
    return json.dumps(config)


def _method_config(retry: RetryPolicy) -> dict[str, object]:
    policy = {
        "maxAttempts": min(retry.max_attempts, 5),
        "initialBackoff": f"{retry.initial_backoff:.3f}s",
        "maxBackoff": f"{retry.max_backoff:.3f}s",
        "backoffMultiplier": retry.multiplier,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": SERVICE, "method": rpc} for rpc in IDEMPOTENT_RPCS]
    names += [{"service": ADMIN_SERVICE, "method": rpc} for rpc in IDEMPOTENT_ADMIN_RPCS]
    return {"name": names, "retryPolicy": policy}
