"""Configuration of a service process.

Owns the fields with their units, ranges and defaults. Where values come from (defaults, TOML,
environment, flags) is the supervisor's business; here is one frozen object per process, which
arrives as JSON.
"""

from __future__ import annotations

import ipaddress
import pathlib
from typing import Annotated, Final, Literal, Self

import pydantic
from pydantic import AfterValidator, Field

from headrace_health.address import LISTEN_RULE, MAX_PORT, host_and_port, is_address, is_reachable, listen_address

_LONGEST_S: Final = 86_400.0
# Linux takes no more for TCP_KEEPIDLE and TCP_KEEPINTVL.
_LONGEST_KEEPALIVE_S: Final = 32_767.0


def exposed(address: str) -> bool:
    """Returns whether other machines may reach what listens on this address.

    On TCP, that is anything but loopback.
    """
    if address.startswith("unix:"):
        return False
    host, _ = host_and_port(address)
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


class ServiceConfig(pydantic.BaseModel):
    """One service process: where it listens, which backend it speaks to, and what it allows."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    listen: Annotated[tuple[str, ...], Field(description="addresses to serve gRPC on: HOST:PORT or unix:PATH")] = ()
    openai_listen: Annotated[
        tuple[str, ...],
        Field(description="addresses to serve OpenAI's HTTP API on: HOST:PORT or unix:PATH; may be repeated"),
    ] = ()
    openai_cors_origins: Annotated[
        tuple[str, ...],
        Field(description="origins whose pages may call OpenAI's HTTP API from a browser, * for all; none: no page"),
    ] = ()
    insecure: Annotated[
        bool,
        Field(description="serve on addresses that other machines reach without TLS, or without keys"),
    ] = False
    tls_cert: Annotated[
        pathlib.Path | None,
        Field(description="PEM file of the server's certificate and those up to its CA; all HOST:PORT then speak TLS"),
    ] = None
    tls_key: Annotated[pathlib.Path | None, Field(description="PEM file of the certificate's private key")] = None
    tls_client_ca: Annotated[
        pathlib.Path | None,
        Field(description="PEM file of CAs; clients on HOST:PORT must then show a certificate of one of them (mTLS)"),
    ] = None
    keys_file: Annotated[
        pathlib.Path | None,
        Field(description="file of API keys, which `headrace keys` makes; every call then needs one"),
    ] = None
    credentials_reload_s: Annotated[
        float, Field(ge=0.05, le=3600, description="seconds between looks at the files of keys and certificates")
    ] = 2.0
    health_needs_key: Annotated[
        bool, Field(description="demand a key for grpc.health.v1 as well; load balancers seldom have one")
    ] = False
    admin: Annotated[
        bool,
        Field(
            description=(
                "serve administration, to keys with the permission admin; without keys, only while no address is "
                "reached by other machines"
            )
        ),
    ] = True
    probe: Annotated[
        Annotated[str, AfterValidator(listen_address)] | None,
        Field(
            description="unix:PATH or HOST:PORT that answers health checks alone, without TLS and keys: for who "
            "started this process, or a kubelet",
        ),
    ] = None
    engine: Annotated[
        tuple[str, ...],
        Field(
            max_length=1024,
            description="a backend's address, HOST:PORT or unix:PATH; may be repeated for backends of one model",
        ),
    ] = ()
    engines_dns: Annotated[
        tuple[str, ...],
        Field(
            max_length=16,
            description="NAME:PORT whose addresses are backends of one model, looked up again and again; may be "
            "repeated",
        ),
    ] = ()
    engines_dns_s: Annotated[
        float, Field(ge=0.1, le=3600, description="seconds between two look-ups of a name in engines_dns")
    ] = 5.0
    engines_file: Annotated[
        pathlib.Path | None,
        Field(
            description="file whose lines are addresses of backends of one model, HOST:PORT or unix:PATH, read again "
            "and again; not with engines_dns"
        ),
    ] = None
    control: Annotated[
        str,
        Field(description="the supervisor's control socket, unix:PATH, which names the backends; then engine is empty"),
    ] = ""
    engine_token_file: Annotated[
        pathlib.Path | None, Field(description="file with the shared secret that the backend asks for on HOST:PORT")
    ] = None
    engine_tls_ca: Annotated[
        pathlib.Path | None,
        Field(description="PEM file of the CA of a backend with mTLS; with engine_tls_cert and engine_tls_key"),
    ] = None
    engine_tls_cert: Annotated[
        pathlib.Path | None, Field(description="PEM file of the certificate that this service shows to the backend")
    ] = None
    engine_tls_key: Annotated[pathlib.Path | None, Field(description="PEM file of that certificate's private key")] = (
        None
    )
    model_folder: Annotated[
        pathlib.Path | None,
        Field(description="folder of tokenizer and chat template; default: the folder that the backend names"),
    ] = None
    tool_format: Annotated[
        Literal[
            "auto", "off", "gemma4", "glm", "harmony", "hermes", "llama3-json", "mistral", "qwen3-coder", "seed-oss"
        ],
        Field(
            description="how models write calls of functions; auto: as the chat template says; off: no tools are taken"
        ),
    ] = "auto"
    default_model_aliases: Annotated[
        tuple[str, ...],
        Field(description="further names of the default model, such as ORG/NAME of a hub that it was fetched by"),
    ] = ()
    service_name: Annotated[
        str, Field(min_length=1, max_length=64, description="names this process in the backend's logs")
    ] = "service"

    max_message_bytes: Annotated[
        int, Field(ge=1 << 16, le=1 << 26, description="largest message from or to a client, bytes")
    ] = 16 << 20
    max_text_bytes: Annotated[
        int,
        Field(
            ge=1 << 10,
            le=1 << 26,
            description="longest text that is encoded, bytes; encoding takes about 100 bytes for each",
        ),
    ] = 4 << 20
    max_engine_message_bytes: Annotated[
        int, Field(ge=1 << 20, le=1 << 28, description="largest message from or to the backend, bytes")
    ] = 64 << 20
    max_open_generations: Annotated[
        int, Field(ge=1, le=100_000, description="generation and subscription calls open at once; more are refused")
    ] = 4096
    max_connection_streams: Annotated[
        int, Field(ge=1, le=100_000, description="calls one connection may have open at once; more wait at the client")
    ] = 10_000
    max_connections: Annotated[
        int, Field(ge=1, le=1_000_000, description="connections that each address may have open at once")
    ] = 4096
    max_connection_idle_s: Annotated[
        float,
        Field(
            ge=0,
            le=10 * 365 * 86_400,
            description="seconds after which a connection without calls is closed, as clients know it; 0: never",
        ),
    ] = 900.0
    max_connection_age_s: Annotated[
        float,
        Field(
            ge=0,
            le=10 * 365 * 86_400,
            description="seconds after which a connection is asked to be made anew, its open calls going on; 0: never",
        ),
    ] = 0.0
    handshake_timeout_s: Annotated[
        float,
        Field(
            ge=0.1,
            le=600,
            description="seconds a client may take to begin with TLS and HTTP/2, and to acknowledge its settings",
        ),
    ] = 10.0
    guarded_bytes: Annotated[
        int,
        Field(
            ge=0,
            le=1 << 40,
            description=(
                "memory that this process's copies of submitted generations may take, bytes; what has none is lost "
                "with its engine"
            ),
        ),
    ] = 256 << 20
    default_time_limit_s: Annotated[
        float,
        Field(
            gt=0,
            le=86_400,
            description="longest life of a generation whose call has neither deadline nor time_limit, seconds",
        ),
    ] = 3600.0

    reader_cap_bytes: Annotated[
        int, Field(ge=4096, description="memory that tokens waiting for one slow reader may take, bytes")
    ] = 256 << 10
    reader_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=_LONGEST_S,
            description="seconds a reader may stay over reader_cap_bytes before its call ends as too slow",
        ),
    ] = 10.0
    reader_stall_timeout_s: Annotated[
        float,
        Field(gt=0, le=_LONGEST_S, description="seconds a reader may take no message at all while one waits for it"),
    ] = 120.0

    tokenizer_threads: Annotated[int, Field(ge=1, le=64, description="threads that encode long texts")] = 2
    template_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=60,
            description="CPU time of laying out one conversation, seconds; by the clock it may take five times as long",
        ),
    ] = 2.0
    template_memory_bytes: Annotated[
        int, Field(ge=64 << 20, description="address space of the chat template's helper process, bytes")
    ] = 512 << 20

    engine_retry_max_s: Annotated[
        float, Field(gt=0, le=_LONGEST_S, description="longest pause between attempts to reach the backend, seconds")
    ] = 2.0
    engine_silence_s: Annotated[
        float,
        Field(
            gt=0,
            le=_LONGEST_S,
            description="seconds without any message from the backend after which its connection is given up",
        ),
    ] = 15.0
    keepalive_s: Annotated[
        float, Field(gt=0, le=_LONGEST_KEEPALIVE_S, description="seconds of silence after which a client is pinged")
    ] = 20.0
    keepalive_timeout_s: Annotated[
        float, Field(gt=0, le=_LONGEST_KEEPALIVE_S, description="seconds a client may take to answer a ping")
    ] = 10.0
    shutdown_grace_s: Annotated[
        float, Field(ge=0, le=_LONGEST_S, description="seconds that open streams may go on after SIGTERM")
    ] = 30.0
    reuse_port: Annotated[
        bool, Field(description="share HOST:PORT with the other service processes of one supervisor")
    ] = False
    reflection: Annotated[
        bool, Field(description="serve grpc.reflection, so that grpcurl works without .proto files")
    ] = True
    kserve: Annotated[
        bool, Field(description="serve inference.GRPCInferenceService, the wire of KServe v2 and Triton, as well")
    ] = True
    load_reports: Annotated[
        Literal["off", "asked", "always"],
        Field(
            description="tell load balancers how busy the engines are, by ORCA: on streams of OpenRcaService and in "
            "the trailers of calls that ask for it (asked), or in those of all calls (always)"
        ),
    ] = "asked"
    kserve_vllm_names: Annotated[
        tuple[str, ...],
        Field(max_length=16, description="names by which KServe clients reach the default model with vLLM's tensors"),
    ] = ("vllm_model",)
    kserve_tensorrt_llm_names: Annotated[
        tuple[str, ...],
        Field(
            max_length=16,
            description="names by which KServe clients reach the default model with TensorRT-LLM's tensors",
        ),
    ] = ("ensemble", "tensorrt_llm_bls")
    kserve_shared_memory: Annotated[
        bool,
        Field(
            description=(
                "let KServe clients on this machine pass tensors in POSIX shared memory; who may then read and write "
                "this user's"
            )
        ),
    ] = False
    conformance_models: Annotated[
        str,
        Field(
            max_length=256,
            description=(
                "Python module with models() whose tensor models KServe clients find besides, to try client programs "
                "against; empty: none"
            ),
        ),
    ] = ""
    telemetry_socket: Annotated[
        str,
        Field(description="socket of the telemetry process, which gets traces and metrics; empty: telemetry is off"),
    ] = ""
    exit_with_parent: Annotated[
        bool, Field(description="shut down when the process that started this one dies (Linux)")
    ] = False
    log_format: Annotated[
        Literal["console", "json"], Field(description="log lines on stderr, for people or for machines")
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least serious log lines that are written")
    ] = "info"

    @property
    def is_exposed(self) -> bool:
        """Whether other machines reach one of the addresses."""
        return any(exposed(address) for address in self._addresses)

    @property
    def serves_admin(self) -> bool:
        """Whether methods that need the permission admin are served."""
        return self.admin and (self.keys_file is not None or not self.is_exposed)

    @property
    def _addresses(self) -> tuple[str, ...]:
        return (*self.listen, *self.openai_listen)

    @pydantic.model_validator(mode="after")
    def _need_one_wire(self) -> Self:
        if bool(self.listen) == bool(self.openai_listen):
            raise ValueError("listen: a service process speaks gRPC there, or OpenAI's HTTP API at openai_listen")
        return self

    @pydantic.model_validator(mode="after")
    def _need_one_source_of_models(self) -> Self:
        if bool(self.engine or self.engines_dns or self.engines_file) == bool(self.control):
            raise ValueError("engine: the backend's address is needed, or control instead of it")
        if self.engines_dns and self.engines_file:
            raise ValueError("engines_file: engines_dns names engines too; one of them is to be left out")
        return self

    @pydantic.model_validator(mode="after")
    def _check_engines(self) -> Self:
        for name, addresses in (("engine", self.engine), ("engines_dns", self.engines_dns)):
            for index, address in enumerate(addresses):
                unix = address.startswith("unix:")
                if not is_reachable(address) or (unix and name == "engines_dns"):
                    form, other = ("HOST:PORT", ", or unix:PATH") if name == "engine" else ("NAME:PORT", "")
                    raise ValueError(f"{name}: {address[:64]!r} must be {form} with a port of 1 to {MAX_PORT}{other}")
                if address in addresses[:index]:
                    raise ValueError(f"{name}: {address[:64]!r} is named twice")
        return self

    @pydantic.model_validator(mode="after")
    def _refuse_half_of_engine_tls(self) -> Self:
        named = (self.engine_tls_ca, self.engine_tls_cert, self.engine_tls_key)
        if any(named) and not all(named):
            raise ValueError("engine_tls_ca, engine_tls_cert and engine_tls_key: each needs the others")
        followed = bool(self.engines_dns or self.engines_file)
        if any(named) and not followed and all(address.startswith("unix:") for address in self.engine):
            raise ValueError("engine_tls_ca: engine is no HOST:PORT; unix: addresses speak no TLS")
        return self

    @pydantic.model_validator(mode="after")
    def _refuse_half_a_certificate(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: one needs the other")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca: needs tls_cert and tls_key; clients show certificates to servers that have one"
            )
        if self.tls_cert is not None and all(address.startswith("unix:") for address in self._addresses):
            raise ValueError("tls_cert: no address to listen on is a HOST:PORT; unix: addresses speak no TLS")
        if self.health_needs_key and self.keys_file is None:
            raise ValueError("health_needs_key: there are no keys; it needs keys_file")
        return self

    @pydantic.model_validator(mode="after")
    def _refuse_exposure(self) -> Self:
        lacking = [name for name in ("tls_cert", "keys_file") if getattr(self, name) is None]
        name = "listen" if self.listen else "openai_listen"
        for address in self._addresses:
            # Of what is no address nobody can say whom it reaches.
            if not is_address(address):
                raise ValueError(f"{name}: {address[:64]!r} {LISTEN_RULE}")
            if exposed(address) and lacking and not self.insecure:
                raise ValueError(
                    f"{name}: {address} is reached by other machines and needs {' and '.join(lacking)} "
                    "(headrace certs and headrace keys make them); --insecure serves there all the same"
                )
        return self
