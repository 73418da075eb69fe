"""Compose files of the repository, read as Compose reads them as far as tests need it.

Anchors, Compose's two tags and defaults of variables are understood.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = ROOT / "docker-compose.yml"
DEPLOY = ROOT / "deploy"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::[-?](?P<default>[^}]*))?\}")


class _Loader(yaml.SafeLoader):
    """Knows !reset and !override, which say how a file merges with the one before it."""


def _reset(loader: _Loader, node: yaml.Node) -> None:
    return None


def _override(loader: _Loader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.MappingNode)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("!reset", _reset)
_Loader.add_constructor("!override", _override)


def read(path: pathlib.Path) -> dict[str, Any]:
    """A compose file's content."""
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    assert isinstance(content, dict)
    return content


def services(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The services of a compose file by name."""
    found = read(path)["services"]
    assert isinstance(found, dict)
    return found


def with_defaults(text: str) -> str:
    """The text with every variable's default in its place, as where the shell sets none.

    A variable that must be set becomes /required.
    """
    return _VARIABLE.sub(lambda found: "/required" if ":?" in found[0] else found["default"] or "", text)
