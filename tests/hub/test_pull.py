"""Models fetched from a hub by the real client: what comes, what is checked, what is refused."""

from __future__ import annotations

import io
import json
import pathlib
import shutil
import sys
import threading

import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from tests.hub.conftest import FILES, WEIGHTS, point_client_at
from tests.support.hub_server import HubServer, sha256
from tests.support.processes import wait_until

from headrace_hub import blobs, hub, models
from headrace_hub.cache import RepositoryCache
from headrace_hub.command import pull
from headrace_hub.errors import HubRefused
from headrace_hub.names import parsed

TINY = parsed("acme/tiny")
WANTED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def cache() -> RepositoryCache:
    return RepositoryCache(hub.cache_folder(), TINY)


def test_a_model_comes_whole_without_pickles_and_code(server_hub: HubServer) -> None:
    found = models.pull(TINY)
    assert found.commit == server_hub.repositories["acme/tiny"].main
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {name: FILES[name] for name in WANTED}
    assert not any(word in asked.path for asked in server_hub.asked for word in (".bin", ".pt", ".py", "README"))
    assert all(asked.agent.startswith("headrace/") for asked in server_hub.asked)


def test_a_second_pull_fetches_nothing_and_a_new_commit_its_changes(server_hub: HubServer) -> None:
    first = models.pull(TINY)
    server_hub.asked.clear()
    assert models.pull(TINY) == first
    assert not server_hub.bytes_asked()
    server_hub.repositories["acme/tiny"].commit(FILES | {"tokenizer.json": b'{"model": {"new": 1}}'})
    second = models.pull(TINY)
    assert second.commit != first.commit and (second.path / "tokenizer.json").read_bytes() == b'{"model": {"new": 1}}'
    assert len(server_hub.bytes_asked()) == 1


def test_a_server_takes_what_was_pulled_and_asks_nobody(server_hub: HubServer) -> None:
    first = models.pull(TINY)
    server_hub.repositories["acme/tiny"].commit(FILES | {"config.json": b"{}"})
    server_hub.asked.clear()
    assert models.found_or_pulled(TINY) == first
    assert models.found_or_pulled(parsed(f"acme/tiny@{first.commit}")) == first
    assert server_hub.asked == []


def test_a_commit_can_be_named(server_hub: HubServer) -> None:
    old = server_hub.repositories["acme/tiny"].main
    server_hub.repositories["acme/tiny"].commit(FILES | {"config.json": b"{}"})
    assert (models.pull(parsed(f"acme/tiny@{old}")).path / "config.json").read_bytes() == FILES["config.json"]
    assert models.cached(TINY) is None


def test_what_another_program_fetched_in_part_is_completed(server_hub: HubServer) -> None:
    hub.fetch_small(TINY, server_hub.repositories["acme/tiny"].main, "config.json")
    cache().point("main", server_hub.repositories["acme/tiny"].main)
    assert models.cached(TINY) is None
    assert {path.name for path in models.found_or_pulled(TINY).path.iterdir()} == WANTED


def test_a_model_is_whole_without_what_only_others_read(server_hub: HubServer) -> None:
    server_hub.repositories["acme/tiny"].commit(FILES | {"vocab.json": b"{}"})
    found = models.pull(TINY)
    (found.path / "vocab.json").unlink()
    assert models.cached(TINY) == found
    (found.path / "tokenizer.json").unlink()
    assert models.cached(TINY) is None


