"""Configuration of the agent that runs ranks of an engine on another host.

What all ranks must agree on the engine tells it; here is what differs from host to host.
"""

from __future__ import annotations

import pathlib
from typing import Annotated, Literal, Self

import pydantic
from pydantic import AfterValidator, Field

from headrace_backend.config import MAX_WORKER_THREADS
from headrace_health.address import listen_address, peer_address


class RanksConfig(pydantic.BaseModel):
    """The settings of `headrace ranks`."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    join: Annotated[
        str,
        AfterValidator(peer_address),
        Field(
            description="HOST:PORT at which the engine's backend listens (`headrace backend --hosts`)",
        ),
    ]
    model: Annotated[
        pathlib.Path,
        Field(description="the engine's model, on this machine: folder, GGUF file, or ORG/NAME of a hub"),
    ]
    draft_model: Annotated[
        pathlib.Path | None,
        Field(description="the engine's draft model or EAGLE-3 head, on this machine; where the engine has one"),
    ] = None
    device: Annotated[
        str, Field(description="auto, cpu, or cuda[:index]: this machine's ranks take the GPUs from that one on")
    ] = "auto"
    worker_threads: Annotated[
        int,
        Field(ge=0, le=MAX_WORKER_THREADS, description="CPU threads of a worker; 0: its share of all cores but one"),
    ] = 0
    kernel_cache: Annotated[
        pathlib.Path | None,
        Field(description="folder for compiled GPU kernels; default: headrace/kernels in XDG_CACHE_HOME or ~/.cache"),
    ] = None
    engine_token_file: Annotated[
        pathlib.Path | None, Field(description="file with the shared secret that the backend asks for")
    ] = None
    engine_tls_ca: Annotated[
        pathlib.Path | None,
        Field(description="PEM file of the CA of a backend with mTLS; with engine_tls_cert and engine_tls_key"),
    ] = None
    engine_tls_cert: Annotated[
        pathlib.Path | None, Field(description="PEM file of the certificate that this host shows to the backend")
    ] = None
    engine_tls_key: Annotated[pathlib.Path | None, Field(description="PEM file of that certificate's private key")] = (
        None
    )
    engine_tls_name: Annotated[
        str,
        Field(
            pattern=r"^[^:/\s]*$",
            description="host name in the backend's certificate; empty: that of join",
        ),
    ] = ""
    probe: Annotated[
        Annotated[str, AfterValidator(listen_address)] | None,
        Field(
            description=(
                "HOST:PORT or unix:PATH that answers grpc.health.v1 alone, without TLS and keys: SERVING while the "
                "engine has this host, and alive while the process answers"
            ),
        ),
    ] = None
    log_format: Annotated[
        Literal["console", "json"], Field(description="log lines on stderr, for people or for machines")
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least serious log lines that are written")
    ] = "info"

    @pydantic.model_validator(mode="after")
    def _refuse_half_of_engine_tls(self) -> Self:
        named = (self.engine_tls_ca, self.engine_tls_cert, self.engine_tls_key)
        if any(named) and not all(named):
            raise ValueError("engine_tls_ca, engine_tls_cert and engine_tls_key: each needs the others")
        if self.engine_tls_name and not any(named):
            raise ValueError(f"engine_tls_name is {self.engine_tls_name}, and engine_tls_ca is not set")
        return self
