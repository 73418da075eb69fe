"""One repository's place in the shared cache: blobs by hash, snapshots by commit, refs by revision.

    models--ORG--NAME/   blobs/HASH   snapshots/COMMIT/FILE -> ../../blobs/HASH   refs/main

Owns paths and the name of a commit. The layout is huggingface_hub's, as it documents it.
"""

from __future__ import annotations

import pathlib
import uuid

from headrace_hub.names import HubName, is_commit

_PARTIAL = ".incomplete"


class RepositoryCache:
    """The folders of one repository below the cache's."""

    def __init__(self, root: str, name: HubName) -> None:
        folder = "--".join(("models", *name.repo.split("/")))
        self.folder = pathlib.Path(root).expanduser().absolute() / folder
        self._locks = self.folder.parent / ".locks" / folder

    def blob(self, digest: str) -> pathlib.Path:
        """Path of a file's bytes once they are whole."""
        return self.folder / "blobs" / digest

    def partial(self, digest: str) -> pathlib.Path:
        """Path of a file's bytes until then; kept when a download is cut off."""
        return self.folder / "blobs" / (digest + _PARTIAL)

    def lock(self, digest: str) -> pathlib.Path:
        """The lock file that programs take while they write a blob."""
        return self._locks / f"{digest}.lock"

    def snapshot(self, commit: str) -> pathlib.Path:
        """Folder of the files of a commit."""
        return self.folder / "snapshots" / commit

    def commit(self, revision: str) -> str | None:
        """The commit that a revision was when it was last fetched; None if it never was."""
        if is_commit(revision):
            return revision
        try:
            commit = self._ref(revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return commit if is_commit(commit) else None

    def point(self, revision: str, commit: str) -> None:
        """Notes which commit a revision is, at once or not at all."""
        if self.commit(revision) == commit:
            return
        ref = self._ref(revision)
        ref.parent.mkdir(parents=True, exist_ok=True)
        written = ref.with_name(f"{ref.name}.{uuid.uuid4().hex}.tmp")
        written.write_text(commit, encoding="ascii")
        written.replace(ref)

    def present(self, commit: str) -> list[str]:
        """Names of the files of a snapshot that are whole."""
        snapshot = self.snapshot(commit)
        return [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]

    def _ref(self, revision: str) -> pathlib.Path:
        return self.folder / "refs" / revision
