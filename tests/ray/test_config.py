"""The file of a deployment: what it means, and a sentence for each mistake in it."""

from __future__ import annotations

import pathlib
import tomllib
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.running_server import DEMO, ROOT

from headrace_ray import commands, config
from headrace_ray.autoscaling import Policy
from headrace_supervisor.settings import ConfigError

ENGINE = {"model": str(DEMO)}


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"engine": {}}, "[engine]: model is needed: a folder that every node has, or ORG/NAME of a hub"),
        ({"engine": {**ENGINE, "tpp": 2}}, "[engine]: unknown setting tpp; the nearest known one is tp"),
        ({"engine": {**ENGINE, "tp": 0}}, "[engine]: tp: must be at least 1, not '0'"),
        ({"engine": {**ENGINE, "listen": "0.0.0.0:1"}}, "[engine]: unknown setting listen"),
        (
            {"engine": {**ENGINE, "tp": 3, "hosts": 2}},
            "[engine]: pp is 1 and tp is 3, which are 3 ranks, and hosts is 2: each machine has as many whole stages",
        ),
        ({"engine": {**ENGINE, "drain_grace_s": -1}}, "[engine]: drain_grace_s: must be at least 0"),
        ({"engine": {**ENGINE, "device": "cuda:1"}}, "[engine]: device is 'cuda:1'; it must be auto, cpu or cuda"),
        ({"service": {"engines_file": "f"}}, "[service]: unknown setting engines_file"),
        ({"service": {"insecure": "maybe"}}, "[service]: insecure: must be true or false"),
        ({"engines": {"min": 0}}, "[engines]: min: must be at least 1, not 0"),
        ({"engines": {"min": 3, "max": 2}}, "[engines]: max is 2; it must be min (3) or more"),
        ({"engines": {"mni": 3}}, "[engines]: unknown setting mni; the nearest known one is min"),
        ({"engines": 3}, "engines: must be a table of settings"),
        *(
            ({"engines": {"ports": ports}}, "[engines]: ports: must be two of 1 to 65535, the first not above the last")
            for ports in ([5, 3], [1], "x", [0, 5], [5, 70_000], ["5", "6"])
        ),
        ({"engines": {"resources": {"a": float("inf")}}}, "[engines]: resources: must be a finite number"),
        ({"engines": {"resources": {"": 1}}}, "[engines]: resources: '' must be another resource"),
        ({"engine": {"model": ""}}, "[engine]: model: there is no '' here"),
        ({"engine": {"model": "no/such/folder"}}, "[engine]: model: there is no 'no/such/folder' here; what the nodes"),
        ({"engine": {**ENGINE, "draft_model": "absent"}}, "[engine]: draft_model: there is no 'absent' here"),
        ({"service": {"tls_cert": "absent.pem"}}, "[service]: tls_cert: there is no 'absent.pem' here"),
        ({"engine": {"model": str(ROOT / "docs")}}, f"[engine]: model {ROOT / 'docs'}: config.json: can't be opened"),
        ({"engine": {**ENGINE, "model_name": "../x"}}, "[engine]: model_name: '../x' is no name of a model"),
        ({"engine": {**ENGINE, "speculate": "draft"}}, "[engine]: speculate is draft, and no draft_model is named"),
        ({"engine": {**ENGINE, "quantize_activations": "fp8"}}, "[engine]: quantize_activations is fp8"),
        ({"engine": {**ENGINE, "max_model_len": "1M"}}, "[engine]: max_model_len is 1048576; the model's context has"),
        ({"engine": {**ENGINE, "tp": 3}}, "[engine]: tp is 3"),
        (
            {"engines": {"resources": {"GPU": 1}}},
            "[engines]: resources: 'GPU' must be another resource than CPU and GPU",
        ),
        ({"engines": {"cpus": float("nan")}}, "[engines]: cpus: must be a finite number, not nan"),
        ({"autoscaling": {"up_after_s": float("inf")}}, "[autoscaling]: up_after_s: must be a finite number"),
        ({"services": {"port": 0}}, "[services]: port: must be at least 1, not 0"),
        ({"nme": "x"}, "unknown setting nme; the nearest known one is name"),
        ({"name": "a/b"}, "name 'a/b' must be 1 to 63 letters, digits, _ and -"),
    ],
)
def test_a_mistake_is_refused_in_one_sentence(tables: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.parse({"engine": ENGINE, **tables}, "ray.toml")
    assert str(refused.value).startswith(f"ray.toml: {why}")
    assert "\n" not in str(refused.value)


def test_what_the_nodes_alone_have_is_taken_as_it_is() -> None:
    """Its paths begin at the root."""
    engine = {"model": "/on/nodes/alone", "kernel_cache": "/var/cache/kernels"}
    service = {"tls_cert": "/etc/c.pem", "tls_key": "/etc/k.pem", "model_folder": "org/name"}
    made = config.parse({"engine": engine, "service": service})
    assert (made.engine, made.service) == (engine, service)


def test_a_file_says_what_runs_and_how_much_of_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "ray.toml"
    path.write_text('[engines]\nmin = 2\n[engine]\nmodel = "models/demo"\ntp = 2\nmax_model_len = "2k"\n')
    made = config.load(path)
    # The nodes have another current folder.
    assert made.engine == {"model": str(DEMO), "tp": 2, "max_model_len": "2k"}
    assert (made.name, made.ranks_per_host, made.device, made.services.port) == ("headrace", 2, "auto", 50_051)
    path.write_text('[engine]\nmodel = "org/name"\npp = 2\ntp = 4\nhosts = 2\n')
    assert (config.load(path).hosts, config.load(path).ranks_per_host) == (2, 4)
    # Without a max the number stays.
    assert made.policy == Policy(2, 2, 8192, 10.0, 300.0)
    path.write_text('[engine]\nmodel = "org/name"\n')
    assert config.load(path).engine["model"] == "org/name"


def test_files_that_cannot_be_read_are_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ray.toml"
    with pytest.raises(ConfigError, match=f"{path}: No such file"):
        config.load(path)
    path.write_text("[engine")
    with pytest.raises(ConfigError, match=f"{path}: is not TOML: Expected ']'"):
        config.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{path}: is not text in UTF-8"):
        config.load(path)


def test_a_service_that_others_reach_needs_certificate_and_keys_as_everywhere() -> None:
    with pytest.raises(ConfigError, match="10.1.2.3:50051 is reached by other machines and needs tls_cert"):
        config.service_config({}, "10.1.2.3:50051", engines_file="f")
    assert config.service_config({"insecure": True}, "10.1.2.3:50051", engines_file="f").listen == ("10.1.2.3:50051",)


def test_the_commands_refuse_in_one_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ray.toml"
    path.write_text("[engines]\nmin = 0\n")
    for arguments, why in (
        (["up", str(path)], f"headrace: {path}: [engines]: min: must be at least"),
        (["up", str(tmp_path / "none.toml")], "No such file"),
        (["up", str(path), "--wait-s", "nan"], "headrace: --wait-s: must be a number of seconds, not nan"),
        (["status", "a b"], "headrace: name 'a b' must be"),
        (["down", "../x"], "headrace: name '../x' must be"),
    ):
        ended = CliRunner().invoke(commands.ray, arguments)
        assert ended.exit_code == 2 and why in ended.output, ended.output
        assert len(ended.output.strip().splitlines()) == 1


def test_without_the_extra_the_command_names_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr(commands.importlib, "import_module", absent)
    path = tmp_path / "ray.toml"
    path.write_text(f'[engine]\nmodel = "{DEMO}"\n')
    for arguments in (["up", str(path)], ["status"], ["down"]):
        ended = CliRunner().invoke(commands.ray, arguments)
        assert ended.exit_code == 2
        assert ended.output == "headrace: Ray is not installed here: pip install 'headrace-server[ray]'\n"


def test_the_example_of_the_documentation_is_a_deployment() -> None:
    shown = (ROOT / "docs" / "ray.md").read_text().split("```toml\n")[1:]
    assert shown
    for text in shown:
        config.parse(tomllib.loads(text.split("```")[0]))
