"""Import directions, and the promise that only workers load torch."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INDENTED_IMPORT = re.compile(r"^[ \t].*\b(?:import|from)\s+headrace", re.MULTILINE)
HEAVY = ("torch", "triton", "transformers", "safetensors")


def python(code: str) -> subprocess.CompletedProcess[str]:
    paths = [
        str(ROOT / folder)
        for folder in ("service", "backend", "both_sides", "kernels", "protos/python", "clients/python")
    ]
    prelude = f"import sys; sys.path[:0] = {paths!r}\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=600, check=False
    )


def every_module(package: str) -> str:
    """Code that imports a package and all that is in it, entry points (`__main__`) left out."""
    return (
        f"import importlib, pkgutil, {package} as package\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    if not found.name.endswith('__main__'): importlib.import_module(found.name)\n"
    )


def test_import_contracts_hold() -> None:
    linter = pathlib.Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout


TORCH_FREE = (
    "headrace_service",
    "headrace_supervisor",
    "headrace_backend.server",
    "headrace_backend.engine",
    "headrace_model_folder",
    "headrace_credentials",
    "headrace_health",
    "headrace_request",
    "headrace_protos",
    "headrace",
)


def test_only_workers_load_torch() -> None:
    """One process imports package after package, and a worker's last.

    There the same code finds torch, so the check can fail.
    """
    loaded = f"print(package.__name__, *(sorted(set(sys.modules) & set({HEAVY!r}))))\n"
    result = python("".join(every_module(package) + loaded for package in (*TORCH_FREE, "headrace_backend.layers")))
    assert result.returncode == 0, result.stderr
    *lines, worker = result.stdout.splitlines()
    assert lines == list(TORCH_FREE)
    assert "torch" in worker.split()


def test_no_import_of_ours_hides_in_a_function_or_behind_type_checking() -> None:
    import ast

    ours = tuple(
        f"headrace_{room}"
        for room in ("service", "supervisor", "backend", "kernels", "model_folder", "credentials", "protos", "quantize")
    )
    hidden = []
    for folder in ("service", "backend", "both_sides", "kernels", "clients/python"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            # Reading every file as a tree would take seconds; a line that is none, in a docstring
            # say, is told apart there.
            if not INDENTED_IMPORT.search(text):
                continue
            tree = ast.parse(text)
            top = {id(node) for node in tree.body}
            for node in ast.walk(tree):
                names = (
                    [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else []
                )
                if (
                    id(node) not in top
                    and path.name != "__main__.py"
                    and any(name.split(".")[0] in (*ours, "headrace") for name in names)
                ):
                    hidden.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert hidden == []
