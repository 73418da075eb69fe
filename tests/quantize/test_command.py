"""`headrace quantize` as a person types it.

Mistakes are one line and exit code 2, and a run ends with a table.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from tests.models.checkpoints import write_checkpoint
from tests.quantize.quantize_parts import DRAFT, quantize, request, write_text
from tests.support.gguf_writer import from_folder
from tests.support.running_server import run_command
from tests.support.warm_python import Ended

from headrace_quantize import run as quantize_run
from headrace_quantize.checks import QuantizeRefused, check
from headrace_quantize.config import QuantizeConfig
from headrace_quantize.main import main as quantize_main
from headrace_quantize.output_folder import OutputFolder
from headrace_supervisor import quantize_command
from headrace_supervisor.quantize_command import check_device
from headrace_supervisor.quantize_command import request as parsed


def headrace(*arguments: object) -> Ended:
    return run_command(*arguments, COLUMNS="120")


def run_here(config: QuantizeConfig, folder: pathlib.Path) -> int:
    """The exit code of the process that quantizes, run in this one."""
    file = folder / "request.json"
    file.write_text(config.model_dump_json(exclude_unset=True))
    return quantize_main(["--config-json", str(file)])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_text(tmp_path_factory.mktemp("text"))


def refused(tmp_path: pathlib.Path, **flags: Any) -> str:
    """What flags are answered with, in this process."""
    with pytest.raises(QuantizeRefused) as found:
        check(parsed({"model_folder": str(DRAFT), "out_folder": str(tmp_path / "out"), **flags}))
    message = str(found.value)
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    return message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"bits": "3"}, "--bits: must be one of 4, 8, is 3"),
        ({"group_size": "48"}, "--group-size: must be one of 32, 64, 128, channel, is 48"),
        ({"method": "awf"}, "--method: must be one of rtn, gptq, awq, is awf"),
        ({"samples": "0"}, "--samples: must be at least 1, is 0"),
        ({"samples": "many"}, "--samples: must be a whole number, is many"),
        ({"damping": "0"}, "--damping: must be more than 0, is 0"),
        ({"device": "tpu"}, "--device: must be one of auto, cpu, cuda, is tpu"),
        ({"method": "gptq"}, "--method gptq needs --calibration TEXT_FILE"),
        ({}, "--method gptq needs --calibration TEXT_FILE"),
        ({"method": "awq", "act_order": True, "calibration": ("a",)}, "--act-order goes with --method gptq"),
        ({"method": "rtn", "damping": "0.02"}, "--damping goes with --method gptq"),
        ({"method": "rtn", "samples": "128"}, "--samples goes with --calibration"),
        ({"method": "rtn", "samples": "8", "evaluation": "a"}, "--samples goes with --calibration"),
        ({"method": "rtn", "sequence_length": "512"}, "--sequence-length goes with --calibration or --evaluation"),
        ({"method": "rtn", "clip": False}, "--clip goes with --method awq"),
        ({"scheme": "fp8", "calibration": ("a",)}, "--scheme fp8 goes with --method rtn"),
        ({"scheme": "fp8", "method": "rtn", "bits": "4"}, "--scheme fp8 has 8 bits"),
        ({"scheme": "fp8", "method": "rtn", "group_size": "64"}, "--scheme fp8 goes with --group-size channel"),
        ({"scheme": "fp8", "method": "rtn", "symmetric": False}, "--scheme fp8 has no zero points"),
        ({"method": "rtn"}, (
            "--group-size is 128, which does not divide the 352 inputs of model.layers.0.mlp.down_proj; --group-size "
            "32 works"
        )),
        ({"method": "rtn", "group_size": "32", "keep": ("donw_proj",)},
         "--keep donw_proj fits no layer; the nearest name is down_proj"),
        ({"method": "rtn", "group_size": "32", "keep": ("*",)},
         "--keep fits all 14 layers, so that nothing would be quantized"),
        ({"method": "rtn", "group_size": "32", "sequence_length": "4096", "calibration": ("a",)},
         "--sequence-length is 4096, the model's context has 2048 tokens"),
        ({"group_size": "32", "calibration": ("absent.txt",)}, "--calibration: no file absent.txt"),
        ({"method": "rtn", "group_size": "32", "evaluation": "absent.txt"}, "--evaluation: no file absent.txt"),
        ({"method": "rtn", "model_folder": "absent"}, "MODEL_FOLDER: absent: no such model folder"),
        ({"method": "rtn", "group_size": "32", "out_folder": str(DRAFT / "sub")}, "lies in MODEL_FOLDER"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_rule(tmp_path: pathlib.Path, flags: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, **flags)


@pytest.mark.parametrize("flag", ["calibration", "evaluation"])
def test_an_empty_text_is_refused_before_torch_is_loaded(tmp_path: pathlib.Path, flag: str) -> None:
    (tmp_path / "empty.txt").touch()
    file = str(tmp_path / "empty.txt")
    given = {flag: (file,) if flag == "calibration" else file}
    assert refused(tmp_path, method="rtn", group_size="32", **given) == f"--{flag}: {file} is empty"


def test_a_keep_that_takes_out_what_groups_do_not_divide_makes_it_possible(tmp_path: pathlib.Path) -> None:
    flags = {"model_folder": str(DRAFT), "out_folder": str(tmp_path / "out"), "method": "rtn", "keep": ("down_proj",)}
    job = check(parsed(flags))
    assert len(job.quantized) == 12 and len(job.kept) == 2


def test_a_folder_that_is_quantized_already_is_refused(tmp_path: pathlib.Path) -> None:
    quantize(request(DRAFT, tmp_path / "once", method="rtn"))
    message = refused(tmp_path, model_folder=str(tmp_path / "once"), method="rtn", group_size="32")
    assert "is quantized already: config.json has a quantization_config" in message


def test_a_gguf_file_is_refused(tmp_path: pathlib.Path) -> None:
    file = from_folder(DRAFT, "Q8_0")[0].write(tmp_path / "small.gguf")
    message = refused(tmp_path, model_folder=str(file), method="rtn", group_size="32")
    assert "small.gguf is a GGUF file, whose weights have their own bits: a folder is needed" in message


def test_a_folder_in_use_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    flags = {"model_folder": str(DRAFT), "out_folder": str(tmp_path / "out"), "method": "rtn", "group_size": "32"}
    for resume in (False, True):
        with pytest.raises(QuantizeRefused, match="is not empty"):
            check(parsed({**flags, "resume": resume}))
    flags["out_folder"] = str(tmp_path / "out" / "notes.txt")
    with pytest.raises(QuantizeRefused, match="is not a folder"):
        check(parsed(flags))


def test_a_folder_that_can_not_be_made_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    options = {"method": "rtn", "group_size": "32"}
    assert f"{tmp_path}/file is not a folder" in refused(tmp_path, out_folder=str(tmp_path / "file" / "o"), **options)
    # Root may write where others may not, so that the system's answer is given here.
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert f"{tmp_path} can't be written" in refused(tmp_path, out_folder=str(tmp_path / "a" / "b"), **options)


def test_a_gpu_is_refused_where_no_driver_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_backend.start_rules._DRIVERS", (tmp_path / "none",))
    with pytest.raises(QuantizeRefused, match="--device is 'cuda': this machine has no NVIDIA driver"):
        check_device(parsed({"model_folder": "m", "out_folder": "o", "method": "rtn", "device": "cuda"}))
    check_device(parsed({"model_folder": "m", "out_folder": "o", "method": "rtn"}))


def test_text_needs_a_tokenizer(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    write_checkpoint(tmp_path / "model", "llama")
    message = refused(tmp_path, model_folder=str(tmp_path / "model"), calibration=(str(text),), group_size="channel")
    assert "has no tokenizer.json, which --calibration and --evaluation need" in message


def test_help_names_every_option() -> None:
    shown = headrace("quantize", "--help").stdout
    fields = quantize_command.QuantizeConfig.model_fields
    assert all("--" + name.replace("_", "-") in shown for name in fields if not name.endswith("_folder"))
    assert "--asymmetric" in shown and "--no-clip" in shown


def test_a_mistake_ends_with_2_before_torch_is_loaded(tmp_path: pathlib.Path) -> None:
    result = headrace("quantize", DRAFT, tmp_path / "out", "--bits", "5")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "headrace: --bits: must be one of 4, 8, is 5\n"


def test_a_run_ends_with_a_table(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    flags = [
        "--group-size",
        "32",
        "--samples",
        "8",
        "--sequence-length",
        "64",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--act-order",
    ]
    result = headrace("quantize", DRAFT, tmp_path / "out", "--calibration", text, *flags)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 layers" in result.stderr
    report = json.loads((tmp_path / "out" / "quantization-report.json").read_text())
    for shown in (
        f"{report['quality']['divergence']:.5f}",
        f"{report['quality']['perplexity_after']:.4f}",
        f"{report['layers'][1]['worst']['error']:.2%}",
        "gptq int4, groups of 32, symmetric, ordered by activations",
        "peak memory",
    ):
        assert shown in result.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["actorder"] == "weight"


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupted_run_says_what_it_leaves(
    tmp_path: pathlib.Path, is_begun: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = request(DRAFT, tmp_path / "out", method="rtn")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((OutputFolder, "finish") if is_begun else (quantize_run, "SourceTensors")), interrupted)
    assert run_here(config, tmp_path) == 130
    [line] = [line for line in capsys.readouterr().err.splitlines() if "interrupted" in line]
    assert ("--resume goes on" in line) == is_begun and ("nothing was written" in line) != is_begun
    monkeypatch.undo()
    assert not (tmp_path / "out" / "config.json").exists()
    quantize(config.model_copy(update={"resume": is_begun}))


def test_text_that_is_too_short_ends_with_2(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    config = request(DRAFT, tmp_path / "out", calibration=(str(tmp_path / "short.txt"),), sequence_length=512)
    assert run_here(config, tmp_path) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "--calibration has text for 0 samples of 512 tokens" in line


def test_a_finished_run_is_left_as_it_is(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = request(DRAFT, tmp_path / "out", method="rtn")
    quantize(config)
    assert run_here(config.model_copy(update={"resume": True}), tmp_path) == 0
    assert "is finished" in capsys.readouterr().err
