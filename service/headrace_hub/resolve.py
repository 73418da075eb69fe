"""A model argument becomes a path on this machine: a folder or file that is here, or a name's.

What is here goes before any name. What looks like a folder is never looked for on a network: it
begins with a dot or a slash, ends with one, has not two parts, or would lie in a folder that is
here.

Owns that decision, and the question to the process that fetches. Standard library only.
"""

from __future__ import annotations

import enum
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

from headrace_hub.errors import HubRefused
from headrace_hub.names import HubName, looks_like_folder, parse
from headrace_hub.variables import check_variables

_LAST_WORDS_S = 10.0


class Need(enum.StrEnum):
    """What whoever asks for a model needs of it."""

    # All of it, from the hub if the cache lacks it.
    FETCHED = "fetched"
    # All of it, and nothing is fetched.
    CACHED = "cached"
    # config.json in a folder, and the weights' index if there is one, from the hub if the cache
    # lacks them.
    CONFIG = "config"


class ResolvedModel(NamedTuple):
    """A model argument, resolved.

    Attributes:
        path: folder or GGUF file on this machine; what was typed where that names nothing here.
        name: ORG/NAME's own name; empty for what is no name of a hub.
        commit: the commit of a name; empty likewise.
    """

    path: pathlib.Path
    name: str = ""
    commit: str = ""


def resolve(model: pathlib.Path | str, need: Need = Need.FETCHED) -> ResolvedModel:
    """Returns the place of a model on this machine.

    Args:
        model: what was typed: a folder, a GGUF file, or ORG/NAME[@REVISION][:FILE].
        need: whether it may be fetched, and how much of it.

    Raises:
        HubRefused: it is a name, and what it names can't be had. One sentence.
    """
    path = pathlib.Path(marked_as_folder(model))
    name = parse(str(path))
    if name is None or os.path.lexists(path):
        return ResolvedModel(path)
    if looks_like_folder(path):
        # A folder of the first part's name may be a coincidence; what was fetched before is meant.
        need = Need.CACHED
    answer = _asked(name, need)
    if "path" in answer:
        return ResolvedModel(pathlib.Path(answer["path"]), name.name, answer["commit"])
    raise HubRefused(f"there is no folder {model} here; {answer['refused'] or _not_fetched(name)}")


def marked_as_folder(text: Any) -> Any:
    """A setting's text, in which the marks of a folder ("./a/b", "a/b/") outlive `pathlib.Path`.

    What is no text, and what could be no name, stays as it is.
    """
    if not isinstance(text, str) or not (text.startswith("./") or text.endswith("/")):
        return text
    return os.path.abspath(text) if parse(os.path.normpath(text)) else text


def no_folder(model: pathlib.Path) -> str:
    """The other possibility, for a message about a folder that is not here; may be empty."""
    is_bare = len(model.parts) == 1 and not model.is_absolute() and not os.path.lexists(model)
    return "; a model of a hub is named ORG/NAME" if is_bare else ""


def _not_fetched(name: HubName) -> str:
    return f"if a model of the hub is meant: headrace pull {name}"


def _asked(name: HubName, need: Need) -> dict[str, Any]:
    """The answer of the process that knows the hub.

    It draws on our stderr. Its stdin stays open for as long as we live, and ends with us.
    """
    check_variables()
    command = [sys.executable, "-m", "headrace_hub", str(name), need]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            said = process.stdout.read()
        except KeyboardInterrupt:
            # It gives the terminal back, then ends.
            process.stdin.close()
            process.wait(_LAST_WORDS_S)
            raise
    if process.returncode:
        raise HubRefused(f"{name}: the process that fetches it ended with exit code {process.returncode}")
    answer: dict[str, Any] = json.loads(said)
    return answer
