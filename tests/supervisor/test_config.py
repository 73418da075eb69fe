"""Settings: which of four places wins, and what an unknown or impossible one is answered with."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
from typing import Any

import pytest
from hypothesis import given, strategies

from headrace_backend import device_defaults
from headrace_backend.config import EngineConfig
from headrace_supervisor import config as configs
from headrace_supervisor import service_settings, settings
from headrace_supervisor.settings import ConfigError

MODEL = {"model": "folder"}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def toml(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "server.toml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_fields() -> None:
    config = configs.load_server(MODEL, None)
    assert config.backend.engine.block_size == 16
    assert config.supervisor.listen == ("127.0.0.1:50051",)
    assert config.backend.max_message_bytes == config.service.max_engine_message_bytes


def test_flags_beat_environment_beats_file_beats_defaults(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toml(tmp_path, 'model = "from-file"\nblock_size = 32\nmax_num_seqs = 7\nmax_outputs = 3\n')
    monkeypatch.setenv("HEADRACE_BLOCK_SIZE", "64")
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "8")
    engine = configs.load_server({"max_num_seqs": "9"}, path).backend.engine
    assert (engine.model, engine.max_outputs, engine.block_size, engine.max_num_seqs) == (
        pathlib.Path("from-file"),
        3,
        64,
        9,
    )
    assert configs.load_server({**MODEL, "device": "cpu"}, None).backend.engine.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("device", "visible", "has_driver", "rows"),
    [
        ("cpu", "all", True, 64),
        ("cuda:1", "all", False, 512),
        ("auto", "all", True, 512),
        ("auto", "", True, 64),
        ("auto", "all", False, 64),
    ],
)
def test_step_sizes_that_are_left_open_are_the_devices(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, device: str, visible: str, has_driver: bool, rows: int
) -> None:
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(device_defaults, "_DRIVER", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    engine = configs.load_server({**MODEL, "device": device, "max_num_batched_tokens": "0"}, None).backend.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (rows, 2048 if rows == 64 else 8192)
    # The processes that read the configuration as JSON, wherever they run, have the same numbers.
    monkeypatch.setattr(device_defaults, "_DRIVER", tmp_path / "none")
    assert EngineConfig.model_validate_json(engine.model_dump_json()) == engine
    assert configs.load_server({**MODEL, "device": device, "max_num_seqs": "7"}, None).backend.engine.max_num_seqs == 7


@pytest.mark.parametrize("value", ["3GiB", str(3 << 30), 3 << 30])
def test_memory_is_given_with_or_without_a_unit(value: object) -> None:
    assert configs.load_server({**MODEL, "kv_memory": value}, None).backend.engine.kv_memory == 3 << 30


@given(rows=strategies.integers(1, 4096), has_experts=strategies.booleans())
def test_graphs_reach_from_one_row_to_all(rows: int, has_experts: bool) -> None:
    sizes = device_defaults.default_graph_sizes(rows, has_experts)
    assert sizes[0] == 1 and sizes[-1] == rows and list(sizes) == sorted(set(sizes))
    assert device_defaults.checked_graph_sizes(",".join(map(str, sizes)), rows) == sizes
    assert device_defaults.checked_graph_sizes("auto", rows, has_experts) == sizes
    assert all(after <= 1.26 * before for before, after in itertools.pairwise(sizes) if before >= 64)
    # Padding of few rows reads experts of its own.
    assert not has_experts or all(size in sizes for size in range(1, min(rows, 8) + 1))


def test_graph_sizes_come_as_text_or_as_a_list(tmp_path: pathlib.Path) -> None:
    for text in ('"1,2,8"', "[1, 2, 8]"):
        engine = configs.load_server(MODEL, toml(tmp_path, f"graph_sizes = {text}")).backend.engine
        assert engine.captured_batch_sizes() == (1, 2, 8)
    assert configs.load_server({**MODEL, "graph_sizes": "off"}, None).backend.engine.captured_batch_sizes() == ()


@pytest.mark.parametrize(("text", "fixed"), [("3", 3), ('"3"', 3), ('"auto"', None)])
def test_a_number_of_drafts_comes_as_text_or_as_a_number(text: str, fixed: int | None, tmp_path: pathlib.Path) -> None:
    path = toml(tmp_path, f'speculate = "ngram"\nspeculate_tokens = {text}')
    assert configs.load_server(MODEL, path).backend.engine.fixed_drafts() == fixed


@pytest.mark.parametrize("text", ["0", "9", "-1", "12", '"1.5"', '"auto 2"', '"autos"', '"4\\n"'])
def test_a_number_of_drafts_that_is_none_is_refused_in_words(text: str, tmp_path: pathlib.Path) -> None:
    path = toml(tmp_path, f'speculate = "ngram"\nspeculate_tokens = {text}')
    with pytest.raises(ConfigError, match="speculate_tokens: must be auto or a whole number from 1 to 8, not "):
        configs.load_server(MODEL, path)


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "draft", "eagle", "mtp"])
def test_no_drafter_works_with_stages(drafter: str) -> None:
    with pytest.raises(ConfigError, match=f"speculate is {drafter} and pp is 2: .* pp 1 works, or speculate off"):
        configs.load_server({**MODEL, "speculate": drafter, "pp": "2"}, None)


def test_file_is_also_named_by_the_environment(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", str(toml(tmp_path, 'model = "from-file"')))
    assert configs.load_server({}, None).backend.engine.model == pathlib.Path("from-file")


@pytest.mark.parametrize("value", ["127.0.0.1:1,unix:/x", ("127.0.0.1:1", "unix:/x")])
def test_several_addresses_come_as_text_or_as_a_list(value: object) -> None:
    assert configs.load_server({**MODEL, "listen": value}, None).supervisor.listen == ("127.0.0.1:1", "unix:/x")


def test_booleans_and_choices_are_read_from_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENABLE_PREFIX_CACHE", "false")
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "json")
    config = configs.load_server(MODEL, None)
    assert config.backend.engine.enable_prefix_cache is False
    assert (config.supervisor.log_format, config.service.log_format, config.backend.log_format) == (
        "json",
        "json",
        "json",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensor_parallel_size = 2", "unknown setting tensor_parallel_size; here it is tp"),
        ("gpu_memory_utilization = 0.9", "unknown setting gpu_memory_utilization: memory is given in bytes"),
        ("xyzzyxyzzy = 1", "unknown setting xyzzyxyzzy"),
        ("[server]\nblock_size = 16", "[server] begins a table; settings stand in the file as they are"),
    ],
)
def test_another_servers_file_is_answered_with_what_there_is_instead(
    tmp_path: pathlib.Path, text: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load_server(MODEL, toml(tmp_path, text))
    assert f"server.toml: {says}" in str(caught.value) and "kserve" not in str(caught.value)


def test_another_servers_words_are_taken_from_everywhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert configs.load_server(MODEL, toml(tmp_path, 'dtype = "half"')).backend.engine.dtype == "fp16"
    monkeypatch.setenv("HEADRACE_DTYPE", "bfloat16")
    assert configs.load_server(MODEL, None).backend.engine.dtype == "bf16"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"listen = 5", "listen: must be text or a list, not '5'"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"model = [", "is not TOML: "),
        (b"model = " + b"[" * 100_000, "is not TOML: lists or tables are nested too deeply"),
        (b"port = " + b"9" * 10_000, "is not TOML: a number has too many digits"),
        (b"#" * ((1 << 20) + 1), "has more than 1048576 bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_its_own_words(tmp_path: pathlib.Path, content: bytes, says: str) -> None:
    path = tmp_path / "server.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"server.toml: {re.escape(says)}"):
        configs.load_server(MODEL, path)


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "server.toml"
    os.mkfifo(path)
    for found in (path, pathlib.Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"^{found}: is not a regular file$"):
            configs.load_server(MODEL, found)


def test_unknown_key_in_the_file_names_file_and_nearest(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        ConfigError, match=r"server\.toml: unknown setting blok_size; the nearest known one is block_size"
    ):
        configs.load_server(MODEL, toml(tmp_path, "blok_size = 16"))


def test_unknown_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "4")
    with pytest.raises(ConfigError, match="HEADRACE_MAX_NUM_SEQ; the nearest known one is HEADRACE_MAX_NUM_SEQS"):
        configs.load_server(MODEL, None)


def test_variables_of_the_other_commands_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SERVICES", "2")
    monkeypatch.setenv("HEADRACE_SERVER", "127.0.0.1:1")
    assert configs.load_service({"listen": "127.0.0.1:0", "engine": "unix:/x"}, None).listen == ("127.0.0.1:0",)


def test_settings_that_serve_decides_are_unknown_to_it() -> None:
    flags = set(settings.names(configs.SERVE))
    assert not flags & {"engine", "reuse_port", "service_name", "token_file", "exit_with_parent"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "model is needed: the argument MODEL, --model, HEADRACE_MODEL"),
        ({**MODEL, "block_size": "17"}, "--block-size: must be 16, 32 or 64, not '17' (nearest: 16)"),
        ({**MODEL, "block_size": "128"}, "(nearest: 64)"),
        ({**MODEL, "dtype": "bfp16"}, "not 'bfp16' (nearest: fp16)"),
        ({**MODEL, "max_num_seqs": "-1"}, "--max-num-seqs: must be at least 0, not '-1'"),
        ({**MODEL, "max_num_batched_tokens": "15"}, "max_num_batched_tokens should be 16 or more"),
        ({**MODEL, "kv_memory": "2 XB"}, "--kv-memory: must be a number of bytes, as in 20GiB or 512MiB, not '2 XB'"),
        ({**MODEL, "graph_sizes": "some"}, "graph_sizes should be auto, off, or batch sizes"),
        ({**MODEL, "graph_sizes": "8,4,0", "max_num_seqs": "6"}, "the nearest that works is 1,4,6"),
        (
            {**MODEL, "quantize": "int3"},
            "--quantize: must be off, int8, int4, fp8 or nf4, not 'int3' (nearest: int8)",
        ),
        (
            {**MODEL, "quantize": "int4", "quantize_group": "100"},
            "--quantize-group: must be 32, 64 or 128, not '100' (nearest: 128)",
        ),
        ({**MODEL, "quantize": "fp8", "quantize_group": "64"}, "quantize_group is for int4, and quantize is fp8: 128"),
        (
            {**MODEL, "quantize": "int8", "quantize_activations": "fp8"},
            "quantize_activations is fp8, and quantize is int8: it is for int4",
        ),
        ({**MODEL, "ageing_s": "often"}, "--ageing-s: must be a number"),
        ({**MODEL, "services": "2", "listen": "unix:/x"}, "services is 2"),
        ({**MODEL, "listen": "nowhere"}, "listen: 'nowhere' must be HOST:PORT"),
        ({**MODEL, "model_repository": "/nowhere"}, "model_repository: there is no folder /nowhere"),
        ({**MODEL, "model_repository": __file__}, "model_repository: there is no folder"),
        ({**MODEL, "model_repository": "x" * 256}, "--model-repository: must be a path of at most 4095 bytes"),
        ({**MODEL, "trace_file": "/x" * 2048}, "--trace-file: must be a path of at most 4095 bytes"),
        ({**MODEL, "draft_model": "\udcff"}, "--draft-model: must be text in UTF-8, not '\\udcff'"),
        ({**MODEL, "kv_memory": "1,5GiB"}, "--kv-memory: must be a number of bytes, as in 20GiB or 512MiB"),
        ({**MODEL, "trace_ring": "127.0.0.1:1"}, "--trace-ring: must be a number of bytes"),
    ],
)
def test_a_value_out_of_range_names_setting_rule_and_value(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load_server(flags, None)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_place_of_a_bad_value_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"server\.toml: max_outputs"):
        configs.load_server(MODEL, toml(tmp_path, "max_outputs = 0"))
    monkeypatch.setenv("HEADRACE_MAX_OUTPUTS", "0")
    with pytest.raises(ConfigError, match="HEADRACE_MAX_OUTPUTS:"):
        configs.load_server(MODEL, None)


@pytest.mark.parametrize("seconds", ["0.5", "-1", "3601", "nan", "inf"])
def test_a_hang_timeout_that_accuses_the_valid_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match="--hang-timeout-s"):
        configs.load_server({**MODEL, "hang_timeout_s": seconds}, None)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc", ".hidden", "a b", "x\n", "ü", "x" * 129])
def test_what_a_model_may_not_be_called_is_refused_with_the_rule(name: str) -> None:
    for load in (configs.load_server, configs.load_backend):
        with pytest.raises(
            ConfigError, match=r"^model_name: .* is no name of a model: 1 to 128 of A-Z a-z 0-9 \. _ \+ -"
        ) as refused:
            load(
                {
                    **MODEL,
                    "listen": ("unix:/tmp/x",) if load is configs.load_server else "unix:/tmp/x",
                    "model_name": name,
                },
                None,
            )
        assert len(str(refused.value)) < 250 and "\n" not in str(refused.value)


@pytest.mark.parametrize("line", ['keys_file = "/x\\u0000y"', 'listen = ["unix:/x\\u0000y"]'])
def test_a_text_that_no_path_or_address_may_have_is_refused_by_name(tmp_path: pathlib.Path, line: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(line)
    name = line.split()[0]
    with pytest.raises(ConfigError, match=f"settings.toml: {name}: must be text without the character NUL$"):
        configs.load_server(dict(MODEL), path)


def test_a_size_that_only_begins_like_one_is_refused_in_a_models_own_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('kv_memory = "1,5GiB"')
    with pytest.raises(ConfigError, match="headrace.toml: kv_memory: must be a number of bytes.*, not '1,5GiB'"):
        settings.read_file(settings.Group("", EngineConfig), path)


@pytest.mark.parametrize("text", ["model = ", "\xff"])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        configs.load_server({}, path)


def test_a_name_that_two_parts_share_means_the_same_in_both() -> None:
    for groups in (configs.SERVE, configs.SERVICE, configs.BACKEND, configs.RANKS):
        seen: dict[str, tuple[object, object]] = {}
        for group in groups:
            for name, field in group.fields().items():
                meaning = (field.annotation, field.default)
                assert seen.setdefault(name, meaning) == meaning, f"{name} differs between parts of one command"


def test_the_processes_get_private_addresses() -> None:
    service = service_settings.addressed(
        configs.load_server(MODEL, None).service, ("127.0.0.1:7",), "unix:/run/control.sock"
    )
    assert (service.listen, service.control) == (("127.0.0.1:7",), "unix:/run/control.sock")
    assert service.reuse_port
    # launch.py ties processes to the supervisor by SIGKILL; the service would replace it by SIGTERM
    # and its whole grace.
    assert not service.exit_with_parent


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "192.168.1.5:1", "example.org:1"])
def test_an_address_that_other_machines_reach_must_be_meant(address: str) -> None:
    with pytest.raises(ConfigError, match="insecure"):
        configs.load_server({**MODEL, "listen": (address,)}, None)
    assert configs.load_server({**MODEL, "listen": (address,), "insecure": True}, None).service.insecure


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.8.8:1", "[::1]:1", "localhost:1", "unix:/tmp/x"])
def test_loopback_and_unix_addresses_need_no_leave(address: str) -> None:
    assert configs.load_server({**MODEL, "listen": (address,)}, None).supervisor.listen == (address,)


@pytest.mark.parametrize("file", ["config.json", "weights.gguf"])
def test_a_bare_name_means_the_repositorys_model_of_whichever_kind(tmp_path: pathlib.Path, file: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).touch()
    for name, found in (("mine", tmp_path / "mine"), ("other", pathlib.Path("other"))):
        config = configs.load_server({"model": name, "model_repository": str(tmp_path)}, None)
        assert (config.backend.engine.model, config.model_name) == (found, name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"listen": ("127.0.0.1:7000",), "openai_listen": ("127.0.0.1:7000",)},
            "listen and openai_listen: 127.0.0.1:7000 is named twice; each needs an address of its own",
        ),
        (
            {"listen": ("127.0.0.1:7000",), "metrics_listen": "0.0.0.0:7000"},
            "listen and metrics_listen: 127.0.0.1:7000 and 0.0.0.0:7000 are the same; each needs an address of its own",
        ),
        (
            {"openai_listen": ("unix:/run/a", "127.0.0.1:7000"), "metrics_listen": "localhost:7000"},
            "openai_listen and metrics_listen: 127.0.0.1:7000 and localhost:7000 are the same; ",
        ),
        (
            {"listen": ("127.0.0.1:7000", "unix:/run/a", "127.0.0.1:7000")},
            "listen: 127.0.0.1:7000 is named twice; each needs an address of its own",
        ),
    ],
)
def test_two_addresses_that_are_the_same_are_refused_by_both_settings(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        configs.load_server({**MODEL, **flags}, None)


def test_any_free_port_may_be_asked_for_twice() -> None:
    any_port = "127.0.0.1:0"
    configs.load_server({**MODEL, "listen": (any_port, any_port), "metrics_listen": any_port}, None)


def test_health_checks_need_an_address_of_their_own() -> None:
    message = "^listen and probe: unix:/run/a is named twice; each needs an address of its own"
    with pytest.raises(ConfigError, match=message):
        configs.load_service({"engine": ("unix:/run/e",), "listen": ("unix:/run/a",), "probe": "unix:/run/a"}, None)
    with pytest.raises(ConfigError, match=message):
        configs.load_backend({**MODEL, "listen": "unix:/run/a", "probe": "unix:/run/a"}, None)
