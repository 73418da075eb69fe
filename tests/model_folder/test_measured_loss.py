"""quantization-report.json.

What is read of it, and that one which is not valid, or another folder's, is refused by name and
rule.
"""

from __future__ import annotations

import copy
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.model_folder.folders import CONFIG, write_folder, write_safetensors

from headrace_model_folder import InvalidModelFolder, MeasuredLoss, ModelFolder, expected_tensors, read_measured_loss
from headrace_model_folder.config import parse_config
from headrace_model_folder.measured_loss import REPORT_FILE

KEPT = "model.layers.0.self_attn.v_proj"
SIZES = {**CONFIG, "hidden_size": 32, "intermediate_size": 64}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", KEPT],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    },
}
QUALITY = {
    "tokens": 504,
    "perplexity_before": 3.174,
    "perplexity_after": 3.2008,
    "divergence": 0.00538,
    "same_choice": 0.9378,
    "surprise_change": 0.0084,
    "surprise_change_interval": 0.0018,
    "divergence_interval": 0.00084,
}
LOSS = MeasuredLoss("gptq", 504, 3.174, 3.2008, 0.00538, 0.00084)
Report = dict[str, Any]


def write_quantized(path: pathlib.Path) -> ModelFolder:
    """A folder of 4 bits in groups of 32, one of its projections kept, without a report."""
    write_folder(path, {**SIZES, "quantization_config": QUANTIZATION})
    config = parse_config({**SIZES, "quantization_config": QUANTIZATION})
    assert config.quantization is not None
    header, offset = {}, 0
    for name, shape in expected_tensors(config).items():
        form = config.quantization.layers.get(name.removesuffix(".weight"))
        parts = form.tensors(*shape) if form else ()
        stored = {f"{name.removesuffix('weight')}{part.suffix}": (part.shapes[0], part.dtypes[-1]) for part in parts}
        for tensor, (extents, dtype) in (stored or {name: (shape, "F32")}).items():
            size = 4 * math.prod(extents)
            header[tensor] = {"dtype": dtype, "shape": list(extents), "data_offsets": [offset, offset + size]}
            offset += size
    write_safetensors(path / "model.safetensors", header, offset)
    return ModelFolder.open(path)


def valid_report(folder: ModelFolder) -> Report:
    """What `headrace quantize` would have left in it."""
    assert folder.config.quantization is not None
    layers: list[Report] = [{"layer": f"model.layers.{index}", "errors": {}} for index in range(2)]
    for name in folder.config.quantization.layers:
        layers[int(name.split(".")[2])]["errors"][name] = 0.1
    return {
        "scheme": "gptq int4, groups of 32, symmetric, ordered by activations, 1 projections kept",
        "bytes_after": sum(record.num_bytes for record in folder.tensors.values()),
        # 4 bits, a scale of 32 for 32 weights, and the shape: 2 numbers of 32 bits.
        "bits_per_weight": _bits(folder),
        "layers": layers,
        "quality": dict(QUALITY),
        "calibration_tokens": 4096,
    }


