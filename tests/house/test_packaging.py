"""Both distributions as wheels in empty environments, the lock file, and the Makefile's list."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Names that an installed wheel may own at the top level.
OURS = re.compile(r"headrace(_\w+)?(-[\w.]+\.dist-info)?/")


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Built wheels by distribution."""
    out = tmp_path_factory.mktemp("dist")
    for source in (ROOT / "clients" / "python", ROOT):
        built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
        assert built.returncode == 0, built.stdout + built.stderr
    return {"headrace": next(out.glob("headrace-*.whl")), "headrace-server": next(out.glob("headrace_server-*.whl"))}


def installed(folder: pathlib.Path, *wheels: pathlib.Path) -> pathlib.Path:
    """Python of a new environment that has these wheels.

    Their dependencies are borrowed from this environment: no index is needed.
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
        if "headrace" not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return python


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


def test_the_server_adds_its_commands_to_the_same_script(
    wheels: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    python = installed(tmp_path / "env", *wheels.values())
    for command in ("serve", "service", "backend", "doctor", "bench", "keys", "certs"):
        helped = run(python.with_name("headrace"), command, "--help", cwd=tmp_path)
        assert helped.returncode == 0, helped.stderr
        assert f"headrace {command}" in helped.stdout
        assert "cannot be loaded" not in helped.stdout + helped.stderr
    refused = run(python.with_name("headrace"), "serve", "--model", tmp_path / "absent", cwd=tmp_path)
    assert refused.returncode == 2
    assert "absent" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_wheels_own_no_name_but_ours(wheels: dict[str, pathlib.Path]) -> None:
    for wheel in wheels.values():
        strangers = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if not OURS.match(name)}
        assert strangers == set()


def test_the_server_wheel_holds_every_package(wheels: dict[str, pathlib.Path]) -> None:
    rooms = {
        name.split("/")[0] for name in zipfile.ZipFile(wheels["headrace-server"]).namelist() if name.count("/") >= 1
    }
    packages = {"service", "supervisor", "backend", "model_folder", "credentials", "kernels", "protos"}
    assert {f"headrace_{package}" for package in packages} <= rooms


def test_the_lock_file_has_hashes_and_no_host() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=[a-z])", text)[1:]
    assert len(entries) > 50
    assert all("==" in entry.splitlines()[0] and "--hash=sha256:" in entry for entry in entries)
    assert not re.search(r"://|file:|^-e", text, re.MULTILINE)


def test_both_distributions_have_one_version() -> None:
    client, server = (
        tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in ("clients/python", ".")
    )
    assert client["version"] == server["version"]
    assert f"headrace=={client['version']}" in server["dependencies"]


def test_make_lists_its_targets() -> None:
    listed = run("make", "help")
    assert listed.returncode == 0
    assert run("make").stdout == listed.stdout
    for target in "setup demo test check bench protos lock wheelhouse build stats clean help".split():
        assert re.search(rf"^  {target} +\S", listed.stdout, re.MULTILINE), target
