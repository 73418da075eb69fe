"""Both wheels as somebody installs them: in fresh environments, with what an index has for them.

Everything runs in an empty folder, so that nothing of this checkout is found by chance.
test_packaging.py holds the same promises with this environment's packages, without an index.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uv
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECTS = (ROOT / "clients" / "python", ROOT)
# What tests set for themselves and a user's shell does not.
_OF_TESTS = ("HEADRACE_", "PYTHON", "TRITON_", "VIRTUAL_ENV", "UV_TORCH_BACKEND")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TESTS)}
Install = Callable[..., pathlib.Path]


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """The wheels of `make build`, the client's first."""
    out = tmp_path_factory.mktemp("dist")
    for source in PROJECTS:
        built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=ROOT)
        assert built.returncode == 0, built.stdout + built.stderr
    return [next(out.glob("headrace-*.whl")), next(out.glob("headrace_server-*.whl"))]


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Makes an environment with these requirements; gives its `headrace`.

    With the build of torch (for CPUs or not) that this environment has, which uv has kept.
    """
    build = "cpu" if importlib.metadata.version("torch").endswith("+cpu") else ""

    def made(*requirements: str | pathlib.Path) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("env")
        backend = ("--torch-backend", build) if build else ()
        for command in (
            ("venv", "--quiet", "--python", sys.executable, folder / "env"),
            ("pip", "install", "--quiet", "--python", folder / "env/bin/python", *backend, *requirements),
        ):
            done = run(uv.find_uv_bin(), *command, cwd=folder)
            assert done.returncode == 0, done.stderr
        return folder / "env/bin/headrace"

    return made


@pytest.fixture(scope="module")
def with_worker(wheels: list[pathlib.Path], install: Install) -> pathlib.Path:
    """`headrace` where the server has its extra `worker`."""
    return install(wheels[0], f"{wheels[1]}[worker]")


@pytest.fixture(scope="module")
def without_worker(wheels: list[pathlib.Path], install: Install) -> pathlib.Path:
    """`headrace` where the server has no extra."""
    return install(*wheels)


@pytest.fixture
def oldest(wheels: list[pathlib.Path], install: Install, tmp_path: pathlib.Path) -> pathlib.Path:
    """`headrace` with the oldest version of everything that the wheels ask for by name."""
    tables = [tomllib.loads((project / "pyproject.toml").read_text())["project"] for project in PROJECTS]
    listed = [line for table in tables for line in table["dependencies"] if not line.startswith("headrace")]
    listed += tables[1]["optional-dependencies"]["worker"]
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join(listed))
    return install("--resolution", "lowest-direct", "-r", requirements, *wheels)


@pytest.fixture
def empty(tmp_path: pathlib.Path) -> pathlib.Path:
    """An empty folder to stand in."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def assert_the_demo_answers(headrace: pathlib.Path, folder: pathlib.Path) -> None:
    shown = run(headrace, "demo", "--max-tokens", "24", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    prompt, answer = shown.stdout.splitlines()[:2]
    assert prompt.startswith("> ") and len(answer.split()) > 5
    assert "headrace_demo_model/demo on a free loopback port" in shown.stderr
    assert "Traceback" not in shown.stderr and "warning" not in shown.stderr
    assert list(folder.iterdir()) == []


def test_the_demo_answers_from_installed_wheels(with_worker: pathlib.Path, empty: pathlib.Path) -> None:
    assert_the_demo_answers(with_worker, empty)


def test_the_demo_answers_with_the_oldest_versions_that_are_allowed(oldest: pathlib.Path, empty: pathlib.Path) -> None:
    assert_the_demo_answers(oldest, empty)


def test_without_the_extra_serve_and_demo_are_one_line(without_worker: pathlib.Path, empty: pathlib.Path) -> None:
    for command in (("serve", "--model", ROOT / "models" / "demo"), ("demo",)):
        refused = run(without_worker, *command, cwd=empty)
        assert refused.returncode in (1, 2)
        assert refused.stdout == "" and len(refused.stderr.splitlines()) == 1, refused.stderr
        assert "pip install 'headrace-server[worker]'" in refused.stderr
    assert list(empty.iterdir()) == []


def test_a_service_without_torch_serves_for_a_backend_that_has_it(
    with_worker: pathlib.Path, without_worker: pathlib.Path, wheels: list[pathlib.Path], install: Install
) -> None:
    """And a client that was installed alone, with the newest versions that it allows, asks it."""
    client = install(wheels[0])
    model = next(without_worker.parents[1].glob("lib/python*/site-packages/headrace_demo_model/demo"))
    with ExitStack() as stack:
        # Short, because a socket's path must be; private, because a backend demands it.
        folder = stack.enter_context(private_folder())
        engine, service = f"unix:{folder}/engine.sock", f"unix:{folder}/service.sock"
        backend = ("backend", "--model", model, "--listen", engine, "--kv-memory", "64MiB")
        stack.enter_context(running(folder, with_worker, *backend))
        stack.enter_context(running(folder, without_worker, "service", "--engine", engine, "--listen", service))
        wait_until(lambda: run(without_worker, "health", service, cwd=folder).returncode == 0, what="a healthy service")
        answered = run(client, "generate", "Once upon a time", "--max-tokens", "8", "--server", service, cwd=folder)
    assert answered.returncode == 0 and answered.stdout.strip(), answered.stderr


@contextmanager
def private_folder() -> Iterator[pathlib.Path]:
    """A folder of mode 0700 with a short path."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        yield pathlib.Path(folder)


@contextmanager
def running(folder: pathlib.Path, *command: str | pathlib.Path) -> Iterator[None]:
    """A process for the length of the block, its output in a file of the folder."""
    with open(folder / f"{command[1]}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(120)
