"""Makes .venv: an environment with everything of requirements.lock and our two distributions.

Our distributions are installed editable.

Owns the choice of installer and the messages on the way. It is run by whatever python3 the machine
has, so it needs nothing but the standard library. In order of preference: uv from PATH, uv
installed into the environment from its own hashes in the lock file, pip. UV_TORCH_BACKEND=cpu (or
another of uv's names) takes torch from PyTorch's own index, where it is smaller and has no hash in
the lock; where that index can't be reached, the locked build is installed instead.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
OLDEST = (3, 11)
# Torch and what it brings for GPUs: these come from elsewhere when UV_TORCH_BACKEND is set. Triton
# does not: builds of torch for CPUs come without it, and our kernels import it on a CPU too.
TORCH_PACKAGES = re.compile(r"(torch|nvidia-.*|cuda-.*)==")
_HEARTBEAT_S = 20.0
# Wheels of the lock file for CPython 3.11 on x86-64 Linux, and .venv with them, 2026-11-22; without
# torch's own packages where these come from its index.
_SIZE_LOCKED = "2.7 GiB to download with torch for GPUs, 5.2 GiB on disk"
_SIZE_BESIDE_TORCH = "0.2 GiB to download, 0.8 GiB on disk, beside torch"


class SetupError(Exception):
    """Set-up can't go on; the message says what to do."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def lock_entries() -> list[str]:
    """The requirements of the lock file, each with its hashes."""
    entries: list[str] = []
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if line[:1].isalnum():
            entries.append(line)
        elif line.strip().startswith("--hash") and entries:
            entries[-1] += "\n" + line
    return [entry.rstrip(" \\") for entry in entries]


def run(command: list[str], what: str, environment: dict[str, str] | None = None) -> bool:
    """Runs a command to its end. Returns whether it succeeded.

    On a terminal uv and pip have bars; elsewhere there is a sign of life now and then.
    """
    started, has_bars = time.monotonic(), sys.stderr.isatty()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                process.wait(timeout=_HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                if not has_bars:
                    say(f"{what}: {time.monotonic() - started:.0f} s so far")
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode == 0


def find_python() -> str:
    """A Python that is new enough: the one that runs this, or another on PATH."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in (13, 12, 11):
        if found := shutil.which(f"python3.{minor}"):
            return found
    raise SetupError(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed; this is {sys.version.split()[0]}")


def make_venv() -> None:
    """Makes .venv unless a working one is there."""
    probe = f"import sys; sys.exit(sys.version_info < {OLDEST})"
    if PYTHON.exists() and subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0:
        return
    python, uv = find_python(), shutil.which("uv")
    say(f"making .venv with {python}")
    if VENV.exists():
        shutil.rmtree(VENV)
    command = [uv, "venv", "--quiet", "--python", python, str(VENV)] if uv else [python, "-m", "venv", str(VENV)]
    if not run(command, "making .venv"):
        raise SetupError("could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv")


def find_uv() -> str | None:
    """The uv of PATH or of .venv; installed there from the lock file when it is missing.

    None: pip must do.
    """
    if found := shutil.which("uv") or shutil.which("uv", path=str(VENV / "bin")):
        return found
    entry = [entry for entry in lock_entries() if entry.startswith("uv==")]
    say("installing uv, which installs the rest faster")
    if not install_with_pip(entry, "uv"):
        say("uv can't be installed here; going on with pip")
    return shutil.which("uv", path=str(VENV / "bin"))


def quietly() -> list[str]:
    """Options that leave out uv's and pip's line for each package where nobody sees bars either."""
    return [] if sys.stderr.isatty() else ["--quiet"]


def install_with_pip(entries: list[str], what: str) -> bool:
    """Installs lock entries, hashes checked, with the environment's pip."""
    options = ["install", *quietly(), "--require-hashes", "--no-deps", "-r"]
    with tempfile.TemporaryDirectory() as folder:
        return run([str(PYTHON), "-m", "pip", *options, write_requirements(folder, entries)], what)


def install_with_uv(uv: str, entries: list[str], what: str) -> bool:
    """Installs lock entries, hashes checked, with uv."""
    environment = {name: value for name, value in os.environ.items() if name != "UV_TORCH_BACKEND"}
    options = ["pip", "install", *quietly(), "--python", str(PYTHON), "--require-hashes", "--no-deps", "-r"]
    with tempfile.TemporaryDirectory() as folder:
        return run([uv, *options, write_requirements(folder, entries)], what, environment)


def write_requirements(folder: str, entries: list[str]) -> str:
    """A requirements file of these entries; its path."""
    path = pathlib.Path(folder) / "requirements.txt"
    path.write_text("\n".join(entries) + "\n", encoding="utf-8")
    return str(path)


def install_torch_build(uv: str, backend: str, entries: list[str]) -> bool:
    """Torch of the locked version from PyTorch's index for `backend`.

    False where that index can't be reached.
    """
    pin = next(entry for entry in entries if entry.startswith("torch==")).split()[0]
    say(f"installing {pin} for {backend} (UV_TORCH_BACKEND), without a hash")
    environment = {**os.environ, "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "1"}
    # With what it needs, since another CUDA version has other libraries than the lock; what the
    # lock names besides is brought to its version afterwards.
    options = ["pip", "install", *quietly(), "--python", str(PYTHON), "--torch-backend", backend, pin]
    if run([uv, *options], "torch", environment):
        return True
    say("that index can't be reached; installing the locked build of torch instead")
    return False


def install_locked() -> None:
    """Everything of the lock file."""
    entries, uv = lock_entries(), find_uv()
    backend = os.environ.get("UV_TORCH_BACKEND", "")
    if uv and backend and install_torch_build(uv, backend, entries):
        entries = [entry for entry in entries if not TORCH_PACKAGES.match(entry)]
    elif backend and not uv:
        say("UV_TORCH_BACKEND needs uv, which is not to be had; installing the locked build of torch")
    size = _SIZE_LOCKED if any(e.startswith("torch==") for e in entries) else _SIZE_BESIDE_TORCH
    say(f"installing {len(entries)} packages of requirements.lock ({size}, less what is there already)")
    if uv and install_with_uv(uv, entries, "packages"):
        return
    if not PYTHON.with_name("pip").exists() and not run([str(PYTHON), "-m", "ensurepip"], "pip"):
        raise SetupError("neither uv nor pip can install requirements.lock; is a package index reachable?")
    if not install_with_pip(entries, "packages"):
        raise SetupError("could not install requirements.lock; is a package index reachable?")


def install_ours() -> None:
    """The client and the server distribution, editable, built with the locked hatchling."""
    say("installing headrace and headrace-server from this folder")
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    if not run([*command, "-e", "clients/python", "-e", "."], "our distributions"):
        raise SetupError("could not install our own distributions; see the lines above")


def main() -> None:
    """Makes or completes .venv."""
    started = time.monotonic()
    try:
        make_venv()
        install_locked()
        install_ours()
    except SetupError as error:
        sys.exit(f"setup: {error}")
    say(f"ready in {time.monotonic() - started:.0f} s: .venv/bin/headrace")


if __name__ == "__main__":
    main()
