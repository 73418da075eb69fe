"""Families whose layers are not plain, or whose folders keep projections in one tensor.

Norms behind products, or of all heads; GELU; linear attention with states.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.quantize.dequantized_folder import dequantized, transformers_model
from tests.quantize.quantize_parts import Bench, quantize, request

from headrace_model_folder import ModelFolder
from headrace_model_folder.measured_loss import read_measured_loss
from headrace_quantize.checks import QuantizeRefused, check
from headrace_quantize.rounding.numbers import NumberFormat

PROMPT = list(range(1, 38))
INT8 = NumberFormat(8, True, False, torch.float32)


@pytest.mark.parametrize(
    "family",
    [
        *("olmo2", "qwen3.5", "phi3-blocks"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "olmo3", "smollm3", "glm4")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("seed-oss", "exaone4")),
    ],
)
@torch.no_grad()
def test_a_folder_is_written_and_read_again(tmp_path: pathlib.Path, family: str) -> None:
    write_checkpoint(tmp_path / "model", family)
    quantize(request(tmp_path / "model", tmp_path / "out", method="rtn", bits=8, group_size="channel"))
    found = torch.cat(PagedDriver(load(tmp_path / "out")).step([Row(PROMPT)], [len(PROMPT)]))
    theirs = transformers_model(tmp_path / "model", dequantized(tmp_path / "out", INT8))
    # The same numbers, summed in another order.
    torch.testing.assert_close(found, theirs(torch.tensor([PROMPT])).logits[0], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    "family", ["gemma3", "qwen3.5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmo2", "phi3-blocks"))]
)
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
        quantized = [name for name in bench.job.quantized if f"{name}.weight" in layer.stored]
        written |= {f"{name}.weight": layer.weight(name) for name in quantized}
    theirs = bench.theirs
    theirs.load_state_dict(written, strict=False)
    expected = theirs(torch.tensor(bench.pieces), output_hidden_states=True).hidden_states[-1]
    ours = bench.passes.norm(bench.job.model.config.description.norm, bench.source)(hidden)
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)


@torch.no_grad()
def test_of_a_model_that_sees_the_text_part_is_written(tmp_path: pathlib.Path) -> None:
    """Experts that lie in one tensor are written apart; gates and logits of decay stay."""
    theirs = write_checkpoint(tmp_path / "text", "qwen3.5-moe-wide")
    model = published_with_parts(tmp_path / "text", tmp_path / "model")
    report = quantize(request(model, tmp_path / "out", method="rtn", bits=8, group_size="channel"))
    weights = dequantized(tmp_path / "out", INT8)
    kept = {"in_proj_a", "in_proj_b", "shared_expert_gate", "gate", "conv1d"}
    for name, original in theirs.state_dict().items():
        if ".experts." not in name and name.split(".")[-2] in kept:
            assert torch.equal(weights[name], original)
    assert 0 < max(max(layer.errors.values()) for layer in report.layers) < 0.02
    folder = ModelFolder.open(tmp_path / "out")
    assert folder.config.architecture == "Qwen3_5MoeForCausalLM"
    # The report is this folder's, and measured nothing without text.
    assert read_measured_loss(folder) is None
    found = torch.cat(PagedDriver(load(tmp_path / "out")).step([Row(PROMPT)], [len(PROMPT)]))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((tmp_path / "text/config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, plain / "model.safetensors")
    torch.testing.assert_close(found, load_logits(plain), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("qwen3-vl-part", "Qwen3ForCausalLM"),
        *(
            pytest.param(*names, marks=pytest.mark.slow)
            for names in (("mistral3-part", "MistralForCausalLM"), ("ministral3-part", "Ministral3ForCausalLM"))
        ),
    ],
)
@torch.no_grad()
def test_a_text_part_is_written_as_a_folder_of_its_relatives(
    tmp_path: pathlib.Path, family: str, architecture: str
) -> None:
    """A language model to transformers; what config.json left out means what it did."""
    write_checkpoint(tmp_path / "model", family)
    quantize(request(tmp_path / "model", tmp_path / "out", method="rtn", bits=8, group_size="channel"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("architectures") == [architecture] and config.pop("quantization_config")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text(json.dumps(config))
    theirs = transformers_model(tmp_path / "text", dequantized(tmp_path / "out", INT8))
    torch.testing.assert_close(
        load_logits(tmp_path / "out"), theirs(torch.tensor([PROMPT])).logits[0], rtol=1e-4, atol=2e-3
    )


def load_logits(path: pathlib.Path) -> torch.Tensor:
    return torch.cat(PagedDriver(load(path)).step([Row(PROMPT)], [len(PROMPT)]))


def published_with_parts(text: pathlib.Path, into: pathlib.Path) -> pathlib.Path:
    """A folder of Qwen3.5 with experts as it is published, made of one of its text part alone."""
    into.mkdir()
    tensors = load_file(text / "model.safetensors")
    joined: dict[str, list[torch.Tensor]] = {}
    for name in sorted(name for name in tensors if ".experts." in name):
        layer, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        if part == "up_proj":
            continue
        own = tensors[name]
        if part == "gate_proj":
            own, part = torch.cat((own, tensors[f"{layer}.experts.{number}.up_proj.weight"])), "gate_up_proj"
        joined.setdefault(f"{layer}.experts.{part}", []).append(own)
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    kept |= {name: torch.stack(experts) for name, experts in joined.items()}
    whole = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in kept.items()}
    save_file(whole | {"model.visual.proj.weight": torch.zeros(2, 2)}, into / "model.safetensors")
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {}}
    config["text_config"] = json.loads((text / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config))
    return into


def test_what_can_not_be_is_refused(tmp_path: pathlib.Path) -> None:
    for family, options, message in (
        ("olmo2", {"method": "awq", "calibration": ("text",)}, "--method awq is not for Olmo2ForCausalLM"),
        ("gemma4", {"method": "rtn"}, "whose layers differ in their heads or scale the stream"),
        ("phi3", {"method": "awq", "calibration": ("text",)}, "which keeps several projections in one tensor"),
    ):
        write_checkpoint(tmp_path / family, family)
        with pytest.raises(QuantizeRefused, match=message):
            check(request(tmp_path / family, tmp_path / "out", **options))
