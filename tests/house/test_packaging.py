"""Both distributions as wheels in empty environments, the lock file, and the Makefile's list.

test_installed_wheels.py (slow) installs them with what they need and runs the demo.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Collection
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from trove_classifiers import classifiers

from headrace.cli import group
from headrace.local_server.installed import WORKER_MODULES
from headrace_model_folder.folder import ModelFolder

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Names that an installed wheel may own at the top level.
OURS = re.compile(r"headrace(_\w+)?(-[\w.]+\.dist-info)?/")
_LOAD_COMMANDS = """
import click, importlib.metadata
for point in sorted(importlib.metadata.entry_points(group="headrace.commands")):
    assert isinstance(point.load(), click.Command)
    print(point.name)
"""
PROJECTS = {"headrace": ROOT / "clients" / "python", "headrace-server": ROOT}


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Wheels by distribution, built from source distributions that were built from this folder."""
    out = tmp_path_factory.mktemp("dist")
    for source in PROJECTS.values():
        built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
        assert built.returncode == 0, built.stdout + built.stderr
    return {"headrace": next(out.glob("headrace-*.whl")), "headrace-server": next(out.glob("headrace_server-*.whl"))}


def project(name: str) -> dict[str, Any]:
    """The table `project` of a distribution's pyproject.toml."""
    content = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())
    table = content["project"]
    assert isinstance(table, dict)
    return table


