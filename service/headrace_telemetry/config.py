"""Configuration of the telemetry process.

Owns the fields with their units, ranges and defaults, and what makes a setting absurd. Where values
come from is the supervisor's business; here is one frozen object, which arrives as JSON.
"""

from __future__ import annotations

import ipaddress
import math
import pathlib
import re
import ssl
import urllib.parse
from typing import Annotated, Final, Literal, NamedTuple, Self

import pydantic
from pydantic import ByteSize, Field

from headrace_health.address import tcp_address

MAX_BUCKETS: Final = 100
MAX_ATTRIBUTES: Final = 64
MAX_ATTRIBUTE_BYTES: Final = 1024
_LONGEST_BUCKET_S: Final = 86_400.0
_MAX_HEADERS_BYTES: Final = 64 << 10
_OTLP_PORT: Final = 4317
# Of names in DNS.
_LONGEST_HOST: Final = 253
_HOST_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_ONLY_NUMBERS = re.compile(r"[0-9.]+")
_HEADER_NAME = re.compile(r"[a-z0-9_.-]+")
_ATTRIBUTE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
# What a resource says of itself; facts bring it.
_OWN_ATTRIBUTES: Final = frozenset(
    {"service.name", "service.version", "service.instance.id", "host.name", "process.pid", "headrace.process.kind"}
)

Buckets = tuple[float, ...]


class Endpoint(NamedTuple):
    """The address of a collector."""

    target: str
    secure: bool


