"""What the Dockerfile promises.

Root in no image that runs, nothing that builds in them, packages as they are locked, a context
without surprises.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import pathlib
import re
import shlex
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.compose_files import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import image_requirements  # noqa: E402

RUNNING = ("service", "telemetry", "backend", "backend-gpu")


class Stage:
    """One FROM of the Dockerfile with its instructions."""

    def __init__(self, base: str, name: str) -> None:
        self.base = base
        self.name = name
        self.instructions: list[tuple[str, str]] = []


def dockerfile() -> dict[str, Stage]:
    """Stages by name."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(base, name)
        elif stages:
            stage.instructions.append((word, rest.strip()))
    return stages


def all_instructions(name: str) -> list[tuple[str, str]]:
    """A stage's instructions behind those of what it is built on."""
    stage = dockerfile()[name]
    inherited = all_instructions(stage.base) if stage.base in dockerfile() else []
    return inherited + stage.instructions


@pytest.mark.parametrize("name", RUNNING)
def test_an_image_runs_as_nobody_in_particular(name: str) -> None:
    users = [rest for word, rest in all_instructions(name) if word == "USER"]
    assert users[-1] == "10001:10001"
    assert ("ENTRYPOINT", '["headrace"]') in all_instructions(name)


@pytest.mark.parametrize("name", RUNNING)
def test_an_image_installs_nothing_by_itself(name: str) -> None:
    commands = " ".join(rest for word, rest in all_instructions(name) if word == "RUN")
    assert not re.search(r"\b(pip|uv|curl|wget|git)\b", commands)
    assert ("apt-get" in commands) is (name == "backend-gpu"), "Triton needs a compiler at run time, nobody else"


def test_every_stage_is_built_on_the_base_that_was_given() -> None:
    stages = dockerfile()
    for stage in stages.values():
        assert stage.base in ("${BASE_IMAGE}", *stages)


def test_the_environment_of_an_image_is_installed_with_hashes() -> None:
    installs = [
        command
        for stage in dockerfile().values()
        for word, rest in stage.instructions
        if word == "RUN"
        for command in re.findall(r"pip [^;&]*install [^;&]*", rest)
    ]
    assert installs
    for command in installs:
        ours = "/wheels/headrace*.whl" in command
        torch = '"$torch"' in command
        assert "--no-deps" in command
        assert ours or torch or "--require-hashes" in command, command


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for stage in dockerfile().values():
        for word, rest in stage.instructions:
            if word != "COPY" or "--from" in rest:
                continue
            *sources, _ = [part for part in shlex.split(rest) if not part.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(
                    fnmatch.fnmatch(source, path) or pathlib.PurePath(source).is_relative_to(path) for path in kept
                ), source
    for secret in (".git", ".env", ".venv", "build"):
        assert secret not in kept


@pytest.mark.parametrize("extra", ["", "worker"])
def test_an_image_has_what_its_distributions_need(extra: str) -> None:
    needed, todo = set[str](), [("headrace-server", extra), ("headrace", "")]
    while todo:
        name, wanted = todo.pop()
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            found = canonicalize_name(requirement.name)
            if found in needed or (requirement.marker and not requirement.marker.evaluate({"extra": wanted})):
                continue
            needed.add(found)
            todo += [(found, each) for each in requirement.extras or {""}]
    assert needed - image_requirements.OURS <= locked([extra] if extra else [])


def test_an_image_of_services_has_neither_torch_nor_tests() -> None:
    service, backend = locked([]), locked(["worker"])
    assert {"grpcio", "tokenizers", "numpy"} <= service
    assert not {name for name in service if image_requirements.TORCH_PACKAGES.match(name)}
    assert {"torch", "safetensors"} <= backend
    # Another build of torch takes the place of the locked one, and brings no triton on a CPU.
    assert {"safetensors", "triton"} <= {name for name in backend if not image_requirements.TORCH_PACKAGES.match(name)}
    assert not backend & {"pytest", "hypothesis", "transformers", "mypy", "ruff", "pip", "uv"}


def test_a_requirement_keeps_its_marker_and_all_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text()
    packages = image_requirements.read_lock(text)
    assert sum(len(package.lines) - 1 for package in packages.values()) == text.count("--hash=sha256:")
    assert all(len(package.lines) > 1 for package in packages.values())
    assert "sys_platform" in packages["triton"].lines[0]


def test_what_the_lock_lacks_is_said(tmp_path: pathlib.Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "x"\ndependencies = ["Nowhere_To.Be-Found>=1; python_version > \'3\'"]\n')
    assert image_requirements.wanted([project], []) == {"nowhere-to-be-found"}


def locked(extras: list[str]) -> set[str]:
    packages = image_requirements.read_lock(image_requirements.LOCK.read_text())
    return image_requirements.with_what_they_need(
        image_requirements.wanted(image_requirements.PROJECTS, extras), packages
    )