def installed(folder: pathlib.Path, *wheels: pathlib.Path, without: Collection[str] = ()) -> pathlib.Path:
    """Python of a new environment that has these wheels.

    Their dependencies, but for the modules `without`, are borrowed from this environment: no index
    is needed.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    made = run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--quiet", *wheels
    )
    assert made.returncode == 0, made.stderr
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    site = next(folder.glob("lib/python*/site-packages"))
    # A link per package instead of a path entry: editable installs of ours must not be found
    # through it.
    for entry in pathlib.Path(packages).iterdir():
        left_out = "headrace" in entry.name or entry.name in without or entry.suffix == ".pth"
        if not left_out and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return python


# Wheels take 5 s to build. The client's is built and run in tests/clients/test_distribution.
@pytest.mark.slow
def test_the_client_alone_runs_and_says_how_to_get_a_server(
    wheels: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    python = installed(tmp_path / "env", wheels["headrace"])
    helped = run(python.with_name("headrace"), "--help", cwd=tmp_path)
    assert helped.returncode == 0, helped.stderr
    assert "generate" in helped.stdout
    refused = run(python.with_name("headrace"), "serve", cwd=tmp_path)
    assert refused.returncode != 0
    assert "headrace-server" in refused.stdout + refused.stderr


# Wheels take 5 s to build. The client's is built and run in tests/clients/test_distribution.
@pytest.mark.slow
def test_the_server_adds_its_commands_to_the_same_script(
    wheels: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    python = installed(tmp_path / "env", *wheels.values())
    loaded = run(python, "-c", _LOAD_COMMANDS, cwd=tmp_path)
    assert loaded.stdout.split() == sorted(group.SERVER_COMMANDS), loaded.stderr
    helped = run(python.with_name("headrace"), "serve", "--help", cwd=tmp_path)
    assert helped.returncode == 0 and "headrace serve" in helped.stdout, helped.stderr
    refused = run(
        python.with_name("headrace"), "serve", "--listen", "127.0.0.1:0", "--model", tmp_path / "absent", cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "absent" in refused.stderr
    assert "Traceback" not in refused.stderr


# tests/supervisor/test_commands has them in a process that looks for a module there is not.
@pytest.mark.slow
def test_without_the_extra_what_runs_a_model_is_refused_in_one_line(
    wheels: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    python = installed(tmp_path / "env", *wheels.values(), without=WORKER_MODULES)
    model = ROOT / "models" / "demo"
    for command in (
        ("serve",),
        ("serve", "--model", model, "--runtime-folder", tmp_path / "runtime"),
        ("backend", "--model", model, "--listen", f"unix:{tmp_path}/engine.sock"),
        ("quantize", model, tmp_path / "out", "--method", "rtn", "--scheme", "fp8"),
        ("plan", "--shape", "llama-3.1-8b"),
        ("demo",),
    ):
        refused = run(python.with_name("headrace"), *command, cwd=tmp_path)
        assert refused.returncode in (1, 2), command
        assert refused.stdout == "" and len(refused.stderr.splitlines()) == 1, refused.stderr
        assert "extra `worker`" in refused.stderr and "torch" in refused.stderr
        assert "pip install 'headrace-server[worker]'" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["env"], "nothing was begun"
    # Everything that a service, which runs there, is made of.
    imported = run(python, "-c", "import headrace_service.main, headrace_telemetry.main; print('well')", cwd=tmp_path)
    assert imported.stdout == "well\n", imported.stderr


# Wheels take 5 s to build. The client's is built and run in tests/clients/test_distribution.
@pytest.mark.slow
def test_the_server_wheel_brings_the_demo_model_and_nothing_else_of_its_folder(
    wheels: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    packed = zipfile.ZipFile(wheels["headrace-server"])
    names = [name for name in packed.namelist() if name.startswith("headrace_demo_model/")]
    packed.extractall(tmp_path, names)
    folder = tmp_path / "headrace_demo_model" / "demo"
    ours, theirs = ModelFolder.open(ROOT / "models" / "demo"), ModelFolder.open(folder)
    assert theirs.revision == ours.revision
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


# Wheels take 5 s to build. The client's is built and run in tests/clients/test_distribution.
@pytest.mark.slow
def test_wheels_own_no_name_but_ours(wheels: dict[str, pathlib.Path]) -> None:
    for wheel in wheels.values():
        strangers = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if not OURS.match(name)}
        assert strangers == set()


# Wheels take 5 s to build. The client's is built and run in tests/clients/test_distribution.
@pytest.mark.slow
def test_the_server_wheel_holds_every_package(wheels: dict[str, pathlib.Path]) -> None:
    rooms = {
        name.split("/")[0] for name in zipfile.ZipFile(wheels["headrace-server"]).namelist() if name.count("/") >= 1
    }
    packages = {"service", "supervisor", "backend", "model_folder", "credentials", "kernels", "protos", "ray"}
    assert {f"headrace_{package}" for package in packages} <= rooms


@pytest.mark.parametrize(("name", "fewest"), [("requirements.lock", 50), ("requirements-ray.lock", 20)])
def test_a_lock_file_has_hashes_and_no_host(name: str, fewest: int) -> None:
    text = (ROOT / name).read_text()
    entries = re.split(r"\n(?=[a-z])", text)[1:]
    assert len(entries) > fewest
    assert all("==" in entry.splitlines()[0] and "--hash=sha256:" in entry for entry in entries)
    assert not re.search(r"://|file:|^-e", text, re.MULTILINE)


def pins(lock: str) -> dict[str, str]:
    """The versions in a lock file, by name."""
    found = re.findall(r"^([\w.-]+)==([^ ;\\]+)", (ROOT / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(pinned): version for pinned, version in found}


def test_what_ray_needs_is_locked_beside_the_rest_and_not_twice() -> None:
    assert "ray" in pins("requirements-ray.lock")
    assert not pins("requirements-ray.lock").keys() & pins("requirements.lock").keys()


@pytest.mark.parametrize("name", PROJECTS)
def test_every_requirement_is_bounded_and_holds_for_the_locked_version(name: str) -> None:
    locked = {**pins("requirements.lock"), **pins("requirements-ray.lock")}
    table = project(name)
    extras = [text for extra in table.get("optional-dependencies", {}).values() for text in extra]
    for requirement in map(Requirement, [*table["dependencies"], *extras]):
        if requirement.name == "headrace":
            continue
        assert {bound.operator for bound in requirement.specifier} == {">=", "<"}, requirement
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("name", PROJECTS)
def test_the_metadata_has_known_classifiers_and_the_oldest_python(name: str) -> None:
    table = project(name)
    assert set(table["classifiers"]) <= classifiers
    assert table["requires-python"] == ">=3.11"


def test_the_client_knows_the_servers_commands_and_its_extra() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(group.SERVER_COMMANDS) == set(content["entry-points"][group.ENTRY_POINT_GROUP])
    extra = {Requirement(text).name for text in content["optional-dependencies"]["worker"]}
    assert set(WORKER_MODULES) == extra


def test_both_distributions_have_one_version() -> None:
    client, server = (
        tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in ("clients/python", ".")
    )
    assert client["version"] == server["version"]
    assert f"headrace=={client['version']}" in server["dependencies"]


# Wheels take 5 s to build. The client's is built and run in tests/clients/test_distribution.
@pytest.mark.slow
def test_the_page_on_installing_names_the_wheels_that_are_built(wheels: dict[str, pathlib.Path]) -> None:
    named = set(re.findall(r"dist/([\w.-]+\.whl)", (ROOT / "docs/install.md").read_text()))
    assert named == {wheel.name for wheel in wheels.values()}


def test_make_lists_its_targets() -> None:
    listed = run("make", "help")
    assert listed.returncode == 0
    assert run("make").stdout == listed.stdout
    for target in "setup demo test try-wheels check bench protos lock wheelhouse build stats clean help".split():
        assert re.search(rf"^  {target} +\S", listed.stdout, re.MULTILINE), target
