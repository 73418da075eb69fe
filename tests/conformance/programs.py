"""Programs that nobody here wrote, and where they are had from.

Python packages come by hash into build/conformance, in an environment of their own, if
CONFORMANCE_DOWNLOADS=1 allows it. Example programs come from a checkout of Triton's repositories,
which whoever runs this names in the environment: TRITON_CLIENT_CHECKOUT
(triton-inference-server/client) and VLLM_BACKEND_CHECKOUT (triton-inference-server/vllm_backend).
Nothing of them is in this repository.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
BUILD = ROOT / "build" / "conformance"
# The last wheel of Triton's client whose perf_analyzer runs on the C library of Debian 12, and the
# CUDA runtime that it is linked against.
PERF_ANALYZER = {
    "tritonclient==2.51.0": "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52",
    "nvidia-cuda-runtime-cu12==12.6.77": "ba3b56a4f896141e25e19ab287cd71e52a6a0f4b29d0d31609f60e3b4d5219b7",
}
_TIMEOUT_S = 240


def run(*command: str | pathlib.Path, folder: pathlib.Path | None = None, **variables: str) -> str:
    """Runs a program that must succeed; returns what it printed."""
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{command[0]} ended with {ended.returncode}:\n{ended.stdout[-4000:]}"
    return ended.stdout


@functools.cache
def python() -> pathlib.Path:
    """Returns the interpreter of the environment that has the clients; makes it the first time."""
    requirements = HERE / "requirements.txt"
    version = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    environment = BUILD / f"venv-{version}"
    if not (environment / "ready").exists():
        run(sys.executable, "-m", "uv", "venv", "--quiet", "--clear", "--python", sys.executable, environment)
        interpreter = environment / "bin" / "python"
        run(
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            interpreter,
            "--require-hashes",
            "-r",
            requirements,
        )
        (environment / "ready").touch()
    return environment / "bin" / "python"


@functools.cache
def compressed_tensors() -> pathlib.Path:
    """Returns a folder that has the package compressed-tensors.

    It is for the interpreter that runs this, and filled the first time.
    """
    requirements = HERE / "compressed_tensors.txt"
    folder = BUILD / f"compressed-tensors-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    if not (folder / "ready").exists():
        run(
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            folder,
            "--require-hashes",
            "-r",
            requirements,
        )
        (folder / "ready").touch()
    return folder


def require_downloads() -> None:
    """Skips the test unless whoever runs it allows some hundred megabytes of downloads."""
    if os.environ.get("CONFORMANCE_DOWNLOADS") != "1":
        pytest.skip("CONFORMANCE_DOWNLOADS=1 allows the downloads that this needs")


def checkout(variable: str, path: str) -> pathlib.Path:
    """Returns a folder of a checkout that the environment names, or skips the test."""
    root = os.environ.get(variable)
    if not root:
        pytest.skip(f"{variable} names no checkout")
    folder = pathlib.Path(root) / path
    assert folder.is_dir(), f"{variable}: has no {path}"
    return folder


@functools.cache
def perf_analyzer() -> tuple[pathlib.Path, str]:
    """Returns perf_analyzer and the folders of the libraries that it needs, or skips the test."""
    folder = BUILD / "perf_analyzer"
    folder.mkdir(parents=True, exist_ok=True)
    for package, digest in PERF_ANALYZER.items():
        _unpack(package, digest, folder)
    (program,) = folder.glob("*/*/bin/perf_analyzer")
    program.chmod(0o755)
    libraries = [folder / "nvidia" / "cuda_runtime" / "lib", _libb64(folder)]
    return program, os.pathsep.join(map(str, libraries))


def _unpack(package: str, digest: str, folder: pathlib.Path) -> None:
    done = folder / f"{package}.done"
    if done.exists():
        return
    run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        folder,
        package,
    )
    (wheel,) = folder.glob(package.replace("-", "_").replace("==", "-") + "-*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == digest, (
        f"{package}: another file than the one that was tried"
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    done.touch()


def _libb64(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of libb64, which perf_analyzer is linked against.

    It is Debian's package, unpacked.
    """
    if not (found := list(folder.glob("usr/lib/*/libb64.so.0d"))):
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            pytest.skip("perf_analyzer needs libb64, which comes from Debian here")
        run("apt-get", "download", "-o", "APT::Sandbox::User=root", "libb64-0d", folder=folder)
        (package,) = folder.glob("libb64-0d_*.deb")
        run("dpkg", "-x", package, folder)
        found = list(folder.glob("usr/lib/*/libb64.so.0d"))
    return found[0].parent
