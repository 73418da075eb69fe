"""Families whose layers are not plain: norms behind products, or of all heads; GELU."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.models.checkpoints import load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.quantize.quantize_parts import Bench, quantize, request
from tests.quantize.restored_folder import restored, transformers_model

from headrace_quantize.checks import QuantizeRefused, check
from headrace_quantize.rounding.numbers import NumberFormat

PROMPT = list(range(1, 38))
INT8 = NumberFormat(8, True, False, torch.float32)


@pytest.mark.parametrize(
    "family", ["olmo2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "olmo3", "smollm3"))]
)
@torch.no_grad()
def test_a_folder_is_written_and_read_again(tmp_path: pathlib.Path, family: str) -> None:
    write_checkpoint(tmp_path / "model", family)
    quantize(request(tmp_path / "model", tmp_path / "out", method="rtn", bits=8, group_size="channel"))
    found = torch.cat(PagedDriver(load(tmp_path / "out")).step([Row(PROMPT)], [len(PROMPT)]))
    theirs = transformers_model(tmp_path / "model", restored(tmp_path / "out", INT8))
    # The same numbers, summed in another order.
    torch.testing.assert_close(found, theirs(torch.tensor([PROMPT])).logits[0], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("family", ["gemma3", pytest.param("olmo2", marks=pytest.mark.slow)])
@torch.no_grad()
def test_calibration_passes_through_the_layers_as_they_serve(tmp_path: pathlib.Path, family: str) -> None:
    """What comes out of the quantized layers is what transformers makes of the written weights."""
    bench = Bench(tmp_path, family, method="gptq", bits=8, group_size="channel")
    hidden = bench.passes.embed(bench.pieces, bench.source)
    written: dict[str, torch.Tensor] = {}
    for index in range(len(bench.job.model.config.description.layers)):
        layer = bench.passes.load(index)
        result = bench.quantizer.quantize(index, layer, hidden)
        assert max(result.errors.values()) < 0.02
        bench.passes.run(layer.module, hidden, result.heads)
        written |= {name: target.tensor for name, target in layer.targets.items() if name.endswith("_proj.weight")}
    theirs = bench.theirs
    theirs.load_state_dict(written, strict=False)
    expected = theirs(torch.tensor(bench.pieces), output_hidden_states=True).hidden_states[-1]
    ours = bench.passes.norm(bench.job.model.config.description.norm, bench.source)(hidden)
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)


def test_what_can_not_be_is_refused(tmp_path: pathlib.Path) -> None:
    for family, options, message in (
        ("olmo2", {"method": "awq", "calibration": ("text",)}, "--method awq is not for Olmo2ForCausalLM"),
        ("gemma3-part", {"method": "rtn"}, "has parts beside its text part, which would be lost"),
        ("gemma4", {"method": "rtn"}, "whose layers differ in their heads or scale the stream"),
        ("glm4", {"method": "rtn"}, "keeps several projections in one tensor"),
    ):
        write_checkpoint(tmp_path / family, family)
        with pytest.raises(QuantizeRefused, match=message):
            check(request(tmp_path / family, tmp_path / "out", **options))
