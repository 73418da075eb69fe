"""The client distribution by itself.

Tests see what it imports, what its wheel holds, and that it runs in an empty environment.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest
from tests.clients.canned_service import CannedServer, answer

import headrace

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clients/python"
# Import names of grpcio, protobuf, googleapis-common-protos, click, rich, and what those need
# themselves.
ALLOWED = {"headrace", "grpc", "google", "click", "rich", "markdown_it", "mdurl", "pygments", "typing_extensions"}

_BLOCKER = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {allowed!r} and top not in sys.stdlib_module_names:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
import importlib, pkgutil
import headrace
for found in pkgutil.walk_packages(headrace.__path__, "headrace."):
    if found.name != "headrace.__main__":
        importlib.import_module(found.name)
import headrace.__main__
"""


def _project() -> dict[str, object]:
    return tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]


def test_the_client_imports_nothing_but_its_dependencies() -> None:
    script = _BLOCKER.format(allowed=ALLOWED)
    process = subprocess.run(
        [sys.executable, "-c", script, "--help"],
        env=os.environ | {"PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "generate" in process.stdout


def test_the_version_is_the_one_that_is_published() -> None:
    assert headrace.__version__ == _project()["version"]


def test_all_public_names_exist() -> None:
    assert all(hasattr(headrace, name) for name in headrace.__all__)
    assert sorted(headrace.__all__) == headrace.__all__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--skip-dependency-check",
        "-o",
        str(out),
        str(PACKAGE),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("headrace-*.whl"))


def test_the_wheel_owns_package_and_command_with_stubs_types_and_licence(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "headrace",
        "headrace_command",
        f"headrace-{headrace.__version__}.dist-info",
    }
    for expected in ("headrace/py.typed", "headrace/v1/inference_pb2.pyi", "headrace/cli/chat.py"):
        assert expected in names
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_installs_and_runs_in_an_empty_environment(
    wheel: pathlib.Path, tmp_path: pathlib.Path, server: CannedServer
) -> None:
    """An environment that is empty but for the declared dependencies.

    They are linked in from this one, so that the test needs no network.
    """
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    packages = next(home.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    source = pathlib.Path(next(p for p in sys.path if p.endswith("site-packages")))
    for name in ALLOWED - {"headrace"}:
        for found in (source / name, source / f"{name}.py"):
            if found.exists():
                (packages / found.name).symlink_to(found)
    environment = {"PATH": os.environ["PATH"], "HEADRACE_SERVER": server.address}
    command = [str(home / "bin/python"), "-m", "headrace", "generate", "hello", "--max-tokens", "2"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (0, answer(2) + "\n"), process.stderr


# The wheel is installed and run in the test above; with pip, in tests/house/test_packaging too.
@pytest.mark.slow
def test_the_wheel_installs_with_pip_and_gives_the_headrace_command(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The real installation, dependencies resolved from the configured package index."""
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    install = [str(home / "bin/python"), "-m", "pip", "install", "-q", str(wheel)]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode != 0 and "No matching distribution" in installed.stderr:
        pytest.skip("no package index can be reached")
    assert installed.returncode == 0, installed.stderr
    script = str(home / "bin/headrace")
    assert (
        subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
        == headrace.__version__
    )
    refused = subprocess.run([script, "serve"], capture_output=True, text=True)
    assert refused.returncode == 2 and "pip install" in refused.stderr
