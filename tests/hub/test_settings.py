"""A model's name in settings and commands: where it is resolved, and how much is asked for."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from headrace_hub.names import HubName
from headrace_hub.resolve import Need
from headrace_supervisor import config as configs
from headrace_supervisor import doctor
from headrace_supervisor.config import ConfigError
from headrace_supervisor.plan.command import plan
from headrace_supervisor.quantize_command import quantize

NAME = "acme/tiny@v1"


class Hub:
    """In place of the process that fetches: an answer for every question, and the questions."""

    def __init__(self) -> None:
        self.asked: list[tuple[HubName, Need]] = []
        self.answer: dict[str, str | None] = {"path": "/cache/snapshots/0123", "commit": "0123"}

    def __call__(self, name: HubName, need: Need) -> dict[str, str | None]:
        self.asked.append((name, need))
        return self.answer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Hub:
    """The stand-in; the working folder is empty."""
    asked = Hub()
    monkeypatch.setattr("headrace_hub.resolve._asked", asked)
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_name_becomes_its_folder_and_names_the_model(hub: Hub) -> None:
    config = configs.load_server({"model": NAME, "listen": "127.0.0.1:0"}, None)
    assert str(config.backend.engine.model) == "/cache/snapshots/0123" and config.model_name == "tiny"
    assert (
        configs.load_server({"model": NAME, "model_name": "ours", "listen": "127.0.0.1:0"}, None).model_name == "ours"
    )
    assert configs.load_backend({"model": NAME, "listen": "unix:x"}, None).engine.model_name == "tiny"
    service = configs.load_service({"engine": "unix:x", "listen": "127.0.0.1:0", "model_folder": NAME}, None)
    assert str(service.model_folder) == "/cache/snapshots/0123"
    assert set(hub.asked) == {(HubName("acme/tiny", "v1"), Need.FETCHED)}
    hub.answer = {"path": "/cache/snapshots/0123/tiny-Q8_0.gguf", "commit": "0123"}
    assert configs.load_server({"model": NAME, "listen": "127.0.0.1:0"}, None).model_name == "tiny-Q8_0"


def test_callers_may_use_the_name_of_the_hub_unless_the_model_was_named(hub: Hub) -> None:
    config = configs.load_server({"model": NAME, "openai_listen": "127.0.0.1:0", "listen": "127.0.0.1:0"}, None)
    assert config.openai is not None
    for service in (config.service, config.openai):
        assert service.default_model_aliases == ("acme/tiny", NAME)


def test_a_taken_port_is_refused_before_anything_is_fetched(hub: Hub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for name in ("listen", "openai_listen"):
            with pytest.raises(ConfigError, match=f"^{address} is in use by another server"):
                configs.load_server({"model": NAME, "listen": "127.0.0.1:0", name: address}, None)
    with pytest.raises(ConfigError, match="needs tls_cert and keys_file"):
        configs.load_server({"model": NAME, "listen": "0.0.0.0:0"}, None)
    assert hub.asked == []


def test_a_variable_that_the_hubs_library_can_not_read_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "abc")
    with pytest.raises(ConfigError, match="HF_HUB_DOWNLOAD_TIMEOUT must be a whole number of seconds, not 'abc'$"):
        configs.load_server({"model": NAME, "listen": "127.0.0.1:0"}, None)
    # A fresh process: the library reads its variables when it is imported.
    pulling = subprocess.run([sys.executable, "-m", "headrace", "pull", NAME], capture_output=True, text=True)
    said = "headrace: HF_HUB_DOWNLOAD_TIMEOUT must be a whole number of seconds, not 'abc'\n"
    assert (pulling.returncode, pulling.stderr) == (1, said)


def test_what_can_not_be_had_is_a_bad_setting(hub: Hub) -> None:
    hub.answer = {"refused": "acme/tiny has no revision v1"}
    with pytest.raises(
        ConfigError, match="^model: there is no folder acme/tiny@v1 here; acme/tiny has no revision v1$"
    ):
        configs.load_server({"model": NAME, "listen": "127.0.0.1:0"}, None)


@pytest.mark.parametrize("place", ["flag", "environment", "file"])
def test_a_marked_folder_is_one_wherever_it_is_written(
    hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('model = "./acme/tiny"' if place == "file" else "")
    if place == "environment":
        monkeypatch.setenv("HEADRACE_MODEL", "acme/tiny/")
    config = configs.load_server({"model": "./acme/tiny"} if place == "flag" else {}, file)
    assert config.backend.engine.model == tmp_path / "acme" / "tiny" and hub.asked == []


def test_a_model_of_the_repository_is_no_name_of_a_hub(hub: Hub, tmp_path: pathlib.Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    values = {"model": "tiny", "model_repository": str(tmp_path / "models"), "listen": "127.0.0.1:0"}
    assert configs.load_server(values, None).backend.engine.model == tmp_path / "models" / "tiny"
    assert hub.asked == []
    assert configs.load_server(values | {"model": NAME}, None).model_name == "tiny"


def test_a_doctor_fetches_nothing(hub: Hub) -> None:
    hub.answer = {"refused": None}
    [finding] = doctor._named_model(NAME, False)
    assert finding.verdict is doctor.Verdict.MISSING
    assert finding.detail.endswith("if a model of the hub is meant: headrace pull acme/tiny@v1")
    assert hub.asked == [(HubName("acme/tiny", "v1"), Need.CACHED)]


def test_a_plan_needs_the_configuration_alone(hub: Hub, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    hub.answer = {"path": str(tmp_path), "commit": ""}
    result = CliRunner().invoke(plan, ["--model", NAME])
    assert result.exit_code == 2 and "OtherForCausalLM" in result.stderr
    assert hub.asked == [(HubName("acme/tiny", "v1"), Need.CONFIG)]


def test_quantizing_fetches_its_source(hub: Hub) -> None:
    result = CliRunner().invoke(quantize, [NAME, "out", "--method", "rtn"])
    assert result.exit_code == 2 and "/cache/snapshots/0123: no such model folder" in result.stderr
    hub.answer = {"refused": "no"}
    assert CliRunner().invoke(quantize, [NAME, "out"]).stderr == f"headrace: there is no folder {NAME} here; no\n"
    assert {need for _, need in hub.asked} == {Need.FETCHED}
