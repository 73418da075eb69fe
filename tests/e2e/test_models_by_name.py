"""From a name to an answer: pulled, interrupted, gone on with, served without a network."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from tests.support.hub_server import HubServer, files_of, hub_server
from tests.support.processes import wait_until
from tests.support.rpc import connected, generate, greedy
from tests.support.running_server import DEMO, environment, refused, running_server

from headrace.v1 import inference_pb2

CPU = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "512")


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with acme/demo, which every process here is pointed at by its variables."""
    with hub_server() as server:
        server.add("acme/demo", files_of(DEMO))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def pulling() -> subprocess.Popen[str]:
    """`headrace pull acme/demo`, started."""
    command = [sys.executable, "-m", "headrace", "pull", "acme/demo"]
    return subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def largest(blobs: pathlib.Path) -> int:
    """Bytes of the largest file of a folder."""
    return max((path.stat().st_size for path in blobs.glob("*")), default=0)


# A pull that is interrupted and goes on, and a cache without a network, are in tests/hub/test_pull.
@pytest.mark.slow
def test_an_interrupted_pull_goes_on_and_the_model_is_served_offline(
    hub: HubServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut_after, hub.paused = [1_000_000], threading.Event()
    interrupted = pulling()
    assert hub.started.wait(600)
    blobs = tmp_path / "home" / "hub" / "models--acme--demo" / "blobs"
    wait_until(lambda: largest(blobs) == 1_000_000, 600.0, "the first bytes did not come")
    interrupted.send_signal(signal.SIGINT)
    said = interrupted.communicate(timeout=600)[1]
    assert interrupted.returncode == 130 and said.splitlines()[-1].endswith("interrupted"), said
    assert largest(blobs) == 1_000_000
    hub.paused.set()
    again = pulling()
    place, said = again.communicate(timeout=600)
    commit = hub.repositories["acme/demo"].main
    assert again.returncode == 0 and pathlib.Path(place.strip()).name == commit, said
    assert "goes on at 1 MB of 13.9 MB" in said
    assert "bytes=1000000-" in [asked.range for asked in hub.bytes_asked()]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    with running_server(*CPU, model=pathlib.Path("acme/demo")) as server, connected(server.address) as stub:
        model = stub.GetModel(inference_pb2.GetModelRequest()).model
        assert model.name == "demo" and commit in model.revision
        assert any(f"acme/demo is at commit {commit}, from the cache" in line for line in server.lines)
        assert generate(server.address, greedy("Once upon", 4)).texts[0]
    assert hub.asked == []


def test_a_mistyped_folder_is_not_asked_of_the_hub_and_a_name_is(
    hub: HubServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for mistyped, said in {
        "models/deno": "there is no folder models/deno here; if a model of the hub is meant: headrace pull models/deno",
        "deno": "no such model folder; a model of a hub is named ORG/NAME",
    }.items():
        ended, _ = refused(model=pathlib.Path(mistyped))
        assert ended.returncode == 2 and said in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert hub.asked == []
    ended, _ = refused(model=pathlib.Path("acme/absent"))
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert f"there is no folder acme/absent here; the hub at {hub.endpoint} has no model acme/absent" in ended.stderr