def _bits(folder: ModelFolder) -> float:
    assert folder.config.quantization is not None
    layers, shapes = folder.config.quantization.layers, expected_tensors(folder.config)
    weights = [math.prod(shapes[f"{name}.weight"]) for name in layers]
    return sum(5 * count + 64 for count in weights) / sum(weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return write_quantized(tmp_path_factory.mktemp("models") / "quantized")


def read(folder: ModelFolder, report: Report | bytes) -> MeasuredLoss | None:
    data = report if isinstance(report, bytes) else json.dumps(report).encode()
    (folder.path / REPORT_FILE).write_bytes(data)
    return read_measured_loss(folder)


def refusal(folder: ModelFolder, report: Report | bytes) -> str:
    with pytest.raises(InvalidModelFolder) as found:
        read(folder, report)
    message = str(found.value)
    assert message.startswith(f"{REPORT_FILE}: ") and len(message) < 500 and message.isprintable()
    # The folder is as good as before.
    assert ModelFolder.open(folder.path).revision == folder.revision
    return message


def test_a_valid_report_is_returned(folder: ModelFolder) -> None:
    assert read(folder, valid_report(folder)) == LOSS


def test_a_text_of_one_piece_has_no_interval(folder: ModelFolder) -> None:
    report = valid_report(folder)
    report["quality"]["divergence_interval"] = None
    loss = read(folder, report)
    assert loss is not None and loss.divergence_interval is None
    del report["quality"]["divergence_interval"]
    assert read(folder, report) == loss


def test_a_divergence_that_rounding_put_below_0_is_0(folder: ModelFolder) -> None:
    report = valid_report(folder)
    report["quality"]["divergence"] = -3e-9
    loss = read(folder, report)
    assert loss is not None and loss.divergence == 0.0


def test_nothing_is_returned_where_nothing_was_measured(folder: ModelFolder, tmp_path: pathlib.Path) -> None:
    assert read(folder, {**valid_report(folder), "quality": None}) is None
    (folder.path / REPORT_FILE).unlink()
    assert read_measured_loss(folder) is None
    assert read_measured_loss(ModelFolder.open(write_folder(tmp_path / "plain"))) is None


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("tokens", 0, "must be an integer from 1 to"),
        ("tokens", 1 << 60, "must be an integer from 1 to"),
        ("tokens", 10**4000, "must be an integer from 1 to"),
        ("tokens", True, "must be an integer from 1 to"),
        ("perplexity_before", 0.99, "must be a number from 1 to"),
        ("perplexity_before", "3.2", "must be a number from 1 to"),
        ("perplexity_after", -3.2, "must be a number from 1 to"),
        ("perplexity_after", 1e300, "must be a number from 1 to"),
        ("perplexity_after", None, "is missing"),
        ("divergence", -0.001, "must be a number from -1e-06 to 64"),
        ("divergence", 65, "must be a number from -1e-06 to 64"),
        ("divergence", [0.1], "must be a number from -1e-06 to 64"),
        ("divergence_interval", -0.001, "must be a number from 0 to 64"),
        ("divergence_interval", {}, "must be a number from 0 to 64"),
    ],
)
def test_a_figure_out_of_bounds_is_named_with_its_rule(
    folder: ModelFolder, field: str, value: object, rule: str
) -> None:
    report = valid_report(folder)
    report["quality"][field] = value
    assert f"quality: {field} {rule}" in refusal(folder, report)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused(folder: ModelFolder, constant: str) -> None:
    text = json.dumps(valid_report(folder)).replace("0.00538", constant)
    assert "JSON value" in (message := refusal(folder, text.encode())) or "divergence must be" in message


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "a JSON object was expected"),
        (b'{"scheme": "gp', "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"quality": 1, "quality": 2}', "occurs twice"),
        (b" " * ((8 << 20) + 1), "at most 8388608 are read"),
        (b"{}", "scheme is missing"),
        (b'{"scheme": 4}', "scheme must be a string"),
        # Of a tool that calls its file the same.
        (b'{"model": "some", "quantization": {"bits": 4}, "ppl": 5.1}', "scheme is missing"),
        (b'{"scheme": "W4A16"}', "scheme must begin with one of rtn, gptq, awq, is 'W4A16'"),
    ],
)
def test_what_is_no_such_report_is_refused(folder: ModelFolder, data: bytes, rule: str) -> None:
    assert rule in refusal(folder, data)


