"""Kernels' sources as they are found while a worker imports: to the letter what Python finds."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest
from triton.runtime.jit import JITCallable

import headrace_kernels
from headrace_kernels import quick_sources

PYTHONS = inspect.getsourcelines


def modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(headrace_kernels.__path__, "headrace_kernels."):
        yield importlib.import_module(module.name)


def functions() -> list[FunctionType]:
    """All functions of the kernels' modules that have a source there, kernels among them."""
    found = []
    for module in modules():
        for value in vars(module).values():
            function = value.fn if isinstance(value, JITCallable) else value
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                found.append(function)
    return found


def test_every_kernel_s_lines_are_those_that_python_finds() -> None:
    every = functions()
    quick = [quick_sources._function(PYTHONS(each)[0]) for each in every]
    assert len(every) > 300 and None not in quick
    for each in every:
        assert quick_sources.source_lines(each) == PYTHONS(each), each.__qualname__


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("def f():\n    pass\n\n\ndef g():\n    pass\n", 2),
        ("@a\n@b(\n    1\n)\ndef f(\n    x,\n) -> None:\n    pass\n\n    # its own\n# not its own\nX = 1\n", 10),
        ("def f():\n    return (\n        1\n    )\n\nX = 1\n", 4),
        ("def f():\n    pass\n", 2),
    ],
)
def test_a_function_ends_where_its_indentation_does(text: str, kept: int) -> None:
    lines = text.splitlines(keepends=True)
    assert quick_sources._function(lines) == lines[:kept] == inspect.getblock(lines)


@pytest.mark.parametrize(
    "text", ['def f():\n    """A text\nwithout indentation."""\n', "    def f(self):\n        pass\n", ""]
)
def test_what_indentation_does_not_say_is_left_to_python(text: str) -> None:
    assert quick_sources._function(text.splitlines(keepends=True)) is None


def test_functions_of_others_are_left_to_python_and_so_is_everything_afterwards() -> None:
    with quick_sources.quick_sources():
        assert inspect.getsourcelines is quick_sources.source_lines
        assert inspect.getsourcelines(pathlib.Path.exists) == PYTHONS(pathlib.Path.exists)
        assert inspect.getsourcelines(pathlib.Path) == PYTHONS(pathlib.Path)
    assert inspect.getsourcelines is PYTHONS
