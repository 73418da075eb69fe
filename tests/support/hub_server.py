"""A model hub on the loopback interface, for the real huggingface_hub client.

Speaks what the client asks when it lists and fetches models: /api/models (commit, tree by pages),
/resolve with the hub's headers, redirects of large files to another host without the token, ranges,
and errors with X-Error-Code.

Owns repositories in memory, faults that a test asks for, and a record of all requests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?$")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
_LARGE = (".safetensors", ".gguf", ".bin", "tokenizer.json")
_PAGE = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    range: str
    authorization: str
    agent: str


class Repository:
    """Commits of one model, each the files of it; the newest is main."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.main = ""
        self.commit(files)

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Adds a commit and returns its hash."""
        digest = hashlib.sha1(self.main.encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + content)
        self.main = digest.hexdigest()
        self.commits[self.main] = dict(files)
        return self.main

    def at(self, revision: str) -> str | None:
        """The commit of a revision."""
        return self.main if revision == "main" else revision if revision in self.commits else None


class HubServer:
    """A hub that serves until the test is over.

    Attributes:
        repositories: what it has, by ORG/NAME.
        token: what private and gated models ask for.
        gated: models that only the token opens.
        cut_after: bytes of a large file after which a connection breaks, once per entry.
        wrong: files whose bytes come as others than the hub says.
        down: the status of every answer, or 0.
        asked: all requests, in order.
        paused: large files wait behind their first bytes until it is set.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = "hf_right"
        self.gated: set[str] = set()
        self.cut_after: list[int] = []
        self.wrong: set[str] = set()
        self.knows_ranges = True
        self.down = 0
        self.asked: list[Asked] = []
        self.paused: threading.Event | None = None
        self.started = threading.Event()
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))

    @property
    def port(self) -> int:
        """Port on the loopback interface."""
        return int(self.server.server_address[1])

    @property
    def endpoint(self) -> str:
        """The hub's address."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, files: Mapping[str, bytes]) -> Repository:
        """Adds a model."""
        self.repositories[repo] = Repository(files)
        return self.repositories[repo]

    def bytes_asked(self) -> list[Asked]:
        """Requests that were answered with a file's bytes."""
        return [
            asked
            for asked in self.asked
            if asked.method == "GET"
            and ("/cdn/" in asked.path or ("/resolve/" in asked.path and not asked.path.endswith(_LARGE)))
        ]

    def large(self, digest: str) -> tuple[str, bytes] | None:
        """The large file of that SHA-256."""
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for path, content in files.items():
                    if sha256(content) == digest:
                        return path, content
        return None


class _Server(ThreadingHTTPServer):
    """A server whose clients may leave when they like."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Writes nothing of a connection that ended."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubServer

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        get = self.headers.get
        asked = Asked(self.command, self.path, get("Range", ""), get("Authorization", ""), get("User-Agent", ""))
        self.hub.asked.append(asked)
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if self.hub.down:
            self._send(self.hub.down, b"down")
        elif path.startswith("/cdn/"):
            self._send_large(path.removeprefix("/cdn/"))
        elif found := _API.fullmatch(path):
            self._send_api(*found.groups())
        elif found := _RESOLVE.fullmatch(path):
            self._send_file(*found.groups())
        else:
            self._send(404, b"nothing here")

    def _refused(self, repo: str, revision: str | None) -> bool:
        """Sends what the hub says of a model that can't be seen, or a revision that is none."""
        has_token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if self.headers.get("Authorization") and not has_token:
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repo not in self.hub.repositories:
            self._send(401 if not has_token else 404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision is not None and self.hub.repositories[repo].at(revision) is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _send_api(self, repo: str, kind: str | None, revision: str | None) -> None:
        if self._refused(repo, revision):
            return
        repository = self.hub.repositories[repo]
        commit = repository.at(revision or "main")
        assert commit is not None
        if kind != "tree":
            self._send_json({"id": repo, "modelId": repo, "sha": commit, "siblings": []})
            return
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        begin = int(query.get("cursor", ["0"])[0])
        rows = [_tree_row(path, content) for path, content in sorted(repository.commits[commit].items())]
        more = begin + _PAGE < len(rows)
        link = f'<{self.hub.endpoint}{self.path.split("?")[0]}?recursive=true&cursor={begin + _PAGE}>; rel="next"'
        self._send_json(rows[begin : begin + _PAGE], {"Link": link} if more else {})

    def _send_file(self, repo: str, revision: str, path: str) -> None:
        if self._refused(repo, revision):
            return
        if repo in self.hub.gated and self.headers.get("Authorization") is None:
            self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return
        commit = self.hub.repositories[repo].at(revision)
        assert commit is not None
        content = self.hub.repositories[repo].commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if content is None:
            self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        elif path.endswith(_LARGE):
            digest = sha256(content)
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            # Another host as far as a client knows: the token must not get there.
            headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{digest}"
            self._send(302, b"", headers)
        else:
            wrong = path in self.hub.wrong
            self._send(200, content[::-1] if wrong else content, headers | {"ETag": f'"{git_hash(content)}"'})

    def _send_large(self, digest: str) -> None:
        found = self.hub.large(digest)
        if found is None or self.headers.get("Authorization"):
            self._send(403, b"a token came along")
            return
        path, content = found
        if path in self.hub.wrong:
            content = bytes(len(content))
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if self.hub.knows_ranges else None
        begin = int(ranged[1]) if ranged else 0
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self._write(content[begin:])

    def _write(self, content: bytes) -> None:
        cuts = [cut for cut in self.hub.cut_after[:1] if cut < len(content)]
        cut = self.hub.cut_after.pop(0) if cuts else len(content)
        self.wfile.write(content[:cut])
        self.wfile.flush()
        if cut < len(content):
            self.close_connection = True
        self.hub.started.set()
        if self.hub.paused is not None:
            self.hub.paused.wait(600)

    def _send_json(self, value: Any, headers: Mapping[str, str] = {}) -> None:  # noqa: B006  # never changed
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:  # noqa: B006  # never changed
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree_row(path: str, content: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
    if path.endswith(_LARGE):
        row["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
    return row


def sha256(content: bytes) -> str:
    """Hash of a large file."""
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    """Hash of a small file."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """The files of a model folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A hub that listens."""
    hub = HubServer()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.paused is not None:
            hub.paused.set()
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
