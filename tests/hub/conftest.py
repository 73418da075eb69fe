"""A hub on the loopback interface, and a cache of each test's own for the real client."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from tests.support.hub_server import HubServer, hub_server

WEIGHTS = bytes(range(256)) * 4_000
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modeling_own.py": b"raise SystemExit",
    "optimizer.pt": b"pickle",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# a model",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
}


@pytest.fixture
def server_hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub, with acme/tiny; what the variables HF_* say is as in a process that has them."""
    with hub_server() as server:
        server.add("acme/tiny", FILES)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        point_client_at(server.endpoint, tmp_path, monkeypatch)
        monkeypatch.setattr("headrace_hub.blobs._RETRY_DELAY_S", 0.01)
        yield server
        # Connections of this hub are no use for the next.
        close_session()


def point_client_at(endpoint: str, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets what the client read of its variables when it was imported."""
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_URL_HOSTS": frozenset({"127.0.0.1"}),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
