"""Settings of telemetry: absurd ones are refused by field and reason.

Secrets stand in no message.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pydantic
import pytest

from headrace_service.auth import certificates
from headrace_telemetry.config import TelemetryConfig

SOCKET = {"telemetry_socket": "/run/t.sock"}


def made(**settings: Any) -> TelemetryConfig:
    return TelemetryConfig(**{**SOCKET, **settings})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"trace_sample_ratio": -0.1}, "greater than or equal to 0"),
        ({"trace_sample_ratio": 1.1}, "less than or equal to 1"),
        ({"trace_sample_ratio": "nan"}, "finite"),
        ({"trace_keep_ttft_ms": "inf"}, "finite"),
        ({"trace_keep_itl_ms": -1}, "greater"),
        ({"trace_detail": "everything"}, "'off', 'array' or 'span'"),
        ({"otlp_endpoint": "collector:4317"}, "must be http://HOST:PORT"),
        ({"otlp_endpoint": "grpc://collector:4317"}, "must be http://HOST:PORT"),
        ({"otlp_endpoint": "http://"}, "must be http://HOST:PORT"),
        ({"otlp_endpoint": "http://collector:99999"}, "must be http://HOST:PORT"),
        ({"otlp_endpoint": "http://collector:0"}, "port must be"),
        ({"otlp_endpoint": "http://collector:4318/v1/traces"}, "nothing more"),
        ({"otlp_endpoint": "https://user:secret@collector"}, "otlp_headers_file"),
        ({"otlp_endpoint": "http://[::1"}, "must be http://HOST:PORT"),
        ({"otlp_endpoint": "http://col lector:4317"}, "its host must be"),
        ({"otlp_endpoint": "http://-collector:4317"}, "its host must be"),
        ({"otlp_endpoint": "http://col..lector:4317"}, "its host must be"),
        ({"otlp_endpoint": f"http://{'a' * 64}:4317"}, "parts of 1 to 63"),
        ({"otlp_endpoint": f"http://{'a.' * 127}:4317"}, "at most 253"),
        ({"otlp_endpoint": "http://127.0.0.256:4317"}, "no IP address"),
        ({"otlp_endpoint": "http://[fe80::g]:4317"}, "no IP address|must be http"),
        ({"otlp_headers_file": "h"}, "needs otlp_endpoint"),
        ({"otlp_endpoint": "http://c", "otlp_tls_ca": "ca"}, "only https://"),
        ({"otlp_queue": "1MiB"}, "greater than or equal to"),
        ({"otlp_timeout_s": 0}, "greater than or equal to"),
        ({"metrics_listen": "9464"}, "HOST:PORT"),
        ({"metrics_listen": "127.0.0.1:70000"}, "must be HOST:PORT with a port of 0 to 65535"),
        ({"metrics_listen": "unix:/tmp/metrics:80"}, "must be HOST:PORT with a port of 0 to 65535"),
        ({"metrics_listen": "[]:9464"}, "must be HOST:PORT with a port of 0 to 65535"),
        ({"metrics_ttft_buckets": ()}, "1 to 100 bounds"),
        ({"metrics_ttft_buckets": tuple(range(1, 102))}, "1 to 100 bounds"),
        ({"metrics_tpot_buckets": (0.1, 0.1)}, "above the one before"),
        ({"metrics_step_buckets": (0.2, 0.1)}, "above the one before"),
        ({"metrics_queue_buckets": (0.0, 0.1)}, "above 0"),
        ({"metrics_duration_buckets": (float("nan"),)}, "above 0"),
        ({"metrics_duration_buckets": (1.0, float("inf"))}, "above 0"),
        ({"trace_max_attribute_bytes": 1}, "greater than or equal to 64"),
        ({"trace_max_attribute_bytes": 1 << 30}, "less than or equal to"),
        ({"trace_max_array_tokens": 10**9}, "less than or equal to"),
        ({"telemetry_attributes": ("a=" + "x" * 1025,)}, "at most 1024 bytes"),
        ({"telemetry_attributes": ("nothing",)}, "NAME=VALUE"),
        ({"telemetry_attributes": ("1=2",)}, "NAME=VALUE"),
        ({"telemetry_attributes": ("service.name=x",)}, "by each process itself"),
        ({"telemetry_attributes": tuple(f"a{i}=1" for i in range(65))}, "at most 64"),
        ({"price_per_hour": -1}, "greater than or equal to 0"),
        ({"price_currency": "dollars"}, "pattern"),
        ({"trace_file_limit": "10KiB"}, "greater than or equal to"),
        ({"trace_ring": "100TiB"}, "less than or equal to"),
        ({"no_such": 1}, "not permitted"),
    ],
)
def test_what_is_absurd_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=reason) as refused:
        made(**settings)
    assert "secret" not in refused.value.errors(include_url=False)[0]["msg"]


@pytest.mark.parametrize(
    ("text", "target", "secure"),
    [
        ("http://collector:4317", "collector:4317", False),
        ("https://collector.example", "collector.example:4317", True),
        ("http://[::1]:55680/", "[::1]:55680", False),
        ("http://10.0.0.7", "10.0.0.7:4317", False),
        ("http://otel_collector-1.Example.org.:4317", "otel_collector-1.example.org.:4317", False),
    ],
)
def test_endpoints(text: str, target: str, secure: bool) -> None:
    assert made(otlp_endpoint=text).collector() == (target, secure)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no equals sign, secret", ":1: must be NAME=VALUE"),
        (b"\n# comment\nBad Name = secret", ":3: must be NAME=VALUE"),
        (b"grpc-timeout = secret", "gRPC's own"),
        (b"key-bin = secret", "gRPC's own"),
        (b"key = secret\xff", "printable"),
        (b"key = " + b"secret" * 20_000, "more than"),
    ],
)
def test_a_bad_file_of_headers_is_refused_without_showing_it(
    tmp_path: pathlib.Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "headers"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as refused:
        made(otlp_endpoint="http://c", otlp_headers_file=file).check_files()
    assert "secret" not in str(refused.value)


def test_files_that_are_not_there_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"otlp_headers_file: .*/none: No such file"):
        made(otlp_endpoint="http://c", otlp_headers_file=tmp_path / "none").check_files()
    with pytest.raises(ValueError, match=r"otlp_tls_ca: .*/none: No such file"):
        made(otlp_endpoint="https://c", otlp_tls_ca=tmp_path / "none").check_files()
    with pytest.raises(ValueError, match="trace_file: there is no folder"):
        made(trace_file=tmp_path / "none" / "file").check_files()
    with pytest.raises(ValueError, match="is a folder"):
        made(trace_file=tmp_path).check_files()
    # Not even the superuser makes files there.
    with pytest.raises(ValueError, match="trace_file: /proc/traces can't be written: No such file"):
        made(trace_file="/proc/traces").check_files()
    made(trace_file=tmp_path / "traces").check_files()
    assert not (tmp_path / "traces").exists()
    (tmp_path / "ca").write_text("nothing")
    with pytest.raises(ValueError, match="no PEM certificate"):
        made(otlp_endpoint="https://c", otlp_tls_ca=tmp_path / "ca").check_files()


def test_tail_sampling_is_on_with_any_of_its_settings() -> None:
    assert not made().keeps_at_end
    for name in ("trace_keep_ttft_ms", "trace_keep_itl_ms", "trace_keep_failed", "trace_keep_preempted"):
        assert made(**{name: 1}).keeps_at_end


@pytest.mark.parametrize(
    ("field", "beside"),
    [
        ("otlp_tls_ca", {"otlp_endpoint": "https://c"}),
        ("otlp_headers_file", {"otlp_endpoint": "http://c"}),
        ("trace_file", {}),
    ],
)
def test_a_named_pipe_in_place_of_a_file_is_refused(
    tmp_path: pathlib.Path, field: str, beside: dict[str, object]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=rf"{field}: .*/pipe is no file"):
        made(**beside, **{field: tmp_path / "pipe"}).check_files()


def test_the_collectors_authority_is_a_whole_certificate_whatever_stands_before_it(tmp_path: pathlib.Path) -> None:
    authority = certificates.new_ca("CA", 1).certificate_pem()
    file = tmp_path / "ca"
    config = made(otlp_endpoint="https://c", otlp_tls_ca=file)
    file.write_bytes(authority[:300])
    with pytest.raises(ValueError, match="holds no PEM certificate"):
        config.check_files()
    file.write_bytes(b"\xef\xbb\xbf# Autorit\xc3\xa4t\n" + authority)
    assert (config.certificate_authority() or b"").endswith(b"t\n" + authority)
    file.write_bytes(b"\xef\xbb\xbf" + authority)
    assert config.certificate_authority() == authority
