"""From a name to a backend's configuration.

Which settings win, and what a model's own file may say.
"""

from __future__ import annotations

import json
import os
import pathlib

import grpc
import pytest
from tests.service.model_folder import write_model_folder as write_folder
from tests.support.running_server import DEMO

from headrace_backend import start_rules
from headrace_supervisor import config as configs
from headrace_supervisor.models.model_launches import ModelLaunches
from headrace_supervisor.refusals import Refused
from headrace_supervisor.settings import ConfigError

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def repository(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("first", "second"):
        write_folder(tmp_path / "models" / name)
    return tmp_path / "models"


def launches(repository: pathlib.Path, **flags: object) -> ModelLaunches:
    runtime = repository.parent / "runtime"
    runtime.mkdir(exist_ok=True)
    values = {"model": "first", "model_repository": str(repository), "load": "dummy", "device": "cpu", **flags}
    return ModelLaunches(configs.load_server(values, None), runtime)


def engine_of(made: ModelLaunches, name: str, memory_bytes: int = 0) -> dict[str, object]:
    launch = made.prepare(name, memory_bytes, 0)
    config: dict[str, dict[str, object]] = json.loads(pathlib.Path(launch.spec.command[-1]).read_text())
    assert launch.spec.command[3:5] == ("--early-workers", "1")
    assert config["listen"] == launch.address and launch.spec.name == f"backend {name}"
    return config["engine"]


def test_a_bare_name_is_the_repositorys_and_a_path_is_not(repository: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert launches(repository).default == "first"
    assert launches(repository).names() == ("first", "second")
    outside = write_folder(tmp_path / "outside")
    made = launches(repository, model=str(outside))
    assert made.default == "outside" and made.names() == ("first", "outside", "second")
    assert engine_of(made, "outside")["model"] == str(outside)
    named = launches(repository, model=str(outside), model_name="mine")
    assert engine_of(named, "mine")["model_name"] == "mine"


def test_a_runtime_folder_that_can_not_be_written_refuses_the_load(repository: pathlib.Path) -> None:
    made = launches(repository)
    runtime = repository.parent / "runtime"
    # As full disks do, and unlike missing rights it stops root too.
    runtime.rmdir()
    with pytest.raises(
        Refused, match="^model second: its configuration can't be written: No such file or directory$"
    ) as refused:
        made.prepare("second", 0, 0)
    assert refused.value.code == grpc.StatusCode.UNAVAILABLE
    runtime.mkdir()
    assert made.prepare("second", 0, 0).spec.name == "backend second"


def test_a_repositorys_model_keeps_its_folders_name(repository: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="model_name is for a model given as a path"):
        launches(repository, model_name="mine")


def test_names_to_load_need_a_repository() -> None:
    with pytest.raises(ConfigError, match="load_models needs model_repository"):
        configs.load_server({"model": "folder", "load_models": ("x",)}, None)


@pytest.mark.parametrize(
    ("device", "devices"),
    [("cuda:1", ["cuda:1", "cuda:3", "cuda:5"]), ("cpu", ["cpu"] * 3), ("cuda", ["cuda:0", "cuda:2", "cuda:4"])],
)
def test_replicas_have_gpus_of_their_own(
    repository: pathlib.Path, monkeypatch: pytest.MonkeyPatch, device: str, devices: list[str]
) -> None:
    monkeypatch.setattr(start_rules, "_DRIVERS", (repository,))
    made = launches(repository, model=str(DEMO), replicas=3, tp=2, device=device)
    claims = made.check("demo")
    assert [claim.device for claim in claims] == devices and {claim.ranks for claim in claims} == {2}
    written, names = [], set()
    for replica in range(3):
        launch = made.prepare("demo", 0, replica)
        config = json.loads(pathlib.Path(launch.spec.command[-1]).read_text())
        written.append(config["engine"]["device"])
        names.add(launch.spec.name)
    # The first keeps the words of its settings.
    assert written == [device, *devices[1:]]
    assert names == {f"backend demo (replica {replica})" for replica in range(3)}


def test_replicas_of_several_stages_have_gpus_for_all_ranks(
    repository: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_rules, "_DRIVERS", (repository,))
    claims = launches(repository, model=str(DEMO), replicas=2, tp=2, pp=2, device="cuda").check("demo")
    assert [claim.devices for claim in claims] == [
        tuple(f"cuda:{index}" for index in range(first, first + 4)) for first in (0, 4)
    ]


def test_more_stages_than_layers_are_refused(repository: pathlib.Path) -> None:
    with pytest.raises(Refused, match=r"pp is 4, and the model has 2 layers: pp of at most 2 works$"):
        launches(repository, model=str(DEMO / "draft"), pp=4, device="cpu").check("draft")


@pytest.mark.parametrize("number", [0, 9])
def test_numbers_of_replicas_have_bounds(repository: pathlib.Path, number: int) -> None:
    with pytest.raises(ConfigError, match="--replicas"):
        launches(repository, replicas=number)


def test_a_models_own_file_beats_the_servers_settings_and_a_loads_budget_both(repository: pathlib.Path) -> None:
    (repository / "second" / "headrace.toml").write_text(
        'memory_budget = "2GiB"\nblock_size = 32\nmax_num_seqs = 3\ngraph_sizes = [1, 2]\n'
    )
    made = launches(repository, memory_budget="1GiB", block_size="64")
    first, second = engine_of(made, "first"), engine_of(made, "second")
    assert (first["memory_budget"], first["block_size"], first["model_name"]) == (GIB, 64, "first")
    assert (second["memory_budget"], second["block_size"], second["max_num_seqs"]) == (2 * GIB, 32, 3)
    assert engine_of(made, "second", 3 * GIB)["memory_budget"] == 3 * GIB
    assert made.check("second", 3 * GIB)[0].budget_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("blok_size = 16", "headrace.toml: unknown setting blok_size; the nearest known one is block_size"),
        ('model = "elsewhere"', "unknown setting model"),
        ('model_name = "other"', "unknown setting model_name"),
        ("listen = 'unix:x'", "unknown setting listen"),
        ("block_size = 17", "headrace.toml: block_size"),
        ("max_num_batched_tokens = 3", "max_num_batched_tokens should be 16 or more"),
        ("x =", "headrace.toml: is not TOML: Invalid"),
    ],
)
def test_a_models_file_with_a_mistake_is_refused_by_name(repository: pathlib.Path, text: str, named: str) -> None:
    (repository / "second" / "headrace.toml").write_text(text)
    with pytest.raises(Refused, match=named) as refused:
        launches(repository).check("second")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION and str(repository) not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tp = 3", "second: tp is 3, which does not divide num_attention_heads"),
        ('quantize = "int4"', "second: quantize_group is 128, which does not divide"),
    ],
)
def test_a_models_file_that_does_not_suit_the_model_is_refused(repository: pathlib.Path, text: str, named: str) -> None:
    (repository / "second" / "headrace.toml").write_text(text)
    with pytest.raises(Refused, match=named) as refused:
        launches(repository).check("second")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION and str(repository) not in str(refused.value)


