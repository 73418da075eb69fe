"""Whole runs on the demo's draft model.

What is written, how good it is, what is kept, runs that are killed.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.models.checkpoints import write_checkpoint
from tests.quantize.dequantized_folder import Tensors, dequantized, tensors_in, transformers_model
from tests.quantize.quantize_parts import DRAFT, quantize, request, write_text

from headrace_model_folder import ModelFolder
from headrace_quantize.checks import QuantizeRefused, check
from headrace_quantize.output_folder import OutputFolder
from headrace_quantize.progress import RunProgress
from headrace_quantize.report import RunReport
from headrace_quantize.rounding.numbers import NumberFormat
from headrace_quantize.run import Run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("text"), 400))


@torch.no_grad()
def divergence_by_transformers(original: pathlib.Path, weights: Tensors, pieces: list[list[int]]) -> float:
    """What the report says, computed by another implementation from what lies in the folder."""
    ids = torch.tensor(pieces)
    before = transformers_model(original, None)(ids).logits[:, :-1]
    after = transformers_model(original, weights)(ids).logits[:, :-1]
    wanted, found = before.log_softmax(-1), after.log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.fixture(scope="module")
def reports(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[pathlib.Path, RunReport]]:
    found = {}
    for method in ("rtn", "gptq", "awq"):
        out = tmp_path_factory.mktemp(method) / "out"
        found[method] = out, quantize(request(DRAFT, out, method=method, calibration=(text,), samples=64))
    return found


@pytest.mark.slow  # Layers alone: tests/quantize/test_gptq.py and test_awq.py.
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibration_beats_rounding_on_text_that_it_did_not_see(
    reports: dict[str, tuple[pathlib.Path, RunReport]], method: str
) -> None:
    better, plain = reports[method][1].quality, reports["rtn"][1].quality
    assert better is not None and plain is not None
    # Found: 0.5 (gptq) and 0.7 (awq) of it.
    assert better.divergence < 0.85 * plain.divergence
    assert better.tokens == plain.tokens and better.perplexity_before == plain.perplexity_before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_the_report_says_what_transformers_finds(
    reports: dict[str, tuple[pathlib.Path, RunReport]], text: str, method: str, tmp_path: pathlib.Path
) -> None:
    out, report = reports[method]
    job = check(request(DRAFT, tmp_path, method=method, calibration=(text,), samples=64))
    run = Run(job, RunProgress(2))
    found = divergence_by_transformers(
        DRAFT, dequantized(out, NumberFormat(4, True, False, torch.float32)), run.held_out
    )
    assert report.quality is not None
    assert found == pytest.approx(report.quality.divergence, rel=1e-3)


def test_a_finished_folder_is_a_model_with_a_report(reports: dict[str, tuple[pathlib.Path, RunReport]]) -> None:
    out, report = reports["gptq"]
    files = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} < files
    assert not [name for name in files if "partial" in name or "state" in name]
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (out, DRAFT))
    quantization = config.pop("quantization_config")
    assert config == before
    assert quantization["ignore"] == ["lm_head"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, True)
    saved = json.loads((out / "quantization-report.json").read_text())
    assert saved["quality"]["divergence"] == report.quality.divergence  # type: ignore[union-attr]
    assert saved["bytes_after"] == sum(tensor.nbytes for tensor in tensors_in(out).values())
    assert saved["bytes_before"] == sum(record.num_bytes for record in ModelFolder.open(DRAFT).tensors.values())
    # 4 bits, a scale of 16 for 32 weights, and the shape.
    assert 4.5 < saved["bits_per_weight"] < 4.6
    assert len(saved["layers"]) == 2
    worst = saved["layers"][0]["worst"]
    assert worst["error"] == max(saved["layers"][0]["errors"].values()) > 0


FORMATS: dict[str, tuple[dict[str, Any], NumberFormat]] = {
    "int8": ({"bits": 8, "group_size": "channel"}, NumberFormat(8, True, False, torch.float32)),
    "int8 in groups": ({"bits": 8, "group_size": 32}, NumberFormat(8, True, False, torch.float32)),
    "int4 with zeros": ({"symmetric": False}, NumberFormat(4, False, False, torch.float32)),
    "int4 channel": ({"group_size": "channel", "symmetric": False}, NumberFormat(4, False, False, torch.float32)),
    "fp8": ({"scheme": "fp8", "group_size": None}, NumberFormat(8, True, True, torch.float32)),
}
# Of a weight's largest error to the range of its row: half a step, and the rounding of scale and
# zero point.
_RANGE_SHARES = {4: 0.07, 8: 0.005}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen3-tied-bias", "llama-wide"])
def test_every_format_is_near_the_original_without_text(tmp_path: pathlib.Path, name: str, family: str) -> None:
    options, form = FORMATS[name]
    if family == "qwen3-tied-bias" and options.get("group_size", 32) == 32:
        options = {**options, "keep": ("down_proj",)}
    write_checkpoint(tmp_path / "model", family)
    report = quantize(request(tmp_path / "model", tmp_path / "out", method="rtn", **options))
    assert report.quality is None and report.calibration_tokens == 0
    before = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    after = dequantized(tmp_path / "out", form)
    assert after.keys() == before.keys() - {"lm_head.weight"} | ({"lm_head.weight"} & after.keys())
    for tensor, weight in before.items():
        if tensor not in after:
            continue
        spread = (weight.amax(-1) - weight.amin(-1)).unsqueeze(-1) if weight.dim() == 2 else weight.new_zeros(())
        share = 0.04 if form.is_float else _RANGE_SHARES[form.bits]
        assert ((after[tensor].float() - weight).abs() <= spread * share).all(), tensor


def test_layers_that_are_kept_keep_their_bytes(tmp_path: pathlib.Path, text: str) -> None:
    keep = ("model.layers.0.*", "down_proj")
    report = quantize(request(DRAFT, tmp_path / "out", method="gptq", calibration=(text,), keep=keep))
    before, after = safetensors.torch.load_file(DRAFT / "model.safetensors"), tensors_in(tmp_path / "out")
    kept = [name for name in before if name.startswith("model.layers.0.") or "down_proj" in name or "norm" in name]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignored and "model.layers.1.mlp.down_proj" in ignored
    assert len(ignored) == 1 + 7 + 1
    assert report.layers[0].hidden_error == 0.0 and report.layers[0].worst == ("", 0.0)


def test_a_scaled_layer_that_is_kept_still_fits(tmp_path: pathlib.Path, text: str) -> None:
    """AWQ folds scales into what it keeps, too, where the two belong together."""
    keep = ("k_proj", "gate_proj")
    report = quantize(
        request(DRAFT, tmp_path / "out", method="awq", calibration=(text,), keep=keep, bits=8, group_size="channel")
    )
    assert report.quality is not None and report.quality.divergence < 0.01
    before, after = safetensors.torch.load_file(DRAFT / "model.safetensors"), tensors_in(tmp_path / "out")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert after[name].dtype == before[name].dtype


def fingerprints(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "quantization-report.json"}


def descriptors_of(folder: pathlib.Path) -> int:
    """How many files of a folder this process has open."""
    return sum(link.resolve().is_relative_to(folder) for link in pathlib.Path("/proc/self/fd").iterdir())


# What failed and went on is kept by layer, whatever rounds it; rounding alone takes the least time.
@pytest.mark.parametrize("method", ["rtn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gptq", "awq"))])
def test_a_run_that_failed_goes_on_to_the_same_bytes(
    tmp_path: pathlib.Path, text: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(request(DRAFT, tmp_path / "whole", method=method, calibration=(text,)))
    write = OutputFolder.write

    def full_disk(self: OutputFolder, index: int, *arguments: Any) -> None:
        if index == 2:
            raise OSError(28, "No space left on device")
        write(self, index, *arguments)

    monkeypatch.setattr(OutputFolder, "write", full_disk)
    before = descriptors_of(DRAFT)
    with pytest.raises(OSError, match="No space left"):
        quantize(request(DRAFT, tmp_path / "broken", method=method, calibration=(text,)))
    assert descriptors_of(DRAFT) == before
    monkeypatch.undo()
    with pytest.raises(QuantizeRefused, match="--resume goes on"):
        quantize(request(DRAFT, tmp_path / "broken", method=method, calibration=(text,)))
    report = quantize(request(DRAFT, tmp_path / "broken", method=method, calibration=(text,), resume=True))
    assert fingerprints(tmp_path / "broken") == fingerprints(tmp_path / "whole")
    saved = json.loads((tmp_path / "whole" / "quantization-report.json").read_text())
    again = json.loads(json.dumps(report.as_json()))
    assert {key: again[key] for key in ("quality", "layers")} == {key: saved[key] for key in ("quality", "layers")}


class _DeathError(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A request of little work, and the files of its folder."""
    root = tmp_path_factory.mktemp("short")
    options: dict[str, Any] = {"method": "rtn", "calibration": (str(write_text(root, 8)),), "samples": 1}
    quantize(request(DRAFT, root / "whole", **options))
    return options, fingerprints(root / "whole")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("moment", range(1, 15))
