"""Every process tells a version, also where the server is a source tree that nobody installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from headrace_facts.version import server_version


def test_the_installed_version_is_reported() -> None:
    assert server_version() == importlib.metadata.version("headrace-server")


def test_a_tree_that_is_not_installed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert server_version() == ""