def test_a_models_file_may_not_be_a_link_out_of_its_folder(repository: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere.toml").write_text("seed = 1")
    (repository / "second" / "headrace.toml").symlink_to(tmp_path / "elsewhere.toml")
    with pytest.raises(Refused, match="link that leads out"):
        launches(repository).check("second")


def test_a_folder_without_a_tokenizer_is_refused_before_anything_starts(repository: pathlib.Path) -> None:
    (repository / "second" / "tokenizer.json").unlink()
    with pytest.raises(Refused, match="second: has no tokenizer.json"):
        launches(repository).check("second")


def test_each_start_has_a_socket_of_its_own(repository: pathlib.Path) -> None:
    made = launches(repository)
    assert len({made.prepare("second", 0, 0).address for _ in range(3)}) == 3


def test_without_a_repository_there_is_the_default_model_alone(repository: pathlib.Path) -> None:
    runtime = repository.parent / "runtime"
    runtime.mkdir()
    config = configs.load_server({"model": str(repository / "first"), "load": "dummy"}, None)
    made = ModelLaunches(config, runtime)
    assert made.names() == ("first",) and made.prepare("first", 0, 0).spec.name == "backend"
    with pytest.raises(Refused, match="no model repository") as refused:
        made.check("second")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_length_beyond_the_models_context_is_refused(repository: pathlib.Path) -> None:
    with pytest.raises(Refused, match="model first: max_model_len is 100000; the model's context has 512 tokens"):
        launches(repository, max_model_len="100000").check("first")


@pytest.mark.parametrize(
    ("device", "drivers", "visible", "says"),
    [
        ("cpu", (), None, None),
        ("auto", (), None, None),
        ("cuda:1", ("/dev/nvidiactl",), None, None),
        ("cuda", ("/dev/dxg",), "0", None),
        ("cuda", (), None, "this machine has no NVIDIA driver; device cpu works"),
        ("cuda:3", ("/dev/nvidiactl",), "", "CUDA_VISIBLE_DEVICES hides every GPU; device cpu works"),
        ("cuda:x", ("/dev/nvidiactl",), None, "it must be auto, cpu, cuda or cuda:<index>"),
        ("gpu", ("/dev/nvidiactl",), None, "it must be auto, cpu, cuda or cuda:<index>"),
    ],
)
def test_a_device_that_can_not_be_is_refused_without_torch(
    monkeypatch: pytest.MonkeyPatch, device: str, drivers: tuple[str, ...], visible: str | None, says: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reason = start_rules.unsuitable_device(device, exists=lambda path: str(path) in drivers)
    assert reason is None if says is None else reason is not None and says in reason
