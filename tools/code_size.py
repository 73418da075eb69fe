"""Sizes of our functions and files, for `make stats`.

Prints, and fails nothing: sizes are advice.
"""

from __future__ import annotations

import ast
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("service", "backend", "both_sides", "kernels", "clients/python", "benchmarks", "tools", "models", "tests")
LONGEST_SHOWN = 8


def sources(room: str) -> list[pathlib.Path]:
    """The tracked Python files of a room, generated ones left out."""
    listed = subprocess.run(["git", "ls-files", f"{room}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if "_pb2" not in name and (ROOT / name).exists()]


def functions(path: pathlib.Path) -> list[tuple[int, str]]:
    """Lines and place of each function of a file."""
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    place = path.relative_to(ROOT)
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{place}:{node.lineno} {node.name}") for node in nodes
    ]


def row(room: str) -> list[tuple[int, str]]:
    """Prints one room's line and returns its functions."""
    paths = sources(room)
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    found = [function for path in paths for function in functions(path)]
    if found:
        sizes = sorted(size for size, _ in found)
        p90 = sizes[int(0.9 * (len(sizes) - 1))]
        print(
            f"{room:16}{len(paths):6}{sum(lengths):8}{max(lengths):9}{statistics.median(sizes):9.0f}{p90:6}{sizes[-1]:6}"
        )
    return found


def main() -> None:
    """Prints a line per room, then the longest functions."""
    print(f"{'room':16}{'files':>6}{'lines':>8}{'longest':>9}{'fn p50':>9}{'p90':>6}{'max':>6}")
    found = [function for room in ROOMS for function in row(room)]
    print("\nlongest functions")
    for size, place in sorted(found, reverse=True)[:LONGEST_SHOWN]:
        print(f"{size:6}  {place}")


if __name__ == "__main__":
    main()
