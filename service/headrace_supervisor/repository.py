"""The model repository: a folder whose subfolders and GGUF files are models, by name.

A subfolder is a model if it has a config.json.

Owns which names there can be and where they lead: a name never leaves the repository, neither by
its letters nor by a symbolic link. What is in a model's folder is the model folder's reader's
business; which models run, `backend_table`'s.
"""

from __future__ import annotations

import pathlib
import re

from headrace_supervisor import refusals

_CONFIG_FILE = "config.json"
_MAX_NAME_CHARACTERS = 128
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
NAME_RULE = f"1 to {_MAX_NAME_CHARACTERS} of A-Z a-z 0-9 . _ + -, none of . + - first"


class ModelRepository:
    """The models below one folder.

    Looks at the disk at every question, so that folders come and go while the server runs.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def names(self) -> tuple[str, ...]:
        """Names of the models there are now, in order; none if the folder can't be read."""
        try:
            return tuple(sorted(path.name for path in self.folder.iterdir() if self._model_at(path.name)))
        except OSError:
            return ()

    def __contains__(self, name: str) -> bool:
        """Whether there is a model of that name now."""
        return self._model_at(name) is not None

    def find(self, name: str) -> pathlib.Path:
        """Returns the folder of a model.

        Raises:
            Refused: INVALID_ARGUMENT: no name at all; NOT_FOUND: there is no such model.
        """
        check_name(name)
        found = self._model_at(name)
        if found is None:
            raise refusals.not_found(f"model {name!r} is not in the model repository; ListRepository names its models")
        return found

    def _model_at(self, name: str) -> pathlib.Path | None:
        """The folder of that name if it is a model of ours.

        With a config.json or a GGUF file, and really below the repository.
        """
        if not is_name(name):
            return None
        folder = self.folder / name
        if not is_inside(folder, self.folder):
            return None
        if not (folder / _CONFIG_FILE).is_file() and not any(folder.glob("*.gguf")):
            return None
        return folder


def check_name(name: str) -> None:
    """Refuses what can't be the name of a model folder. Raises Refused: INVALID_ARGUMENT."""
    if not is_name(name):
        raise refusals.invalid(
            f"model: {shown(name)} is no name of a model: {NAME_RULE}; separators and path traversal are refused"
        )


def is_inside(path: pathlib.Path, folder: pathlib.Path) -> bool:
    """Returns whether a path, its symbolic links followed, lies below a folder."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def is_name(name: str) -> bool:
    """Returns whether a model may have this name."""
    return len(name) <= _MAX_NAME_CHARACTERS and _NAME.fullmatch(name) is not None


def shown(name: str) -> str:
    """A name that is none, for a message."""
    return repr(name[:64] + ("..." if len(name) > 64 else ""))
