"""Generates the Go stubs of headrace.v1 into the Go client's module, where this machine has Go.

Owns the versions of protoc's Go plugins and how they are had: `go install` into build/go-plugins,
in a folder named after the versions, once. Does not own protoc itself, which generate.py runs for
every language. Go alone is not enough: without a module proxy in reach the plugins can't be
installed the first time, and the reason says so.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Where the committed stubs are, and the import path of that folder's module, which every
# `go_package` begins with.
MODULE = ROOT / "clients" / "go"
MODULE_PATH = "github.com/headrace/headrace/clients/go"
SUFFIXES = (".pb.go",)
OLDEST = (1, 23)
# The last versions whose code Go 1.23 compiles. The runtime that clients/go/go.mod asks for is at
# least as new.
PLUGINS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.10",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1",
}
_BIN = ROOT / "build" / "go-plugins" / "-".join(name.partition("@")[2] for name in PLUGINS.values())


def missing() -> str | None:
    """What keeps this machine from generating Go stubs; None where nothing does.

    Installs the plugins the first time.
    """
    if not (go := shutil.which("go")):
        return "there is no `go` on PATH"
    version = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"{version.strip()} is older than {'.'.join(map(str, OLDEST))}"
    for name, package in PLUGINS.items():
        if not (_BIN / name).exists() and (error := _install(go, package)):
            return f"`go install {package}` fails: {error}"
    return None


def generate(protoc: Callable[[list[str]], None], sources: list[str], services: list[str], out: pathlib.Path) -> None:
    """Writes the stubs below `out`, which stands for the root of the client's module.

    Args:
        protoc: Runs protoc with these arguments; the include paths of protos/ and of Google's are
            its own.
        sources: All files of the public API.
        services: Files of `sources` that define services.
        out: Exists already.
    """
    plugins = [f"--plugin={_BIN / name}" for name in PLUGINS]
    protoc([*plugins, f"--go_out={out}", f"--go_opt=module={MODULE_PATH}", *sources])
    protoc([*plugins, f"--go-grpc_out={out}", f"--go-grpc_opt=module={MODULE_PATH}", *services])


def _install(go: str, package: str) -> str | None:
    """Installs a plugin; the last line of what go says where it can't."""
    _BIN.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"GOBIN": str(_BIN), "GOFLAGS": "-mod=mod"}
    done = subprocess.run([go, "install", package], env=environment, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else ([*done.stderr.strip().splitlines(), "no reason given"])[-1]
