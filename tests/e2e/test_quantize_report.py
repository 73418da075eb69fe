"""A folder of `headrace quantize`, served.

GetModel says what was lost by the folder's report; a report of another folder is ignored with one
warning.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from tests.quantize.quantize_parts import DRAFT, quantize, request, write_text
from tests.support.rpc import connected, generate, greedy
from tests.support.running_server import RunningServer, running_server

from headrace.v1 import inference_pb2
from headrace_model_folder import MeasuredLoss, ModelFolder, read_measured_loss

REPORT_FILE = "quantization-report.json"
SETTINGS = ("--device", "cpu", "--num-blocks", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    base = tmp_path_factory.mktemp("quantized")
    quantize(request(DRAFT, base / "out", calibration=(str(write_text(base)),), samples=8))
    return base / "out"


def quantization(server: RunningServer) -> inference_pb2.Quantization:
    with connected(server.address) as stub:
        return stub.GetModel(inference_pb2.GetModelRequest()).model.quantization


# The report is read back below, and what a service makes of it is in tests/service.
@pytest.mark.slow
def test_the_model_says_what_its_report_says_was_lost(folder: pathlib.Path) -> None:
    quality: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text())["quality"]
    with running_server(*SETTINGS, model=folder) as server:
        report = quantization(server)
        assert not [line for line in server.lines if "warning" in line]
    assert (report.scheme, report.group_size, report.HasField("measured")) == ("compressed-tensors int4", 32, True)
    measured = report.measured
    assert measured.method == "gptq"
    fields = [field.name for field in measured.DESCRIPTOR.fields if field.name != "method"]
    assert {name: getattr(measured, name) for name in fields} == {name: quality[name] for name in fields}
    assert measured.tokens > 100 and measured.perplexity_before > 1 and 0 < measured.divergence < 1
    assert 0 < measured.divergence_interval < measured.divergence


# What contradicts its folder is refused by the reader in tests/model_folder/test_measured_loss.
@pytest.mark.slow
def test_another_folders_report_is_let_be_with_one_warning(folder: pathlib.Path) -> None:
    whole = (folder / REPORT_FILE).read_text()
    (folder / REPORT_FILE).write_text(whole.replace("groups of 32", "groups of 64"))
    try:
        with running_server(*SETTINGS, model=folder) as server:
            report = quantization(server)
            assert generate(server.address, greedy([5, 6, 7], 4)).done is not None
            warnings = [line for line in server.lines if REPORT_FILE in line]
    finally:
        (folder / REPORT_FILE).write_text(whole)
    assert (report.scheme, report.HasField("measured")) == ("compressed-tensors int4", False)
    assert len(warnings) == 1 and "warning" in warnings[0]
    assert "scheme is 'gptq int4, groups of 64, symmetric', config.json has int4, groups of 32" in warnings[0]


# What `headrace quantize` says of a run is what is looked for when its report is read.
@pytest.mark.parametrize(
    ("options", "has_text"),
    [
        ({"method": "rtn"}, False),
        ({"method": "rtn", "scheme": "fp8", "group_size": None}, True),
        ({"method": "rtn", "bits": 8, "group_size": None}, True),
        ({"method": "awq", "symmetric": False, "keep": ("down_proj",)}, True),
        ({"method": "gptq", "act_order": True, "keep": ("model.layers.0.*",)}, True),
    ],
)
def test_every_report_that_is_written_is_read(tmp_path: pathlib.Path, options: dict[str, Any], has_text: bool) -> None:
    text: dict[str, Any] = {"calibration": (str(write_text(tmp_path)),), "samples": 8} if has_text else {}
    quality = quantize(request(DRAFT, tmp_path / "out", **text, **options)).quality
    loss = read_measured_loss(ModelFolder.open(tmp_path / "out"))
    if quality is None:
        assert not has_text and loss is None
        return
    before, after = quality.perplexity_before, quality.perplexity_after
    figures = (quality.tokens, before, after, quality.divergence, quality.divergence_interval)
    assert loss == MeasuredLoss(options["method"], *figures)