def _rename(report: Report) -> None:
    errors = report["layers"][1]["errors"]
    errors["model.layers.1.mlp.other_proj"] = errors.pop("model.layers.1.mlp.up_proj")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda r: r.update(scheme="gptq int8, groups of 32, symmetric"),
         "config.json has int4, groups of 32, symmetric for"),
        (lambda r: r.update(scheme="gptq int4, groups of 64, symmetric"),
         "config.json has int4, groups of 32, symmetric for"),
        (lambda r: r.update(scheme="gptq int4, groups of 32, with zero points"),
         "config.json has int4, groups of 32, symmetric for"),
        (lambda r: r.update(scheme="gptq"), "config.json has int4, groups of 32, symmetric for"),
        (lambda r: r.update(bytes_after=r["bytes_after"] + 1), "bytes_after is"),
        (lambda r: r.update(bits_per_weight=4.5), "bits_per_weight is 4.5, the folder's tensors have 5.0"),
        (lambda r: r.update(bits_per_weight=-1), "bits_per_weight must be a number from 0 to 64"),
        (lambda r: r["layers"].pop(), "layers must be a list of 2 layers, is a list of 1 entries"),
        (lambda r: r.update(layers={}), "layers must be a list of 2 layers, is a dict of 0 entries"),
        (lambda r: r["layers"].__setitem__(1, 3), "the one of layer 1 has none"),
        (lambda r: r["layers"][0].update(errors=[]), "the one of layer 0 has none"),
        (_rename, "'model.layers.1.mlp.other_proj' is in the report only"),
        (lambda r: r["layers"][0]["errors"].update({KEPT: 0.1}), f"'{KEPT}' is in the report only"),
        (lambda r: r["layers"][1]["errors"].pop("model.layers.1.mlp.up_proj"),
         "'model.layers.1.mlp.up_proj' is in config.json only"),
        (lambda r: r.pop("quality"), "quality is missing"),
        (lambda r: r.update(quality=[]), "quality must be an object or null, is a list of 0 entries"),
    ],
)  # fmt: skip
def test_what_contradicts_the_folder_is_refused(
    folder: ModelFolder, change: Callable[[Report], object], rule: str
) -> None:
    report = valid_report(folder)
    change(report)
    assert rule in refusal(folder, report)


def test_a_folder_that_nobody_quantized_has_no_such_report(folder: ModelFolder, tmp_path: pathlib.Path) -> None:
    plain = ModelFolder.open(write_folder(tmp_path / "plain"))
    assert "config.json has no quantization, not compressed-tensors" in refusal(plain, valid_report(folder))


def test_what_is_no_file_inside_the_folder_is_refused(tmp_path: pathlib.Path) -> None:
    folder = write_quantized(tmp_path / "model")
    path = folder.path / REPORT_FILE
    (tmp_path / "outside.json").write_text(json.dumps(valid_report(folder)))
    for make, rule in (
        (lambda: path.mkdir(), "is not a regular file"),
        (lambda: path.symlink_to(tmp_path / "outside.json"), "leads out of the model folder"),
        (lambda: path.symlink_to(path), "can't be"),
    ):
        make()
        with pytest.raises(InvalidModelFolder, match=rule):
            read_measured_loss(folder)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


# Anything that JSON can hold, and what Python writes though JSON can't.
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_PLACES = st.sampled_from(
    [("scheme",), ("bytes_after",), ("bits_per_weight",), ("layers",), ("layers", 0)]
    + [("layers", 1, "errors"), ("quality",)]
    + [("quality", field) for field in QUALITY]
)  # fmt: skip


def replaced(report: Report, place: tuple[Any, ...], value: object) -> Report:
    found = copy.deepcopy(report)
    inner: Any = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=_PLACES, value=_VALUES)
def test_whatever_stands_in_a_report_what_is_returned_is_valid(
    folder: ModelFolder, place: tuple[Any, ...], value: object
) -> None:
    _check_valid_or_refused(folder, json.dumps(replaced(valid_report(folder), place, value)).encode())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_whatever_bytes_are_damaged_what_is_returned_is_valid(folder: ModelFolder, data: st.DataObject) -> None:
    whole = json.dumps(valid_report(folder)).encode()
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, min(begin + 20, len(whole))))
    _check_valid_or_refused(folder, whole[:begin] + data.draw(st.binary(max_size=20)) + whole[end:])


def _check_valid_or_refused(folder: ModelFolder, data: bytes) -> None:
    try:
        loss = read(folder, data)
    except InvalidModelFolder as error:
        assert str(error).startswith(f"{REPORT_FILE}: ") and len(str(error)) < 500
        return
    if loss is None:
        return
    assert loss.method in ("rtn", "gptq", "awq") and type(loss.tokens) is int and 1 <= loss.tokens < 1 << 63
    assert all(1 <= value < 1e28 for value in (loss.perplexity_before, loss.perplexity_after))
    assert 0 <= loss.divergence <= 64
    assert loss.divergence_interval is None or 0 <= loss.divergence_interval <= 64
