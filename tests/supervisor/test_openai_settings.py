"""Settings of the processes that speak OpenAI's HTTP API, and what the supervisor makes of them."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

from headrace_supervisor import config as configs
from headrace_supervisor import service_settings, supervisor
from headrace_supervisor.settings import ConfigError

MODEL = {"model": "folder"}
OPENAI = {**MODEL, "openai_listen": ("127.0.0.1:0",)}
TLS = {"tls_cert": "/c.pem", "tls_key": "/c.key"}


def test_there_are_none_unless_they_are_asked_for() -> None:
    assert configs.load_server(MODEL, None).openai is None


def test_each_process_speaks_one_wire(tmp_path: pathlib.Path) -> None:
    config = configs.load_server({**OPENAI, "openai_services": "2", "keys_file": "/keys.json"}, None)
    assert config.openai is not None
    assert (config.service.openai_listen, config.openai.listen) == ((), ())
    assert config.openai.keys_file == config.service.keys_file
    openai = service_settings.addressed(config.openai, ("127.0.0.1:7",), "unix:/c.sock")
    specs, probes = supervisor.service_specs(openai, config.supervisor.openai_services, tmp_path)
    assert [spec.name for spec in specs] == ["openai-0", "openai-1"] and len(set(probes)) == 2
    assert specs[0].command[:3] == (sys.executable, "-m", "headrace_service.openai")
    written = json.loads((tmp_path / "openai-0.json").read_text())
    assert (written["openai_listen"], written["listen"], written["reuse_port"]) == (["127.0.0.1:7"], [], True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**OPENAI, "openai_listen": ("0.0.0.0:80",)}, "openai_listen: 0.0.0.0:80 is reached by other machines"),
        ({**OPENAI, "openai_listen": ("nowhere",)}, "openai_listen: 'nowhere' must be HOST:PORT"),
        ({**OPENAI, "openai_listen": ("unix:/a",), "openai_services": "2"}, "openai_services is 2; .* a unix: address"),
        ({**MODEL, "openai_cors_origins": ("*",)}, "openai_cors_origins: needs openai_listen"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configs.load_server(settings, None)


def test_a_certificate_is_for_the_wire_that_has_a_port() -> None:
    config = configs.load_server({**OPENAI, **TLS, "listen": ("unix:/a",)}, None)
    assert config.openai is not None
    assert (config.service.tls_cert, str(config.openai.tls_cert)) == (None, "/c.pem")
    config = configs.load_server({**OPENAI, **TLS, "openai_listen": ("unix:/a",)}, None)
    assert config.openai is not None
    assert (str(config.service.tls_cert), config.openai.tls_cert) == ("/c.pem", None)


def test_a_service_alone_speaks_one_wire() -> None:
    alone = {"engine": ("unix:/engine.sock",)}
    assert configs.load_service({**alone, "openai_listen": ("127.0.0.1:7",)}, None).listen == ()
    with pytest.raises(ConfigError, match="listen is needed"):
        configs.load_service(alone, None)
    with pytest.raises(ConfigError, match="speaks gRPC there, or OpenAI's HTTP API"):
        configs.load_service({**alone, "listen": ("127.0.0.1:7",), "openai_listen": ("127.0.0.1:8",)}, None)
