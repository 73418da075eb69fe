"""What a model's name looks like, and how it is told from a folder.

    ORG/NAME[@REVISION][:FILE]      Qwen/Qwen3-0.6B   Qwen/Qwen3-0.6B@main   org/some-GGUF:Q4_K_M

Standard library only: every start of a server asks here, also where nothing is fetched.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import NamedTuple

from headrace_hub.errors import BadName

# huggingface_hub's own rule, without what it refuses besides: two dots or two dashes in a row.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REVISION = r"@(?P<{0}>[^\s:@]+)"
_FILE = r":(?P<{0}>[^\s:@]+)"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})"
    rf"(?:(?:{_REVISION.format('revision')})?(?:{_FILE.format('file')})?"
    rf"|{_FILE.format('file_first')}{_REVISION.format('revision_last')})"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
RULE = "a model's name is ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE"


class HubName(NamedTuple):
    """A model as it is asked for.

    Attributes:
        repo: ORG/NAME.
        revision: branch, tag or commit; None for the default branch.
        file: a GGUF file of the repository: its name, or a part of it such as Q4_K_M.
    """

    repo: str
    revision: str | None = None
    file: str | None = None

    @property
    def name(self) -> str:
        """The repository's own name, by which a server calls the model."""
        return self.repo.partition("/")[2]

    @property
    def branch(self) -> str:
        """The revision that is asked for, in words of the hub."""
        return self.revision or "main"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return is_commit(self.branch)

    def __str__(self) -> str:
        """The name as it can be typed again."""
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


def is_commit(revision: str) -> bool:
    """Returns whether a revision is a whole commit hash."""
    return _COMMIT.fullmatch(revision) is not None


def parse(text: str) -> HubName | None:
    """The model that a text names, or None where it is no name of that form."""
    found = _NAME.fullmatch(text)
    if found is None or "--" in found["repo"] or ".." in text:
        return None
    return HubName(found["repo"], found["revision"] or found["revision_last"], found["file"] or found["file_first"])


def parsed(text: str, revision: str | None = None, file: str | None = None) -> HubName:
    """The model that a command line names.

    Args:
        text: what stands in the place of the name.
        revision: what --revision says.
        file: what --file says.

    Raises:
        BadName: it is no name, or says the revision or the file twice.
    """
    name = parse(text)
    if name is None:
        here = "; there is a folder of that name here, which needs no fetching" if os.path.isdir(text) else ""
        raise BadName(f"{text!r} is no model's name: {RULE}{here}")
    if (revision and name.revision) or (file and name.file):
        raise BadName(f"{text} says its {'revision' if revision and name.revision else 'file'} twice")
    return name._replace(revision=name.revision or revision, file=name.file or file)


def looks_like_folder(path: pathlib.Path) -> bool:
    """Returns whether a path that is not there was meant to be one on this machine.

    Its form is no name's, or the folder that it would lie in is here.
    """
    name = parse(str(path))
    return name is None or path.parent.is_dir()
