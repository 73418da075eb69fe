"""buf lint and buf breaking over protos/, for `make check`.

Owns which rules hold. The descriptor image comes from protos/generate.py, so buf compiles nothing
and fetches no dependency. Public API: all of buf's STANDARD rules. The private protocols keep all
but those about the names of request and response messages: their ends talk in streams. The KServe
v2 wire and ORCA keep none, because their names are given; like the public API they must not break.
Breaking changes are looked for against the newest tag.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRIVATE = ("headrace_engine", "headrace_control", "headrace_ranks")
_STREAM_RULES = ("RPC_REQUEST_STANDARD_NAME", "RPC_RESPONSE_STANDARD_NAME", "RPC_REQUEST_RESPONSE_UNIQUE")
CONFIG = {
    "version": "v2",
    "lint": {
        "use": ["STANDARD"],
        "ignore": ["google", "inference", "xds"],
        "ignore_only": {rule: list(PRIVATE) for rule in _STREAM_RULES},
    },
    "breaking": {"use": ["FILE"], "ignore": ["google", *PRIVATE]},
}


def buf(*arguments: str) -> None:
    """Runs the pinned buf through npx; ends the process where it finds fault."""
    npx = shutil.which("npx")
    if npx is None:
        sys.exit("buf comes through npx, which is missing; on Debian and Ubuntu: apt-get install npm")
    result = subprocess.run(
        [npx, "--yes", os.environ["BUF"], *arguments, "--config", json.dumps(CONFIG)], cwd=ROOT, check=False
    )
    if result.returncode != 0:
        sys.exit(f"buf {arguments[0]} found fault with protos/ (exit code {result.returncode})")


def image(protos: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Descriptor image of a protos folder, as its own generate.py makes it."""
    subprocess.run([sys.executable, protos / "generate.py", "--image", target], check=True)
    return target


def newest_tag() -> str | None:
    """The newest tag that this commit descends from."""
    result = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else None


def at_tag(tag: str, folder: pathlib.Path) -> pathlib.Path:
    """protos/ as it was at a tag, unpacked into `folder`."""
    archive = subprocess.run(["git", "archive", tag, "protos"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder / "protos"


def main() -> None:
    """Lints, then compares with the newest tag, if there is one."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        now = image(ROOT / "protos", folder / "now.binpb")
        buf("lint", str(now))
        if tag := newest_tag():
            buf("breaking", str(now), "--against", str(image(at_tag(tag, folder), folder / "then.binpb")))


if __name__ == "__main__":
    main()