class TelemetryConfig(pydantic.BaseModel):
    """What is traced and kept, where traces and metrics go, and what they may cost."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    telemetry_socket: Annotated[
        pathlib.Path,
        Field(description="path of the Unix socket on which services and backends tell what happened"),
    ]
    otlp_endpoint: Annotated[
        str,
        Field(description="collector for traces and metrics over OTLP/gRPC: http://HOST:PORT, or https:// with TLS"),
    ] = ""
    otlp_headers_file: Annotated[
        pathlib.Path | None,
        Field(description="file with a NAME=VALUE line per header that the collector wants, such as keys"),
    ] = None
    otlp_tls_ca: Annotated[
        pathlib.Path | None,
        Field(description="PEM file of the CA of an https:// collector; default: the system's"),
    ] = None
    otlp_timeout_s: Annotated[
        float, Field(ge=0.1, le=120, description="seconds the collector may take for one message")
    ] = 10.0
    otlp_queue: Annotated[
        ByteSize,
        Field(
            ge=8 << 20, le=8 << 30, description="memory that spans may take while the collector is away; then dropped"
        ),
    ] = ByteSize(64 << 20)
    trace_sample_ratio: Annotated[
        float,
        Field(ge=0, le=1, allow_inf_nan=False, description="share of calls without a trace context that are traced"),
    ] = 0.01
    trace_detail: Annotated[
        Literal["off", "array", "span"],
        Field(description="what a trace has per token: nothing, entries of arrays, or a span"),
    ] = "array"
    trace_keep_ttft_ms: Annotated[
        float,
        Field(ge=0, le=3.6e6, allow_inf_nan=False, description="also keep traces with a later first token, ms; 0: off"),
    ] = 0.0
    trace_keep_itl_ms: Annotated[
        float,
        Field(
            ge=0,
            le=3.6e6,
            allow_inf_nan=False,
            description="also keep traces with a longer gap in an output, ms; 0: off",
        ),
    ] = 0.0
    trace_keep_failed: Annotated[bool, Field(description="also keep traces of generations that failed")] = False
    trace_keep_preempted: Annotated[bool, Field(description="also keep traces of preempted generations")] = False
    trace_max_array_tokens: Annotated[
        int,
        Field(
            ge=256, le=32_768, description="tokens of one generation that arrays may hold; those after them are counted"
        ),
    ] = 32_768
    trace_max_attribute_bytes: Annotated[
        int, Field(ge=64, le=65_536, description="longest text of a span's attribute, bytes; longer ones are cut")
    ] = 4096
    trace_export_delay_s: Annotated[
        float, Field(ge=0.05, le=60, description="seconds that spans wait for others to go with them")
    ] = 1.0
    trace_file: Annotated[
        pathlib.Path | None, Field(description="file that traces are appended to, as lines of OTLP JSON")
    ] = None
    trace_file_limit: Annotated[
        ByteSize,
        Field(ge=1 << 20, le=1 << 40, description="size at which trace_file becomes trace_file.1, which it replaces"),
    ] = ByteSize(1 << 30)
    trace_ring: Annotated[
        ByteSize, Field(le=16 << 30, description="memory of recent traces, which `headrace trace` asks for; 0: none")
    ] = ByteSize(64 << 20)
    metrics_listen: Annotated[
        str, Field(description="HOST:PORT of /metrics for Prometheus, all processes in one; default: none")
    ] = ""
    metrics_vllm_names: Annotated[
        bool,
        Field(
            description="serve waiting and running requests and KV usage by vLLM's names as well, which endpoint "
            "pickers of gateways read, and drafted and accepted tokens"
        ),
    ] = False
    export_interval_s: Annotated[
        float, Field(ge=0.5, le=3600, description="seconds between messages of metrics to the collector")
    ] = 10.0
    metrics_duration_buckets: Annotated[
        Buckets, Field(description="bounds of gen_ai.server.request.duration, seconds")
    ] = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)  # fmt: skip
    metrics_ttft_buckets: Annotated[
        Buckets, Field(description="bounds of gen_ai.server.time_to_first_token, seconds")
    ] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)  # fmt: skip
    metrics_tpot_buckets: Annotated[
        Buckets, Field(description="bounds of gen_ai.server.time_per_output_token, seconds")
    ] = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
    metrics_queue_buckets: Annotated[Buckets, Field(description="bounds of headrace.queue.duration, seconds")] = (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # fmt: skip
    metrics_step_buckets: Annotated[
        Buckets, Field(description="bounds of headrace.step.duration and headrace.step.interval, seconds")
    ] = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
    price_per_hour: Annotated[
        float,
        Field(
            ge=0,
            le=1e6,
            allow_inf_nan=False,
            description="what an hour of this server costs, for headrace.cost; 0: no such metric",
        ),
    ] = 0.0
    price_currency: Annotated[
        str, Field(pattern=r"^[A-Z]{3}$", description="currency of price_per_hour, three capital letters")
    ] = "USD"
    service_namespace: Annotated[
        str, Field(max_length=256, description="service.namespace of all traces and metrics")
    ] = ""
    telemetry_attributes: Annotated[
        tuple[str, ...],
        Field(
            description="NAME=VALUE, further attributes of the resource, as deployment.environment.name=test; "
            "may be repeated"
        ),
    ] = ()
    telemetry_flush_s: Annotated[
        float, Field(ge=0, le=60, description="seconds that what is left may take to reach the collector after SIGTERM")
    ] = 5.0
    log_format: Annotated[
        Literal["console", "json"], Field(description="log lines on stderr, for people or for machines")
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least serious log lines that are written")
    ] = "info"

    @property
    def keeps_at_end(self) -> bool:
        """Whether a generation's end may decide that its trace is kept (tail sampling)."""
        return bool(
            self.trace_keep_ttft_ms or self.trace_keep_itl_ms or self.trace_keep_failed or self.trace_keep_preempted
        )

    def collector(self) -> Endpoint | None:
        """The collector's address as gRPC takes it; None: there is none."""
        return _endpoint(self.otlp_endpoint) if self.otlp_endpoint else None

    def resource_attributes(self) -> dict[str, str]:
        """The attributes of `telemetry_attributes` by name."""
        return dict(text.split("=", 1) for text in self.telemetry_attributes)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers for the collector, read from their file.

        Raises OSError, or ValueError without a value in it.
        """
        if self.otlp_headers_file is None:
            return ()
        _refuse_pipe("otlp_headers_file", self.otlp_headers_file)
        with self.otlp_headers_file.open("rb") as file:
            content = file.read(_MAX_HEADERS_BYTES + 1)
        if len(content) > _MAX_HEADERS_BYTES:
            raise ValueError(f"otlp_headers_file: {self.otlp_headers_file} has more than {_MAX_HEADERS_BYTES} bytes")
        lines = content.decode("ascii", errors="replace").splitlines()
        numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
        return tuple(
            _header(line, f"otlp_headers_file: {self.otlp_headers_file}:{number}")
            for number, line in numbered
            if line and not line.startswith("#")
        )

    def certificate_authority(self) -> bytes | None:
        """The PEM of the collector's CA; None: the system's. Raises OSError or ValueError."""
        if self.otlp_tls_ca is None:
            return None
        _refuse_pipe("otlp_tls_ca", self.otlp_tls_ca)
        # Without other letters: those of comments, or a byte order mark, with which gRPC passes
        # over the first certificate.
        content = self.otlp_tls_ca.read_bytes().decode("ascii", errors="ignore")
        try:
            ssl.create_default_context(cadata=content)
        except (ssl.SSLError, ValueError):
            raise ValueError(f"otlp_tls_ca: {self.otlp_tls_ca} holds no PEM certificate") from None
        return content.encode()

    def check_files(self) -> None:
        """Looks at the files that are named, before anything starts.

        Raises ValueError with field and reason.
        """
        try:
            self.headers()
            self.certificate_authority()
        except OSError as error:
            field = "otlp_tls_ca" if error.filename == str(self.otlp_tls_ca) else "otlp_headers_file"
            raise ValueError(f"{field}: {error.filename}: {error.strerror}") from None
        if self.trace_file is not None:
            _check_writable(self.trace_file)

    @pydantic.field_validator("telemetry_socket")
    @classmethod
    def _without_scheme(cls, value: pathlib.Path) -> pathlib.Path:
        return pathlib.Path(str(value).removeprefix("unix:"))

    @pydantic.field_validator("otlp_endpoint")
    @classmethod
    def _refuse_absurd_endpoint(cls, value: str) -> str:
        if value:
            _endpoint(value)
        return value

    @pydantic.field_validator("metrics_listen")
    @classmethod
    def _refuse_absurd_address(cls, value: str) -> str:
        return tcp_address(value) if value else value

    @pydantic.field_validator(
        "metrics_duration_buckets",
        "metrics_ttft_buckets",
        "metrics_tpot_buckets",
        "metrics_queue_buckets",
        "metrics_step_buckets",
    )
    @classmethod
    def _refuse_absurd_buckets(cls, value: Buckets) -> Buckets:
        if not 1 <= len(value) <= MAX_BUCKETS:
            raise ValueError(f"must have 1 to {MAX_BUCKETS} bounds")
        if not all(math.isfinite(bound) and 0 < bound <= _LONGEST_BUCKET_S for bound in value):
            raise ValueError(f"every bound must be above 0 and at most {_LONGEST_BUCKET_S:,.0f} seconds")
        if any(left >= right for left, right in zip(value, value[1:], strict=False)):
            raise ValueError("every bound must be above the one before it")
        return value

    @pydantic.field_validator("telemetry_attributes")
    @classmethod
    def _refuse_absurd_attributes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_ATTRIBUTES:
            raise ValueError(f"must be at most {MAX_ATTRIBUTES} attributes")
        for text in value:
            name, equals, content = text.partition("=")
            if not equals or not _ATTRIBUTE_NAME.fullmatch(name):
                raise ValueError("every attribute must be NAME=VALUE, its name of letters, digits, '_', '.' and '-'")
            if name in _OWN_ATTRIBUTES:
                raise ValueError(f"{name} is said by each process itself")
            if len(name.encode()) > MAX_ATTRIBUTE_BYTES or len(content.encode()) > MAX_ATTRIBUTE_BYTES:
                raise ValueError(f"names and values must have at most {MAX_ATTRIBUTE_BYTES} bytes")
        return value

    @pydantic.model_validator(mode="after")
    def _refuse_what_needs_a_collector(self) -> Self:
        if not self.otlp_endpoint and (self.otlp_headers_file or self.otlp_tls_ca):
            field = "otlp_headers_file" if self.otlp_headers_file else "otlp_tls_ca"
            raise ValueError(f"{field}: there is no collector; it needs otlp_endpoint")
        if self.otlp_tls_ca and not _endpoint(self.otlp_endpoint).secure:
            raise ValueError("otlp_tls_ca: otlp_endpoint is http://; only https:// speaks TLS")
        return self


def _endpoint(text: str) -> Endpoint:
    """Reads an endpoint. Raises ValueError."""
    try:
        url = urllib.parse.urlsplit(text)
        port = url.port
    except ValueError as error:
        raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT ({error})") from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    if url.username is not None or url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT and nothing more; keys go to otlp_headers_file")
    if port == 0:
        raise ValueError("port must be 1 to 65535")
    _check_host(url.hostname)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return Endpoint(f"{host}:{port or _OTLP_PORT}", url.scheme == "https")


def _check_host(host: str) -> None:
    """Raises ValueError for what can be neither an IP address nor a name in DNS.

    Whether there is such a host is not asked: it may come later.
    """
    if ":" in host or _ONLY_NUMBERS.fullmatch(host):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError("its host is no IP address") from None
    elif len(host) > _LONGEST_HOST or not all(_HOST_LABEL.fullmatch(label) for label in host.rstrip(".").split(".")):
        raise ValueError(
            f"its host must be at most {_LONGEST_HOST} characters: parts of 1 to 63 letters, digits, '-' and '_', none "
            "at an end '-', joined by '.'"
        )


def _header(line: str, where: str) -> tuple[str, str]:
    """Reads a line of the file of headers. Its value is a secret and stands in no error."""
    name, equals, value = line.partition("=")
    name, value = name.strip().lower(), value.strip()
    if not equals or not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"{where}: must be NAME=VALUE, the name of letters, digits, '_', '.' and '-'")
    if name.startswith("grpc-") or name.endswith("-bin"):
        raise ValueError(f"{where}: names that begin with grpc- or end with -bin are gRPC's own")
    if not value.isascii() or not value.isprintable():
        raise ValueError(f"{where}: the value must be printable ASCII")
    return name, value


def _refuse_pipe(field: str, path: pathlib.Path) -> None:
    """Raises ValueError for a named pipe: to open it would wait for its other end."""
    if path.is_fifo():
        raise ValueError(f"{field}: {path} is no file")


def _check_writable(path: pathlib.Path) -> None:
    """Raises ValueError if a file at `path` could not be written."""
    _refuse_pipe("trace_file", path)
    if path.is_dir():
        raise ValueError(f"trace_file: {path} is a folder")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"trace_file: there is no folder {path.absolute().parent}")
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"trace_file: {path} can't be written: {error.strerror}") from None
    if not was_there:
        path.unlink()
