"""What a hub says of a repository: its commit, its files, their hashes; and where their bytes are.

Owns the questions to huggingface_hub, and the one sentence that each of its errors becomes. Token,
endpoint, timeouts and offline mode are those of its variables and files (HF_TOKEN, HF_TOKEN_PATH,
HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE), which it reads.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx2
import huggingface_hub
import huggingface_hub.errors as hub_errors
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_token, tqdm

from headrace_hub.errors import BadName, HubRefused
from headrace_hub.names import HubName, is_commit

# Asked of nobody, a hub is sent nothing but what the download needs: no list of installed packages,
# no question after the program that this one runs in.
constants.HF_HUB_DISABLE_TELEMETRY = True
# Retries are reported as progress, errors as one sentence.
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
# A blob's name in the cache: SHA-1 or SHA-256.
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LIBRARY: dict[str, Any] = {
    "library_name": "headrace",
    "library_version": importlib.metadata.version("headrace-server"),
}


class _NoBars(tqdm):
    """A bar of the library that is never drawn, whatever its variables say; ours are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]


class HubFile(NamedTuple):
    """One file of a repository at a commit.

    Attributes:
        path: its name in the repository.
        num_bytes: its size.
        digest: hexadecimal SHA-256 of a large file's bytes, git's SHA-1 of a small one's blob; the
            name of its blob in the cache.
    """

    path: str
    num_bytes: int
    digest: str

    @property
    def has_sha256(self) -> bool:
        """Whether the hash is of the bytes alone."""
        return len(self.digest) == 64


