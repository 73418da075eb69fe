"""Mixtures of experts: each expert by the tokens that the router sends to it, and their folders."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import safetensors.torch
import torch
import transformers
from tests.models.checkpoints import CONFIGS, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.quantize.dequantized_folder import dequantized
from tests.quantize.quantize_parts import DRAFT, Bench, quantize, request, write_text

from headrace_backend.quantization.expert_weight import StoredExpertWeight
from headrace_model_folder import ModelFolder
from headrace_model_folder.description import Experts
from headrace_quantize.checks import QuantizeRefused, check
from headrace_quantize.compressed_tensors import matrix_of
from headrace_quantize.rounding.numbers import NumberFormat, round_to_nearest

PROMPT = list(range(1, 38))
INT4, FP8 = NumberFormat(4, True, False, torch.float32), NumberFormat(8, True, True, torch.float32)


def logits_of_transformers(
    original: pathlib.Path, weights: dict[str, torch.Tensor], into: pathlib.Path
) -> torch.Tensor:
    """Logits of a plain folder with these weights, which transformers reads as any other."""
    shutil.copytree(original, into, ignore=shutil.ignore_patterns("*.safetensors"))
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, into / "model.safetensors"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return found


def check_folder(original: pathlib.Path, out: pathlib.Path, form: NumberFormat, into: pathlib.Path) -> None:
    """The folder is read again with the numbers that were written; transformers computes alike."""
    model = load(out)
    mixtures = len(ModelFolder.open(original).config.description.expert_layers)
    weights = [weight for weight in model.low_bit_weights.values() if isinstance(weight, StoredExpertWeight)]
    assert len(weights) == 2 * mixtures
    for weight in model.low_bit_weights.values():
        # A processor rounds inputs of FP8 products, as the folder says; here weights are looked at.
        object.__setattr__(weight.quantized, "inputs", None)
    found = torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))
    torch.testing.assert_close(
        found, logits_of_transformers(original, dequantized(out, form), into), rtol=1e-4, atol=2e-3
    )


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen3-moe-blocks", "int"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("mixtral-wide", "fp8"), ("glm4-moe-wide", "int"))),
    ],
)
def test_a_mixture_is_written_and_read_again(tmp_path: pathlib.Path, family: str, scheme: str) -> None:
    write_checkpoint(tmp_path / "model", family)
    options = {"group_size": None} if scheme == "fp8" else {}
    report = quantize(request(tmp_path / "model", tmp_path / "out", method="rtn", scheme=scheme, **options))
    assert report.quality is None and max(error for layer in report.layers for error in layer.errors.values()) < 0.2
    check_folder(tmp_path / "model", tmp_path / "out", FP8 if scheme == "fp8" else INT4, tmp_path / "plain")


@pytest.mark.slow  # Layers alone: below.
def test_a_calibrated_mixture_is_nearer_to_the_original_on_text(tmp_path: pathlib.Path) -> None:
    """By the text's own measure, and the folder is read again."""
    folder, vocabulary = tmp_path / "model", ModelFolder.open(DRAFT).config.vocab_size
    config = CONFIGS["mixtral-wide"]()
    config.vocab_size = vocabulary
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    shutil.copy(DRAFT / "tokenizer.json", folder)
    text = str(write_text(tmp_path, 200))
    divergence = {}
    for method in ("rtn", "gptq"):
        report = quantize(request(folder, tmp_path / method, method=method, calibration=(text,), samples=32))
        assert report.quality is not None
        divergence[method] = report.quality.divergence
    assert divergence["gptq"] < divergence["rtn"]
    check_folder(folder, tmp_path / "gptq", INT4, tmp_path / "plain")


def mixture_of(bench: Bench) -> Experts:
    mlp = bench.job.model.config.description.layers[1].mlp
    assert isinstance(mlp, Experts)
    return mlp


@torch.no_grad()
def test_experts_are_calibrated_on_the_tokens_that_choose_them(tmp_path: pathlib.Path) -> None:
    """GPTQ's outputs are nearer than rounding's for each expert; who reads nothing is rounded."""
    errors, tensors, notes = {}, {}, list[str]()
    for method in ("rtn", "gptq"):
        bench = Bench(tmp_path / method, "qwen3-moe-blocks", method=method)
        layer, hidden = bench.passes.load(1), bench.passes.embed(bench.pieces, bench.source)
        router = layer.targets["model.layers.1.mlp.gate.weight"].tensor
        # Its logit is 0, and no token's choice among others that are above.
        router[4] = 0
        router[:4] = router[:4].abs()
        bench.quantizer._note = notes.append
        hidden = hidden.abs()
        result = bench.quantizer.quantize(1, layer, hidden)
        errors[method], tensors[method] = result.errors, result.tensors
        assert torch.equal(
            result.tensors["model.layers.1.mlp.gate.weight"], bench.source.read("model.layers.1.mlp.gate.weight")
        )
    unseen, mixture = unseen_experts(notes), mixture_of(bench)
    assert 1 <= unseen < len(mixture.experts)
    exact = 0
    for expert in mixture.experts:
        same = all(
            torch.equal(*(each[f"{linear.name}.weight_packed"] for each in tensors.values()))
            for linear in expert.linears
        )
        exact += same
        if not same:
            assert all(errors["gptq"][linear.name] < errors["rtn"][linear.name] for linear in (expert.gate, expert.up))
    assert exact == unseen
    for linear in mixture.experts[0].linears:
        form = bench.quantizer.format(linear.name)
        plain = round_to_nearest(bench.source.read(f"{linear.name}.weight").float(), form, 32)
        assert torch.equal(matrix_of(linear.name, tensors["rtn"], form).numbers, plain.numbers)


def unseen_experts(notes: list[str]) -> int:
    (note,) = (note for note in notes if "read no token of calibration" in note)
    assert note.startswith("model.layers.1.mlp.gate: ")
    return int(note.split(": ")[1].split(" ")[0])


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "qwen3-moe-blocks",
            {"method": "awq", "calibration": ("text",)},
            "--method awq is not for mixtures of experts",
        ),
        ("qwen3-moe-blocks", {"keep": ("experts.3.up_proj",)}, "experts of one layer are multiplied together"),
        ("gpt-oss", {}, "GptOssForCausalLM, which keeps all experts of a layer in one tensor"),
    ],
)
def test_what_can_not_be_is_refused(
    tmp_path: pathlib.Path, family: str, options: dict[str, object], message: str
) -> None:
    write_checkpoint(tmp_path / "model", family)
    with pytest.raises(QuantizeRefused, match=message):
        check(request(tmp_path / "model", tmp_path / "out", **{"method": "rtn", **options}))


def test_all_downs_of_a_layer_may_be_kept(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3-moe-blocks")
    job = check(request(tmp_path / "model", tmp_path / "out", method="rtn", keep=("down_proj",)))
    assert not [name for name in job.quantized if "down_proj" in name or name.endswith("mlp.gate")]
    assert len([name for name in job.quantized if ".experts." in name]) == 2 * 6
