"""A model folder that brings code of its own (`auto_map`).

It is served as its architecture, nothing of that code is run, and the operator gets a line about
it.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from tests.support.rpc import generate, greedy
from tests.support.running_server import DEMO, RunningServer, running_server

CPU = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "128", "--log-format", "json")
PROMPT = list(range(3, 40))


def folder_with_code(folder: pathlib.Path, trace: pathlib.Path) -> pathlib.Path:
    """The demo model with modules that leave a trace when they are run.

    They have every name that its configuration and its tokenizer's could bring.
    """
    folder.mkdir()
    for file in DEMO.glob("*.*"):
        shutil.copy(file, folder)
    for module in ("modeling_own", "configuration_own", "tokenization_own", "__init__", "sitecustomize"):
        (folder / f"{module}.py").write_text(f"open({str(trace)!r}, 'a').write(__name__)\n")
    code = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        "AutoTokenizer": ["tokenization_own.OwnTokenizer", None],
    }
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "auto_map": code}))
    return folder


# Nothing of ours imports a file of a folder; what is said is also in tests/supervisor/test_doctor.
@pytest.mark.slow
def test_it_is_served_as_its_architecture_and_reported_once(tmp_path: pathlib.Path, server: RunningServer) -> None:
    trace = tmp_path / "trace"
    with running_server(*CPU, model=folder_with_code(tmp_path / "own", trace)) as own:
        assert generate(own.address, greedy(PROMPT, 16)).tokens == generate(server.address, greedy(PROMPT, 16)).tokens
        reported = [line for line in own.lines if "auto_map" in line]
    assert len(reported) == 1, reported
    assert json.loads(reported[0])["architecture"] == "LlamaForCausalLM" and "it is not run" in reported[0]
    assert not trace.exists()