def test_a_run_that_ends_before_any_of_its_files_is_there_goes_on(
    tmp_path: pathlib.Path,
    short_run: tuple[dict[str, Any], dict[str, bytes]],
    moment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are renamed into place: state, shard, state, ..., index, copies, config, report."""
    options, expected = short_run
    rename, calls = os.replace, 0

    def dying(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            raise _DeathError
        rename(*arguments)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(_DeathError):
        quantize(request(DRAFT, tmp_path / "out", **options))
    monkeypatch.undo()
    assert not (tmp_path / "out" / "quantization-report.json").exists()
    quantize(request(DRAFT, tmp_path / "out", resume=True, **options))
    assert fingerprints(tmp_path / "out") == expected


# Runs that failed half-way go on in the test above.
@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: pathlib.Path, text: str) -> None:
    config = request(DRAFT, tmp_path / "killed", method="gptq", calibration=(text,))
    file = tmp_path / "request.json"
    file.write_text(config.model_dump_json(exclude_unset=True))
    # The sixth file is the second layer's shard: its bytes are on the disk, its name is not.
    killed = subprocess.run(
        [sys.executable, "-c", _ENTRY.format(paths=sys.path, moment=6), "--config-json", file], check=False, timeout=600
    )
    assert killed.returncode == -signal.SIGKILL
    names = {path.name for path in (tmp_path / "killed").iterdir()}
    assert "model-00003-of-00004.safetensors.partial" in names and "config.json" not in names
    quantize(config.model_copy(update={"resume": True}))
    quantize(request(DRAFT, tmp_path / "whole", method="gptq", calibration=(text,)))
    assert fingerprints(tmp_path / "killed") == fingerprints(tmp_path / "whole")


_ENTRY = """
import os, signal, sys
sys.path[:0] = {paths!r}
from headrace_quantize.main import main
calls, rename = 0, os.replace
def replace(*arguments):
    global calls
    calls += 1
    if calls == {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*arguments)
os.replace = replace
sys.exit(main(sys.argv[1:]))
"""


def test_another_command_with_the_same_folder_is_refused(
    reports: dict[str, tuple[pathlib.Path, RunReport]], text: str
) -> None:
    out, _ = reports["rtn"]
    same = request(DRAFT, out, method="rtn", calibration=(text,), samples=64)
    with pytest.raises(QuantizeRefused, match="finished run"):
        quantize(same)
    other = same.model_copy(update={"resume": True, "bits": 8})
    with pytest.raises(QuantizeRefused, match="another command: bits was 4, is 8"):
        quantize(other)


def test_a_shard_that_changed_is_not_built_on(
    tmp_path: pathlib.Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"method": "rtn", "calibration": (text,)}
    monkeypatch.setattr(OutputFolder, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantize(request(DRAFT, tmp_path / "out", **options))
    monkeypatch.undo()
    shard = tmp_path / "out" / "model-00002-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(QuantizeRefused, match="model-00002-of-00004.safetensors is not what was written"):
        quantize(request(DRAFT, tmp_path / "out", resume=True, **options))


def test_text_that_a_model_overflows_on_is_refused_by_layer(tmp_path: pathlib.Path, text: str) -> None:
    original = safetensors.torch.load_file(DRAFT / "model.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        (model / file).write_bytes((DRAFT / file).read_bytes())
    name = "model.layers.0.mlp.gate_proj.weight"
    original[name] = torch.full_like(original[name], 3e38)
    safetensors.torch.save_file(original, model / "model.safetensors")
    with pytest.raises(QuantizeRefused, match=r"inputs of model\.layers\.0\.mlp\.down_proj are not finite"):
        quantize(request(model, tmp_path / "out", method="gptq", calibration=(text,)))
