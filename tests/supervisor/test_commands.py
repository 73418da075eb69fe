"""The commands as a person types them: help, mistakes, and a server that must not start."""

from __future__ import annotations

import json
import pathlib
import re
import socket
import time

import click
import pytest
from click.testing import CliRunner
from tests.support.running_server import run_command
from tests.support.warm_python import Ended

from headrace import local
from headrace.local_server import installed
from headrace_supervisor import commands, foreign_names, settings, supervisor
from headrace_supervisor import config as configs
from headrace_supervisor.bench.figures import percentiles_ms
from headrace_supervisor.plan.command import plan
from headrace_supervisor.quantize_command import quantize


def headrace(*arguments: str, **environment: str) -> Ended:
    return run_command(*arguments, **{"COLUMNS": "120", **environment})


def refusal(result: Ended) -> str:
    """The one line of a command that was refused."""
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        (commands.serve, configs.SERVE),
        (commands.service, configs.SERVICE),
        (commands.backend, configs.BACKEND),
        (commands.ranks, configs.RANKS),
    ],
)
def test_help_lists_every_setting_under_its_group(command: click.Command, groups: tuple[settings.Group, ...]) -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    for group in groups:
        assert f"\n{group.title}:\n" in shown
        assert all(f"\n  {settings.flag_name(name)} " in shown for name in group.fields())


def test_the_client_shows_flags_that_serve_has() -> None:
    flags = {settings.flag_name(name) for group in configs.SERVE for name in group.fields()}
    readme = pathlib.Path(__file__).parents[2] / "clients" / "python" / "README.md"
    for text in (readme.read_text(), local.__doc__ or ""):
        shown = re.findall(r"is `(--[a-z-]+) \d", text)
        assert shown and flags.issuperset(shown), shown


def test_help_states_range_and_default_as_they_may_be_typed() -> None:
    shown = " ".join(CliRunner().invoke(commands.serve, ["--help"]).output.split())
    for option in (
        "--max-outputs INTEGER most outputs (n) of one request [1 to 128; default: 16]",
        "--log-ttl-s NUMBER seconds an ended request's token log is kept [above 0, at most 86400; default: 600]",
        "then dropped [8MiB to 8GiB; default: 64MiB]",
        "(also --tensor-parallel-size, -tp) [1 to 8; default: 1]",
        "--state-checkpoints INTEGER",
        "--kernel-cache PATH",
    ):
        assert option in shown


def test_the_longest_sequence_has_two_names() -> None:
    for name in ("--max-model-len", "--max-seq-len"):
        line = refused("folder", name, "-1")
        assert line.startswith("headrace: --max-model-len: must be at least 0")


def refused(*arguments: str) -> str:
    """The one line of a command that is refused within this process."""
    result = CliRunner().invoke(commands.serve, list(arguments))
    assert result.exit_code == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> configs.ServerConfig:
    """The configuration of a server that these arguments would start."""
    served: list[configs.ServerConfig] = []
    monkeypatch.setattr(supervisor, "serve", lambda config, early: served.append(config) or 0)
    result = CliRunner().invoke(commands.serve, list(arguments))
    assert result.exit_code == 0, result.stderr
    return served[0]


def test_the_model_may_be_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["folder"], ["--model", "folder"], ["folder", "--model", "folder/"]):
        assert started(monkeypatch, *arguments).backend.engine.model == pathlib.Path("folder")
    assert "folder and --model other" in refused("folder", "--model", "other")
    # A variable of the shell that is not set.
    assert "empty text" in refused("")


def test_vllms_names_that_mean_the_same_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "folder --tensor-parallel-size 2 -pp 4 -dp 3 --max-seq-len 0.5k --dtype bfloat16 --kv-cache-dtype fp8_e4m3"
        " --max-num-batched-tokens 2K"
        " --served-model-name chat --no-enable-prefix-caching --kv-cache-memory-bytes 1GiB"
    )
    config = started(monkeypatch, *words.split())
    engine = config.backend.engine
    assert (engine.tp, engine.pp, config.supervisor.replicas, engine.max_model_len) == (2, 4, 3, 500)
    assert engine.max_num_batched_tokens == 2048
    assert (engine.dtype, engine.kv_dtype, engine.kv_memory) == ("bf16", "fp8", 1 << 30)
    assert config.model_name == "chat" and not engine.enable_prefix_cache


@pytest.mark.parametrize("name", foreign_names.refused())
def test_another_servers_option_is_refused_in_a_sentence_that_says_what_there_is_instead(name: str) -> None:
    flag = f"-{name}" if len(name) == 1 else f"--{name}"
    line = refused("folder", flag, "x")
    assert line == f"headrace: there is no {flag} here: {foreign_names.refused()[name]}"


def test_replicas_over_hosts_are_refused_with_the_commands_that_make_them() -> None:
    line = refused("folder", "--hosts", "2", "--replicas", "2")
    assert line.startswith("headrace: there is no --hosts here: `headrace backend` shares one engine out")
    result = CliRunner().invoke(commands.backend, ["folder", "--hosts", "2", "--pp", "2", "--replicas", "2"])
    assert result.exit_code == 2
    assert "there is no --replicas here: a backend is one engine" in result.stderr


