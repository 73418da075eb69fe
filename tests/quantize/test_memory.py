"""One decoder layer's weights at a time, and the text on the host."""

from __future__ import annotations

import gc
import pathlib
import weakref

import pytest
import torch
from tests.quantize.quantize_parts import LENGTH, quantize, request, write_text
from tests.quantize.wide_model import write_model

from headrace_quantize.decoder_pass import DecoderPass, LoadedLayer


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_layer_is_gone_before_the_next_is_loaded(
    tmp_path: pathlib.Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector, which nobody may wait for: a layer in a cycle would stay."""
    loaded: list[weakref.ref[torch.nn.Module]] = []
    load = DecoderPass.load

    def counting(self: DecoderPass, index: int) -> LoadedLayer:
        assert [one() for one in loaded] == [None] * index
        layer = load(self, index)
        loaded.append(weakref.ref(layer.module))
        return layer

    model = write_model(tmp_path / "model", num_layers=4)
    text = str(write_text(tmp_path, 60))
    monkeypatch.setattr(DecoderPass, "load", counting)
    gc.collect()
    gc.disable()
    try:
        quantize(request(model, tmp_path / "out", method=method, calibration=(text,), samples=4))
    finally:
        gc.enable()
    assert len(loaded) == 4 and loaded[-1]() is None


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_card_finds_what_a_cpu_finds(tmp_path: pathlib.Path, method: str) -> None:
    model = write_model(tmp_path / "model", num_layers=3)
    text = str(write_text(tmp_path, 100))
    found = {}
    for device in ("cpu", "cuda"):
        options = {"method": method, "calibration": (text,), "device": device, "sequence_length": LENGTH}
        found[device] = quantize(request(model, tmp_path / device, **options))
    ours, theirs = found["cuda"], found["cpu"]
    assert ours.peak_card_bytes > 0 and theirs.peak_card_bytes == 0
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        # bf16 on a card, fp32 on a CPU: inputs differ by 2^-9, and roundings that were close go the
        # other way. AWQ's choice among scales may, too.
        assert one.errors == pytest.approx(other.errors, rel=0.25 if method == "awq" else 0.1)
