"""Nothing of ours unpickles.

Who can write to a socket, a file or shared memory must not be able to run code.
"""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICKLERS = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
# Its queues and pipes pickle what they carry. Between a benchmark and its own children that is
# nobody else's word.
WITH_PIPES = PICKLERS | {"multiprocessing"}
MODULES = {
    **dict.fromkeys(("service", "backend", "both_sides", "kernels", "clients/python", "protos", "tools"), WITH_PIPES),
    "benchmarks": PICKLERS,
}
# Methods and functions by name, whoever's they are.
NAMES = {
    "send_pyobj",
    "recv_pyobj",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "all_gather_object",
    "gather_object",
    "read_pickle",
    "to_pickle",
}
FUNCTIONS = {"torch.load", "torch.save"}
_LAST_NAMES = NAMES | {name.rpartition(".")[2] for name in FUNCTIONS}


def pickled(source: str, modules: frozenset[str] = WITH_PIPES) -> list[str]:
    """What of a module's text pickles or unpickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_of(alias.name, modules)]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += [module] if _is_of(module, modules) else [name for name in names if _names_one(name)]
        elif isinstance(node, ast.Attribute):
            # Writing every attribute out would take most of the time.
            name = ast.unparse(node) if node.attr in _LAST_NAMES else ""
            found += [name] if _names_one(name) else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append("allow_pickle")
    return found


def _is_of(module: str, modules: frozenset[str]) -> bool:
    # torch.multiprocessing as well.
    return not modules.isdisjoint(module.split(".")[:2])


def _names_one(name: str) -> bool:
    return name in FUNCTIONS or name.rpartition(".")[2] in NAMES


def test_no_module_pickles() -> None:
    found = {}
    for folder, modules in MODULES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if names := pickled(path.read_text(encoding="utf-8"), modules):
                found[str(path.relative_to(ROOT))] = names
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import multiprocessing as mp",
        "from multiprocessing import shared_memory",
        "import torch.multiprocessing",
        "from torch import load",
        "x = torch.load(path, weights_only=True)",
        "def f():\n    import cloudpickle.fast",
        "dist.all_gather_object(out, value)",
        "from torch.distributed import broadcast_object_list",
        "socket.recv_pyobj()",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_rule_finds_what_it_is_for(source: str) -> None:
    assert pickled(source)


@pytest.mark.parametrize(
    "source", ["safetensors.torch.load(data)", "numpy.load(path, allow_pickle=False)", "import json"]
)
def test_the_rule_lets_be_what_does_not_pickle(source: str) -> None:
    assert not pickled(source)
