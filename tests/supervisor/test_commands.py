"""The commands as a person types them: help, mistakes, and a server that must not start."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest

from headrace import local
from headrace_supervisor import config as configs
from headrace_supervisor import settings
from headrace_supervisor.bench.figures import percentiles_ms


def headrace(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "headrace_supervisor", *arguments],
        env={**inherited, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "120", **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that was refused."""
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("command", "groups"), [("serve", configs.SERVE), ("service", configs.SERVICE), ("backend", configs.BACKEND)]
)
def test_help_lists_every_setting_under_its_group(command: str, groups: tuple[settings.Group, ...]) -> None:
    shown = headrace(command, "--help").stdout
    # Long flags are folded over two lines of the table.
    flat = "".join(line[:48].strip() for line in shown.splitlines())
    for group in groups:
        assert f"\n{group.title}" in shown
        assert all(settings.flag_name(name) in flat for name in group.fields())


def test_the_client_shows_flags_that_serve_has() -> None:
    flags = {settings.flag_name(name) for group in configs.SERVE for name in group.fields()}
    readme = pathlib.Path(__file__).parents[2] / "clients" / "python" / "README.md"
    for text in (readme.read_text(), local.__doc__ or ""):
        shown = re.findall(r"is `(--[a-z-]+) \d", text)
        assert shown and flags.issuperset(shown), shown


def test_help_states_range_and_default() -> None:
    row = next(line for line in headrace("serve", "--help").stdout.splitlines() if "--max-outputs" in line)
    assert "at least 1" in row
    assert row.rstrip().endswith("16")


def test_the_longest_sequence_has_two_names(tmp_path: pathlib.Path) -> None:
    for name in ("--max-model-len", "--max-seq-len"):
        line = refusal(headrace("serve", "--model", str(tmp_path), name, "-1"))
        assert line.startswith("headrace: --max-model-len: input should be greater than or equal to 0")


def test_a_missing_model_folder_is_refused_in_one_line_and_soon() -> None:
    began = time.monotonic()
    line = refusal(headrace("serve", "--model", "absent-folder", "--listen", "127.0.0.1:0"))
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
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    assert message in refusal(headrace("serve", *arguments, **environment))


def test_an_unknown_flag_is_refused_and_the_nearest_one_named() -> None:
    result = headrace("serve", "--modle", "x")
    assert result.returncode == 2
    assert "--model" in result.stderr


def test_doctor_finds_this_machine_able_to_serve() -> None:
    result = headrace("doctor", "--listen", "127.0.0.1:0")
    assert result.returncode == 0, result.stdout
    assert "This machine can serve." in result.stdout
    for subject in ("Python", "torch", "memory", "cores", "shared memory", "open files", "address"):
        assert subject in result.stdout


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
    assert result.stderr.startswith("headrace: 127.0.0.1:1")
    assert "Traceback" not in result.stderr


def test_percentiles_are_by_nearest_rank_in_milliseconds() -> None:
    assert percentiles_ms([index / 1000 for index in range(1, 101)]) == pytest.approx({"p50": 50, "p95": 95, "p99": 99})
    assert percentiles_ms([0.25]) == pytest.approx({"p50": 250, "p95": 250, "p99": 250})
