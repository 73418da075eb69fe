"""The part of requirements.lock that one container image installs, as it is locked.

Owns which packages that is: what pyproject.toml and the client's name as their dependencies (and
those of the extras that were asked for), and what these bring, which the lock file's own "via"
comments tell. So an image holds neither the tests' tools nor, without the extra `worker`, torch.
Runs with nothing but the standard library, inside the Dockerfile's build stage.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import tomllib
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PROJECTS = (ROOT / "pyproject.toml", ROOT / "clients" / "python" / "pyproject.toml")
# Built from this folder, never fetched.
OURS = frozenset({"headrace", "headrace-server"})
# What another build of torch (--torch-backend of uv) brings by itself or does without. Triton is
# not among it: PyTorch's CPU builds come without, and our kernels import it on a CPU too.
TORCH_PACKAGES = re.compile(r"(torch|nvidia-.*|cuda-.*)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Locked:
    """One package of the lock file.

    Attributes:
        lines: its requirement with marker and hashes, as pip reads them.
        parents: packages that need it.
    """

    def __init__(self, first_line: str) -> None:
        self.lines = [first_line]
        self.parents: set[str] = set()


def read_lock(text: str) -> dict[str, Locked]:
    """Packages of a lock file by name, in its order.

    Args:
        text: what `uv pip compile --generate-hashes` wrote, with its "via" comments.
    """
    packages: dict[str, Locked] = {}
    current: Locked | None = None
    for line in text.splitlines():
        if line[:1].isalnum():
            current = packages[normalized(line)] = Locked(line)
        elif current is not None and line.strip().startswith("--hash"):
            current.lines.append(line)
        elif current is not None and line.strip().startswith("#"):
            parent = line.strip().lstrip("# ").removeprefix("via").strip()
            if _NAME.fullmatch(parent):
                current.parents.add(normalized(parent))
    return packages


def normalized(requirement: str) -> str:
    """The name in a requirement, written as indexes compare names."""
    match = _NAME.match(requirement)
    if match is None:
        raise ValueError(f"no requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def wanted(projects: Iterable[pathlib.Path], extras: Iterable[str]) -> set[str]:
    """Names that the projects depend on, with those of these extras where a project has them."""
    names: set[str] = set()
    for path in projects:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        optional = project.get("optional-dependencies", {})
        listed = [*project["dependencies"], *(entry for extra in extras for entry in optional.get(extra, ()))]
        names |= {normalized(entry) for entry in listed}
    return names - OURS


def with_what_they_need(names: set[str], packages: dict[str, Locked]) -> set[str]:
    """The names and, along the lock's edges, everything that they bring."""
    found: set[str] = set()
    todo = set(names)
    while todo:
        found |= todo
        todo = {name for name, package in packages.items() if package.parents & todo} - found
    return found


def main() -> None:
    """Prints the requirements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="an extra of headrace-server")
    parser.add_argument("--without-torch", action="store_true", help="leave out torch and its GPU libraries")
    parser.add_argument("--tool", help="this package and what it needs, instead of what headrace-server needs")
    options = parser.parse_args()
    packages = read_lock(LOCK.read_text(encoding="utf-8"))
    roots = {normalized(options.tool)} if options.tool else wanted(PROJECTS, options.extra)
    names = with_what_they_need(roots, packages)
    if missing := names - packages.keys():
        raise SystemExit(f"image_requirements: requirements.lock lacks {', '.join(sorted(missing))}; run make lock")
    for name in sorted(names):
        if not (options.without_torch and TORCH_PACKAGES.match(name)):
            print("\n".join(packages[name].lines).rstrip(" \\"))


if __name__ == "__main__":
    main()
