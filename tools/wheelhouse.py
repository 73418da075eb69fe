"""Wheels for a Linux machine without a network that has torch and triton already.

`make wheelhouse` collects them.

Owns what belongs in: our two wheels from dist/, what they need at run time, and what runs their
tests there. Left out: torch, triton and their GPU libraries, which fill gigabytes and are tied to
the machine's driver. Versions and hashes are those of requirements.lock. docs/install.md says what
to type on the other machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import shutil
import subprocess
import sys

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from setup_environment import ROOT, TORCH_PACKAGES, lock_entries

TARGET = ROOT / "wheelhouse"
ROOTS = ("headrace-server", "safetensors", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
OURS = ("headrace", "headrace-server")
PLATFORMS = (
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_5_x86_64",
)
# 68 MiB, of which 12 are the demo model.
MAX_MIB = 96


def needed(python_version: str) -> set[str]:
    """Names of all distributions that the roots need on that Python."""
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0", "extra": ""}
    names: set[str] = set()
    todo = [canonicalize_name(name) for name in ROOTS]
    while todo:
        name = todo.pop()
        if name in names or name == "triton" or TORCH_PACKAGES.match(name + "=="):
            continue
        names.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                todo.append(canonicalize_name(requirement.name))
    return names


def requirement_lines(names: set[str], python_version: str) -> list[str]:
    """Returns lock entries of these names without their markers.

    pip would judge markers by this machine's Python.
    """
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    lines = []
    for entry in lock_entries():
        pin, _, hashes = entry.partition("\\\n")
        pin, _, marker = pin.partition(" ; ")
        if pin.split("==")[0].strip() in names and (not marker or Marker(marker.strip()).evaluate(environment)):
            lines.append(f"{pin.strip()} \\\n{hashes}")
    return lines


def download(lines: list[str], python_version: str) -> None:
    """Fetches the wheels, hashes checked."""
    listed = TARGET / "requirements.txt"
    listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python_version,
        *platforms,
        "--progress-bar=off",
        "--quiet",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--require-hashes",
        *options,
        "--dest",
        str(TARGET),
        "-r",
        str(listed),
    ]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"wheelhouse: a wheel for Python {python_version} could not be had")
    listed.unlink()


def main() -> None:
    """Fills ./wheelhouse anew and says how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python-version", required=True, help="for example 3.12")
    python_version = parser.parse_args().python_version
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir()
    names = needed(python_version)
    lines = requirement_lines(names - set(OURS), python_version)
    print(f"wheelhouse: fetching {len(lines)} wheels for Python {python_version}", flush=True)
    download(lines, python_version)
    for wheel in (ROOT / "dist").glob("headrace*.whl"):
        shutil.copy(wheel, TARGET)
    size = sum(path.stat().st_size for path in TARGET.iterdir()) / 2**20
    print(f"wheelhouse: {len(list(TARGET.iterdir()))} wheels, {size:.1f} MiB, in {pathlib.Path(TARGET).name}/")
    if size > MAX_MIB:
        sys.exit(f"wheelhouse: more than {MAX_MIB} MiB")


if __name__ == "__main__":
    main()
