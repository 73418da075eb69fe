"""A model of a hub in the settings: its name becomes its folder before anything else looks at it.

Owns what the settings say of such a model. How it is found and fetched is `headrace_hub`'s.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from headrace_hub.errors import HubRefused
from headrace_hub.names import parse
from headrace_hub.resolve import ResolvedModel, resolve
from headrace_supervisor.processes.address import AddressError, claimed
from headrace_supervisor.settings import ConfigError


def fetched(setting: str, model: pathlib.Path) -> ResolvedModel:
    """Returns the model that a setting names, on this machine. Raises ConfigError."""
    try:
        return resolve(model)
    except HubRefused as error:
        raise ConfigError(f"{setting}: {error}") from None


def hub_names(typed: pathlib.Path, found: pathlib.Path) -> tuple[str, ...]:
    """Returns the names by which programs that know the hub ask for a model that was found there.

    These are ORG/NAME, and what was typed. There are none where a folder was typed.
    """
    name = parse(str(typed))
    return () if name is None or found == typed else tuple(dict.fromkeys((name.repo, str(name))))


def check_before_fetching(model: pathlib.Path, addresses: tuple[str, ...]) -> None:
    """Refuses a server whose addresses can't be had, before a model is fetched for it.

    A model that is here is looked at first, in milliseconds. Raises ConfigError.
    """
    if parse(str(model)) is None or model.exists():
        return
    try:
        with claimed(addresses):
            pass
    except AddressError as error:
        raise ConfigError(str(error)) from None


def with_model_fetched(engine_values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine's settings, `model` being a folder or file. Raises ConfigError.

    A model of a hub is called by its own name, unless --model-name says otherwise. A GGUF file is
    called by the file's, which says which of several it is.
    """
    found = fetched("model", engine_values["model"])
    name = "" if found.path.suffix == ".gguf" else found.name
    return {**engine_values, "model": found.path, "model_name": engine_values["model_name"] or name}
