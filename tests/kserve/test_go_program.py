"""A Go program whose stubs come from protos/inference alone, against a real server."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from types import ModuleType

import pytest
from tests.kserve.conformance_models import all_models
from tests.support.running_server import running_server
from tests.support.toolchains import GO, left_out, require

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(__file__).resolve().parent / "go_program"


def generator(name: str) -> ModuleType:
    """A module of protos/, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "protos" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def protoc(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *arguments]
    subprocess.run(command, check=True, timeout=600)


# Python's client speaks the same wire in test_language_models.
@pytest.mark.slow
def test_a_go_program_of_our_protos_infers_and_streams(tmp_path: pathlib.Path) -> None:
    go = require(GO)
    generate_go = generator("generate_go")
    if (why := generate_go.missing()) is not None:
        left_out(GO, why)
    files = ["inference/grpc_service.proto", "inference/model_config.proto"]
    generate_go.generate(protoc, files, files[:1], tmp_path)
    for source in (ROOT / "clients" / "go" / "go.mod", ROOT / "clients" / "go" / "go.sum", PROGRAM / "main.go"):
        shutil.copy(source, tmp_path)
    environment = os.environ | {"GOFLAGS": "-mod=mod"}
    subprocess.run([go, "build", "-o", "program", "."], cwd=tmp_path, env=environment, check=True, timeout=600)
    with running_server("--device", "cpu", "--conformance-models", all_models.__name__) as server:
        ended = subprocess.run(
            [tmp_path / "program", server.address], capture_output=True, text=True, timeout=600, check=False
        )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("PASS: ")