def test_a_connection_that_breaks_is_opened_again_behind_the_last_byte(
    server_hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server_hub.cut_after = [300_000, 100_000]
    assert (models.pull(TINY).path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [asked.range for asked in server_hub.bytes_asked() if asked.range]
    assert ranges == ["bytes=300000-", "bytes=400000-"]
    assert "model.safetensors: connection lost at 300 kB, goes on" in capfd.readouterr().err


def test_a_connection_that_brings_nothing_is_given_up(server_hub: HubServer) -> None:
    server_hub.cut_after = [0] * 100
    with pytest.raises(HubRefused, match="acme/tiny: the hub at .* can't be reached"):
        models.pull(TINY)


def test_a_download_that_was_cut_off_goes_on_in_the_next_run(server_hub: HubServer) -> None:
    partial = cache().partial(sha256(WEIGHTS))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS[:500_000])
    models.pull(TINY)
    assert "bytes=500000-" in [asked.range for asked in server_hub.bytes_asked()]
    assert not list(partial.parent.glob("*.incomplete"))


def test_a_server_without_ranges_begins_anew(server_hub: HubServer) -> None:
    server_hub.cut_after, server_hub.knows_ranges = [300_000], False
    assert (models.pull(TINY).path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(("file", "kind"), [("model.safetensors", "SHA-256"), ("config.json", "git hash")])
def test_a_wrong_hash_is_refused_by_name_and_removed(server_hub: HubServer, file: str, kind: str) -> None:
    server_hub.wrong = {file}
    with pytest.raises(HubRefused, match=rf"{file} of acme/tiny is not what the hub says: its {kind} is") as refused:
        models.pull(TINY)
    assert "\n" not in str(refused.value)
    assert models.cached(TINY) is None
    server_hub.wrong = set()
    assert (models.pull(TINY).path / file).read_bytes() == FILES[file]


def test_damage_in_what_an_earlier_run_left_is_found(server_hub: HubServer) -> None:
    partial = cache().partial(sha256(WEIGHTS))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(500_000))
    with pytest.raises(HubRefused, match="model.safetensors of acme/tiny is not what the hub says"):
        models.pull(TINY)
    assert (models.pull(TINY).path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_pull_that_fails_leaves_the_model_that_was_whole(server_hub: HubServer) -> None:
    first = models.pull(TINY)
    server_hub.repositories["acme/tiny"].commit(FILES | {"model.safetensors": WEIGHTS[::-1]})
    server_hub.wrong = {"model.safetensors"}
    with pytest.raises(HubRefused):
        models.pull(TINY)
    assert models.found_or_pulled(TINY) == first


def test_two_pulls_at_once_fetch_a_file_once(server_hub: HubServer) -> None:
    server_hub.paused = threading.Event()
    found: list[models.FoundModel] = []
    pulls = [threading.Thread(target=lambda: found.append(models.pull(TINY))) for _ in range(2)]
    for each in pulls:
        each.start()
    assert server_hub.started.wait(600)
    server_hub.paused.set()
    for each in pulls:
        each.join()
    assert len(found) == 2 and found[0] == found[1]
    cdn = [asked.path for asked in server_hub.bytes_asked() if "/cdn/" in asked.path]
    assert len(cdn) == len(set(cdn))


def test_a_pull_that_waits_for_another_says_so(server_hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "_LOCK_PATIENCE_S", 0.01)
    # pytest's own capture empties its file behind what it has read, and may drop what came between.
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    lock = cache().lock(sha256(WEIGHTS))
    lock.parent.mkdir(parents=True)

    def has_said() -> bool:
        return "model.safetensors: another process fetches it; waiting" in said.getvalue()

    with WeakFileLock(lock):
        waiting = threading.Thread(target=models.pull, args=(TINY,))
        waiting.start()
        wait_until(has_said, 600.0, "nothing was said")
    waiting.join()
    assert models.cached(TINY) is not None


def test_shards_come_by_their_index(server_hub: HubServer) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index, "other.safetensors": b"other"}
    server_hub.add("acme/tiny", files | {name: name.encode() for name in names})
    found = models.pull(TINY)
    assert {path.name for path in found.path.iterdir()} == {"config.json", "model.safetensors.index.json", *names}
    assert models.cached(TINY) == found
    (found.path / names[1]).unlink()
    assert models.cached(TINY) is None


def test_one_of_several_gguf_files_comes_alone(server_hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    quants = {f"m-{bits}.gguf": bits.encode() for bits in ("Q4_K_M", "Q8_0")}
    server_hub.add("acme/tiny", quants | {"config.json": b"{}"})
    with pytest.raises(HubRefused, match="has 2 GGUF files"):
        models.pull(TINY)
    found = models.pull(parsed("acme/tiny:q8_0"))
    assert found.path.name == "m-Q8_0.gguf" and found.path.read_bytes() == b"Q8_0"
    assert models.cached(parsed("acme/tiny:Q8_0")) == found
    assert models.cached(parsed("acme/tiny:Q4_K_M")) is None and models.cached(TINY) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubRefused, match="has 2 GGUF files"):
        models.found_or_pulled(TINY)


def test_only_the_configuration_comes_for_a_plan(server_hub: HubServer) -> None:
    assert (models.config_folder(TINY) / "config.json").read_bytes() == FILES["config.json"]
    assert {asked.path.rpartition("/")[2] for asked in server_hub.bytes_asked()} == {"config.json"}


def test_the_index_of_weights_in_shards_comes_for_a_plan_too(server_hub: HubServer) -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": b"x" for number in (1, 2)}
    index = {"model.safetensors.index.json": b'{"weight_map": {}}'}
    server_hub.add("acme/tiny", {"config.json": b"{}", **index, **shards})
    folder = models.config_folder(TINY)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors.index.json"]
    assert models.config_folder(TINY) == folder


def test_a_plan_of_a_repository_without_a_configuration_is_refused(server_hub: HubServer) -> None:
    server_hub.add("acme/tiny", {"m.gguf": b"x"})
    with pytest.raises(HubRefused, match="^acme/tiny has no config.json$"):
        models.config_folder(TINY)


@pytest.mark.parametrize("place", ["variable", "file"])
def test_a_token_opens_a_gated_model_and_stays_with_the_hub(
    server_hub: HubServer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_hub.gated = {"acme/tiny"}
    if place == "variable":
        monkeypatch.setenv("HF_TOKEN", server_hub.token)
    else:
        pathlib.Path(constants.HF_TOKEN_PATH).write_text(server_hub.token + "\n")
    assert (models.pull(TINY).path / "model.safetensors").read_bytes() == WEIGHTS
    elsewhere = [asked for asked in server_hub.asked if "/cdn/" in asked.path]
    assert elsewhere and not any(asked.authorization for asked in elsewhere)


def test_offline_the_cache_is_taken_and_nobody_asked(server_hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ask in (models.pull, models.found_or_pulled):
        with pytest.raises(HubRefused, match="is not whole in the cache .* HF_HUB_OFFLINE forbids"):
            ask(TINY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = models.pull(TINY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server_hub.asked.clear()
    assert models.pull(TINY) == models.found_or_pulled(TINY) == found
    assert server_hub.asked == []


def test_names_and_hashes_that_lead_elsewhere_are_not_believed(server_hub: HubServer, tmp_path: pathlib.Path) -> None:
    server_hub.add("acme/tiny", {"../m.gguf": b"x", "/m.gguf": b"x", "m\n.gguf": b"x", "README.md": b"x"})
    with pytest.raises(HubRefused, match="has no GGUF file and no config.json"):
        models.pull(TINY)
    repository = server_hub.add("acme/tiny", FILES)
    repository.main, repository.commits["../../out"] = "../../out", FILES
    with pytest.raises(HubRefused, match="is no model hub"):
        models.pull(TINY)
    assert not list(tmp_path.rglob("*.gguf")) and not (tmp_path / "hub").exists()


def refusal(name: str, exit_code: int = 1) -> str:
    """What `headrace pull` says of a model that can't be had: its last line, and the exit code."""
    result = CliRunner().invoke(pull, [name])
    assert result.exit_code == exit_code and result.stdout == "", result.output
    lines = [line for line in result.stderr.splitlines() if " is at commit " not in line and "fetching" not in line]
    [line] = lines
    return line.removeprefix("headrace: ")


def test_each_refusal_is_one_sentence(
    server_hub: HubServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = server_hub.endpoint
    assert refusal("acme/absent") == (
        f"the hub at {at} has no model acme/absent, or it is private and needs a token (HF_TOKEN)"
    )
    assert refusal("acme/tiny@v9") == "acme/tiny has no revision v9"
    assert "is no model's name" in refusal("tiny", exit_code=2)
    server_hub.gated = {"acme/tiny"}
    assert refusal("acme/tiny") == (
        f"acme/tiny is gated and no token was given: ask for access at {at}/acme/tiny, and set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refusal("acme/tiny").startswith(f"the hub at {at} refuses the token (HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", server_hub.token)
    assert refusal("acme/absent").endswith("or it is private and the token does not open it")
    server_hub.down = 503
    assert refusal("acme/tiny") == f"acme/tiny: the hub at {at} answered 503: down"
    server_hub.down = 200
    assert refusal("acme/tiny").startswith(f"acme/tiny: what answers at {at} is no model hub (")
    point_client_at("http://127.0.0.1:1", tmp_path, monkeypatch)
    assert refusal("acme/tiny").startswith("acme/tiny: the hub at http://127.0.0.1:1 can't be reached: ")


def test_a_disk_without_the_place_is_refused_before_a_byte_comes(
    server_hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("headrace_hub.blobs.shutil.disk_usage", lambda place: usage._replace(free=68_000_000))
    said = refusal("acme/tiny")
    assert said.startswith("acme/tiny takes 1.02 MB more, with 67.1 MB to spare, and ")
    assert "has 68 MB free; HF_HOME names" in said
    assert not server_hub.bytes_asked()
    partial = cache().partial(sha256(WEIGHTS))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS[:900_000])
    blobs.check_space(TINY, cache(), list(hub.files_at(TINY, server_hub.repositories["acme/tiny"].main).values()))


def test_a_cache_that_can_not_be_written_is_named(server_hub: HubServer, tmp_path: pathlib.Path) -> None:
    (tmp_path / "hub").write_text("a file")
    folder = tmp_path / "hub" / "models--acme--tiny"
    assert refusal("acme/tiny") == f"acme/tiny can't be kept: {folder}/blobs: Not a directory"
    (tmp_path / "hub").unlink()
    folder.mkdir(parents=True)
    (folder / "refs").write_text("a file")
    assert (
        CliRunner().invoke(pull, ["acme/tiny"]).stderr.splitlines()[-1].startswith("headrace: acme/tiny can't be kept")
    )
