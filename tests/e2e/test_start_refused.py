"""What can't be served is refused before anything starts.

The server ends with exit code 2 within seconds and one line that names what is wrong.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest
from tests.model_folder.folders import CONFIG, header_of, write_folder, write_safetensors
from tests.support.running_server import RunningServer, refused

from headrace_model_folder.config import parse_config
from headrace_model_folder.expected_tensors import expected_tensors

# On a quiet machine one or two.
LIMIT_S = 120.0
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


def rewritten(path: pathlib.Path, change: Callable[[dict[str, tuple[int, ...]]], None]) -> None:
    """Writes the weights anew with changed names or shapes."""
    shapes = dict(expected_tensors(parse_config(CONFIG)))
    change(shapes)
    write_safetensors(path / WEIGHTS, *header_of(shapes))


def without_folder(path: pathlib.Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def truncated(path: pathlib.Path) -> None:
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate((path / WEIGHTS).stat().st_size - 100)


def unknown_architecture(path: pathlib.Path) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"]}))


def own_code(path: pathlib.Path) -> None:
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["OwnForCausalLM"], "auto_map": code}))


BROKEN: dict[str, tuple[Callable[[pathlib.Path], None], list[str]]] = {
    "missing folder": (without_folder, ["no such model folder"]),
    "missing weights": (lambda path: (path / WEIGHTS).unlink(), [WEIGHTS]),
    "truncated weights": (truncated, [WEIGHTS]),
    "unknown architecture": (unknown_architecture, ["config.json", "MambaForCausalLM"]),
    "code of its own": (own_code, ["config.json", "OwnForCausalLM", "(auto_map) is never run"]),
    "missing tensor": (lambda path: rewritten(path, lambda shapes: shapes.pop(NORM) and None), [NORM]),
    "surplus tensor": (
        lambda path: rewritten(path, lambda s: s.update({"model.extra": (3,)})), [WEIGHTS, "model.extra"]
    ),
    "misshapen tensor": (lambda path: rewritten(path, lambda s: s.update({NORM: (17,)})), [WEIGHTS, NORM, "17"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_model_folder_is_refused_in_one_line(tmp_path: pathlib.Path, fault: str) -> None:
    damage, named = BROKEN[fault]
    folder = write_folder(tmp_path / "model")
    damage(folder)
    ended, seconds = refused(model=folder)
    assert ended.returncode == 2, ended.stderr
    assert seconds < LIMIT_S
    assert len(ended.stderr.splitlines()) == 1 and ended.stdout == ""
    assert all(name in ended.stderr for name in named), ended.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--model-name", "../x"),
            "headrace: model_name: '../x' is no name of a model: 1 to 128 of A-Z a-z 0-9 . _ + -",
        ),
        (
            ("--listen", "unix:/nonexistent/x"),
            "headrace: unix:/nonexistent/x: No such file or directory; the folder of a",
        ),
        (("--listen", "unix:"), "headrace: listen: 'unix:' must be HOST:PORT with a port of 0 to 65535, or unix:PATH"),
    ],
)
def test_a_name_or_address_that_can_not_be_is_refused_before_anything_starts(
    options: tuple[str, ...], said: str
) -> None:
    ended, _ = refused(*options)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith(said) and ended.stdout == ""


def test_a_second_server_on_the_same_port_is_refused(server: RunningServer) -> None:
    ended, seconds = refused(listen=server.address)
    assert ended.returncode == 2
    assert seconds < LIMIT_S
    assert len(ended.stderr.splitlines()) == 1 and server.address in ended.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--block-size", "17"), "--block-size: "),
        (("--max-model-len", "100000"), "max_model_len is 100000; the model's context has 2048 tokens"),
        (("--device", "tpu"), "device is 'tpu'; it must be auto, cpu, cuda or cuda:<index>"),
        (("--keys-file", "/nonexistent/keys.json"), "/nonexistent/keys.json: No such file or directory"),
        (("--tls-cert", "/nonexistent/c", "--tls-key", "k"), "/nonexistent/c: No such file or directory"),
    ],
)
def test_a_setting_that_can_not_work_is_refused_in_one_line_before_anything_starts(
    options: tuple[str, ...], named: str
) -> None:
    ended, _ = refused(*options)
    assert ended.returncode == 2 and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith("headrace: ") and named in ended.stderr


def test_a_gpu_that_is_not_there_is_refused() -> None:
    ended, _ = refused("--device", "cuda:99")
    assert ended.returncode == 2
    assert "cuda:99" in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


# What a worker refuses ends its backend in tests/backend/test_start_refused, and what a backend
# refuses the server in tests/supervisor/test_supervisor.
@pytest.mark.slow
def test_what_only_a_worker_can_refuse_is_the_last_line_and_the_only_one_that_says_so() -> None:
    ended, _ = refused("--device", "cpu", "--graph-sizes", "1,2")
    assert ended.returncode == 2
    *before, last = ended.stderr.splitlines()
    assert last == "headrace: model demo: worker 0: graph_sizes is 1,2; the CPU has no graphs: auto and off work"
    assert all("[info" in line and "disconnected" not in line for line in before), before