def commit_of(name: HubName) -> str:
    """Returns the commit that a name's revision is now. Raises HubRefused."""
    with explained(name), _parsed(name):
        api = huggingface_hub.HfApi(**_LIBRARY)
        found = api.model_info(name.repo, revision=name.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        if not is_commit(str(found.sha)):
            raise ValueError("no commit")
        return str(found.sha)


def files_at(name: HubName, commit: str) -> dict[str, HubFile]:
    """Returns the repository's files at a commit, by their names. Raises HubRefused."""
    with explained(name), _parsed(name):
        tree = huggingface_hub.HfApi(**_LIBRARY).list_repo_tree(name.repo, recursive=True, revision=commit)
        files = [_hub_file(file) for file in tree if isinstance(file, huggingface_hub.hf_api.RepoFile)]
        return {file.path: file for file in files if _is_plain(file.path)}


def files_known(name: HubName, commit: str) -> dict[str, HubFile] | None:
    """Returns what an earlier `files_at` kept in the cache, or None. Asks nobody."""
    try:
        tree = huggingface_hub.get_cached_repo_tree(name.repo, revision=commit)
    except hub_errors.CachedRepoTreeNotFoundError:
        return None
    return {file.path: _hub_file(file) for file in tree}


def file_url(name: HubName, commit: str, path: str) -> str:
    """Returns the address of a file's bytes."""
    return huggingface_hub.hf_hub_url(name.repo, path, revision=commit)


def download_headers() -> dict[str, str]:
    """Headers of a request for a file's bytes, uncompressed; the token is among them."""
    return {**build_hf_headers(**_LIBRARY), "accept-encoding": "identity"}


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub."""
    return huggingface_hub.is_offline_mode()


def read_timeout_s() -> float:
    """Seconds without a byte after which a connection counts as broken."""
    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def cache_folder() -> str:
    """Folder of the cache that all programs on this machine share."""
    return str(constants.HF_HUB_CACHE)


def endpoint() -> str:
    """Address of the hub."""
    return str(constants.ENDPOINT)


def _hub_file(file: huggingface_hub.hf_api.RepoFile) -> HubFile:
    """A file as the hub lists it. Raises ValueError: its hash or size is none."""
    large = file.lfs
    found = (
        HubFile(file.path, file.size, file.blob_id) if large is None else HubFile(file.path, large.size, large.sha256)
    )
    if _HASH.fullmatch(found.digest) is None or found.num_bytes < 0:
        raise ValueError(f"{found.path} has no hash")
    return found


def _is_plain(path: str) -> bool:
    """Whether a file's name stays in its folder and on its line."""
    return path.isprintable() and not any(part in ("", ".", "..") for part in path.split("/"))


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Makes one sentence of whatever goes wrong between us, the hub and the disk.

    Raises:
        HubRefused: in place of any error of the library, the connection or the file system.
    """
    try:
        yield
    except HubRefused:
        raise
    except hub_errors.OfflineModeIsEnabled:
        raise HubRefused(
            f"{name} is not whole in the cache ({cache_folder()}), and HF_HUB_OFFLINE forbids to fetch it"
        ) from None
    except hub_errors.HfHubHTTPError as error:
        raise HubRefused(_answered(name, error)) from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise HubRefused(f"{name}: the hub at {endpoint()} can't be reached: {_reason(error)}") from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise HubRefused(f"{name} can't be kept: {place}{error.strerror or _reason(error)}") from None


@contextmanager
def _parsed(name: HubName) -> Iterator[None]:
    """Makes one sentence of an answer that is no JSON, or JSON of something else.

    Raises:
        HubRefused: in place of what parsing it ran into.
    """
    try:
        yield
    except hub_errors.HFValidationError as error:
        raise BadName(f"{name.repo} is no model's name: {_reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubRefused(f"{name}: what answers at {endpoint()} is no model hub ({_reason(error)})") from None


def fetch_small(name: HubName, commit: str, path: str) -> None:
    """Fetches one small file into the cache, by the library alone. Raises HubRefused."""
    with explained(name):
        try:
            huggingface_hub.hf_hub_download(name.repo, path, revision=commit, tqdm_class=_NoBars, **_LIBRARY)
        except hub_errors.RemoteEntryNotFoundError:
            raise HubRefused(f"{name.repo} has no {path}") from None


def fetch_if_there(name: HubName, commit: str, path: str) -> None:
    """Does `fetch_small` where the repository has the file. Raises HubRefused."""
    with explained(name), suppress(hub_errors.RemoteEntryNotFoundError):
        huggingface_hub.hf_hub_download(name.repo, path, revision=commit, tqdm_class=_NoBars, **_LIBRARY)


def link_snapshot(name: HubName, commit: str, paths: Sequence[str]) -> None:
    """Makes a snapshot's links to blobs, and keeps the list of its files. Raises HubRefused."""
    patterns = [re.sub(r"([*?[])", r"[\1]", path) for path in paths]
    with explained(name._replace(revision=commit)):
        huggingface_hub.snapshot_download(
            name.repo, revision=commit, allow_patterns=patterns, tqdm_class=_NoBars, **_LIBRARY
        )


def _answered(name: HubName, error: hub_errors.HfHubHTTPError) -> str:
    """The sentence for an answer of the hub that is no success."""
    repo, status = name.repo, error.response.status_code
    if isinstance(error, hub_errors.GatedRepoError):
        lacks = "the token has no access to it" if get_token() else "no token was given"
        return f"{repo} is gated and {lacks}: ask for access at {endpoint()}/{repo}, and set HF_TOKEN"
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        lacks = "the token does not open it" if get_token() else "needs a token (HF_TOKEN)"
        return f"the hub at {endpoint()} has no model {repo}, or it is private and {lacks}"
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return f"{repo} has no revision {name.branch}"
    if isinstance(error, hub_errors.DisabledRepoError):
        return f"{repo} is disabled by the hub at {endpoint()}"
    if status == 401:
        return f"the hub at {endpoint()} refuses the token (HF_TOKEN, or the file {constants.HF_TOKEN_PATH})"
    if status == 429:
        return f"{repo}: the hub at {endpoint()} has had too many requests from here (429); try again later"
    reason = f": {_one_line(error.server_message)}" if error.server_message else ""
    return f"{repo}: the hub at {endpoint()} answered {status}{reason}"


def _reason(error: BaseException) -> str:
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."