def test_aliases_are_names_of_settings_that_serve_has() -> None:
    fields = set(settings.names(configs.SERVE))
    assert fields.issuperset(foreign_names.ALIASES) and fields.issuperset(foreign_names.VALUES)


def test_an_option_that_the_command_has_nothing_for_is_refused_without_advice() -> None:
    result = CliRunner().invoke(commands.telemetry, ["--port", "1"])
    assert result.exit_code == 2 and "No such option '--port'" in result.stderr and "--listen" not in result.stderr


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (commands.serve, ()),
        (commands.serve, ("--model", "models/demo")),
        (commands.backend, ("--model", "models/demo", "--listen", "unix:engine.sock")),
        (quantize, ("models/demo", "out", "--method", "rtn", "--scheme", "fp8")),
        (plan, ("--shape", "llama-3.1-8b")),
    ],
    ids=["serve nothing", "serve", "backend", "quantize", "plan"],
)
def test_without_the_extra_that_runs_models_a_command_says_so_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, command: click.Command, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(installed, "WORKER_MODULES", ("safetensors", "torch_that_is_not_there"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 2 and result.stdout == "", result.output
    [line] = result.stderr.splitlines()
    assert "extra `worker`" in line and "looked for torch_that_is_not_there in" in line
    assert list(tmp_path.iterdir()) == []


def test_the_module_has_each_command_by_its_name() -> None:
    shown = headrace("--help")
    assert shown.returncode == 0, shown.stderr
    listed = shown.stdout.partition("Commands:")[2]
    for name in ("serve", "service", "backend", "telemetry", "doctor", "bench", "quantize"):
        assert re.search(rf"^  {name} +\S", listed, re.MULTILINE), listed
    assert "No such command 'serv'" in headrace("serv").stderr


def test_a_missing_model_folder_is_refused_in_one_line_and_soon() -> None:
    began = time.monotonic()
    line = refusal(headrace("serve", "absent-folder", "--listen", "127.0.0.1:0"))
    assert "absent-folder" in line
    assert time.monotonic() - began < 60.0


def test_a_model_folder_without_weights_names_the_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "config.json" in refusal(headrace("serve", "--model", str(tmp_path), "--listen", "127.0.0.1:0"))


def test_a_taken_port_is_refused_soon_and_named(tmp_path: pathlib.Path, llama_folder: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        began = time.monotonic()
        result = headrace("serve", "--model", str(llama_folder), "--load", "dummy", "--listen", address)
        assert address in refusal(result)
        # Below 2 s on a quiet machine.
        assert time.monotonic() - began < 60.0


def test_a_taken_port_of_the_metrics_is_refused_before_anything_starts(llama_folder: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        options = ("--load", "dummy", "--listen", "127.0.0.1:0", "--metrics-listen", address)
        assert f"metrics_listen: {address}: " in refusal(headrace("serve", "--model", str(llama_folder), *options))


@pytest.fixture
def llama_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A valid folder for dummy weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu",
    }  # fmt: skip
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--model", "x", "--block-size", "17"], {}, "--block-size"),
        (["--model", "x", "--max-num-seqs", "many"], {}, "--max-num-seqs"),
        ([], {}, "model is needed"),
        (["--model", "x"], {"HEADRACE_BLOK_SIZE": "16"}, "HEADRACE_BLOCK_SIZE"),
        (["--model", "x"], {"HEADRACE_TENSOR_PARALLEL_SIZE": "2"}, "here it is HEADRACE_TP"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in refused(*arguments)


def test_an_unknown_flag_is_refused_and_the_nearest_one_named() -> None:
    result = CliRunner().invoke(commands.serve, ["--modle", "x"])
    assert result.exit_code == 2
    assert "--model" in result.stderr


def test_doctor_finds_this_machine_able_to_serve() -> None:
    result = headrace("doctor", "--listen", "127.0.0.1:0")
    assert result.returncode == 0, result.stdout
    assert "This machine can serve." in result.stdout
    for subject in ("Python", "torch", "memory", "cores", "shared memory", "open files", "address"):
        assert subject in result.stdout


# What it finds is in test_doctor.
@pytest.mark.slow
def test_doctor_names_a_taken_address_and_exits_with_1_for_a_bad_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        result = headrace("doctor", "--listen", address, "--model", "absent-folder", "--json")
    assert result.returncode == 1
    findings = {row["subject"]: row for row in json.loads(result.stdout)}
    assert findings["torch"]["verdict"] == "ok"
    assert findings["address"]["verdict"] == "limited"
    assert address in findings["address"]["detail"]
    assert findings["model"]["verdict"] == "missing"
    assert "absent-folder" in findings["model"]["detail"]


def test_bench_without_a_server_fails_in_one_line() -> None:
    result = headrace("bench", "--server", "127.0.0.1:1", "--requests", "1")
    assert result.returncode == 1
    assert result.stderr == "headrace: no server listens on 127.0.0.1:1\n"


def test_percentiles_are_by_nearest_rank_in_milliseconds() -> None:
    assert percentiles_ms([index / 1000 for index in range(1, 101)]) == pytest.approx({"p50": 50, "p95": 95, "p99": 99})
    assert percentiles_ms([0.25]) == pytest.approx({"p50": 250, "p95": 250, "p99": 250})
