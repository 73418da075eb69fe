"""An output layer of 8 bits.

The kernels' own rounding of the tensor that fills it, exact in memory, in slices for ranks, beside
layers of any bits, and refused where it is not what was read.
"""

from __future__ import annotations

import math
import pathlib

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import VOCAB_SIZE, ignore_progress, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_loading import damage
from tests.models.test_pinned_loader import load_late
from tests.models.test_quantized_loading import LLAMA_8B
from tests.support.bitsandbytes_folder import write as write_nf4
from tests.support.examples import examples
from tests.support.model_builds import load_model, weight_memory
from tests.support.quantized_folders import Recipe, quantize_folder

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization import low_bit_weight
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.weights.dummy import fill_with_noise
from headrace_backend.weights.placement import ALONE, Placement, Shard
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_backend.worker.start_up.quantized import quantization_report
from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import gemm_fp8, gemm_int8
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.quantized import Path, path_rule
from headrace_kernels.triton_runtime import INTERPRETED, forced
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    dequantize,
    quantize_rows,
)
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors
from headrace_model_folder.config import parse_config

CPU = torch.device("cpu")
HEADS = {"int8": Scheme(QuantKind.INT8), "fp8": Scheme(QuantKind.FP8)}
LAYERS = {"off": None, "int8": Scheme(QuantKind.INT8), "fp8": Scheme(QuantKind.FP8)}
# Model -> the tensor that its output layer is made of. Tied, it is the embedding's.
FILLED_BY = {"llama-wide": "lm_head.weight", "llama-tied": "model.embed_tokens.weight"}
# fp32 sums in another order over three layers; logits are of order 10.
TOLERANCE = 2e-4

head_names = pytest.mark.parametrize("head", HEADS)
model_names = pytest.mark.parametrize("name", FILLED_BY)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("heads")
    for name in FILLED_BY:
        write_checkpoint(made / name, name)
    return made


def loaded(
    path: pathlib.Path, head: str, layers: str = "off", dtype: torch.dtype = torch.float32, shard: Shard = ALONE
) -> CausalLM:
    folder = ModelFolder.open(path)
    about = (folder, folder.config, dtype, CPU, "folder", 0, ignore_progress, None, LAYERS[layers], shard, HEADS[head])
    return load_model(*about)  # type: ignore[arg-type]


def head_numbers(model: CausalLM) -> torch.Tensor:
    assert model.head_weight is not None
    return dequantize(model.head_weight.quantized)


def rounded(head: str, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = allocate(HEADS[head].kind, *values.shape, values.shape[1], dtype, CPU)
    quantize_rows(values, weight, 0)
    return dequantize(weight)


def logits(model: CausalLM) -> torch.Tensor:
    tokens = [(7 * index) % VOCAB_SIZE for index in range(40)]
    return PagedDriver(model).step([Row(tokens)], [40])[0]


@head_names
@model_names
def test_it_is_the_kernels_own_rounding_and_all_else_stays(root: pathlib.Path, name: str, head: str) -> None:
    stored = safetensors.torch.load_file(root / name / "model.safetensors")
    model, plain = loaded(root / name, head), load(root / name)
    assert torch.equal(head_numbers(model), rounded(head, stored[FILLED_BY[name]]))
    parameters = dict(model.named_parameters())
    left_out = set() if name == "llama-tied" else {"lm_head.weight"}
    assert dict(plain.named_parameters()).keys() - parameters.keys() == left_out
    for parameter, value in parameters.items():
        assert torch.equal(value, plain.get_parameter(parameter))


@head_names
@model_names
def test_logits_are_those_of_the_dequantized_weight_in_fp32(root: pathlib.Path, name: str, head: str) -> None:
    model, plain = loaded(root / name, head), load(root / name)
    before = logits(plain)
    plain.lm_head.weight = torch.nn.Parameter(head_numbers(model), requires_grad=False)
    found = logits(model)
    torch.testing.assert_close(found, logits(plain), atol=TOLERANCE, rtol=0)
    assert found.dtype == torch.float32 and (found - before).abs().max() > 10 * TOLERANCE


@model_names
def test_the_greedy_token_is_that_of_the_logits(root: pathlib.Path, name: str) -> None:
    model = loaded(root / name, "int8", dtype=torch.bfloat16)
    hidden = torch.randn(5, model.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens, finite = model.most_likely(hidden)
    assert finite.all() and torch.equal(tokens, model.logits(hidden).argmax(1))
    assert model.logits(hidden).dtype == torch.float32


@settings(max_examples=examples(20, least=6), deadline=None)
@given(
    name=st.sampled_from(list(FILLED_BY)),
    head=st.sampled_from(list(HEADS)),
    piece_bytes=st.sampled_from([1, 300, 1000, 1 << 20]),
    num_readers=st.integers(1, 4),
    rank=st.integers(0, 1),
    world=st.sampled_from([1, 2]),
)
def test_pieces_of_any_size_and_ranks_give_slices_of_the_same_weight(
    root: pathlib.Path, name: str, head: str, piece_bytes: int, num_readers: int, rank: int, world: int
) -> None:
    shard = Shard(rank % world, world)
    config = ModelFolder.open(root / name).config
    late = CausalLM(config.description, Placement(torch.float32, CPU, shard, head_scheme=HEADS[head]), 16)
    load_late(root / name, late.weight_targets(), piece_bytes, num_readers)
    rows = shard.split(VOCAB_SIZE)
    assert torch.equal(head_numbers(late), head_numbers(loaded(root / name, head))[rows.start : rows.stop])
    table = safetensors.torch.load_file(root / name / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(late.model.embed_tokens.weight, table[rows.start : rows.stop])


@pytest.mark.one_in(3)
@head_names
@model_names
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_plan_said(
    root: pathlib.Path, name: str, head: str, layers: str, dtype: torch.dtype
) -> None:
    model, config = loaded(root / name, head, layers, dtype), ModelFolder.open(root / name).config
    assert model.head_weight is not None
    weights = [*model.low_bit_weights.values(), model.head_weight]
    parts = [(w.quantized.packed, w.quantized.scales, w.quantized.zeros) for w in weights]
    held = [*model.parameters(), *(part for weight in parts for part in weight if part is not None)]
    assert model.weight_bytes == sum(tensor.nbytes for tensor in held)
    assert weight_memory(config, dtype, LAYERS[layers], CPU, head=HEADS[head]).weights == model.weight_bytes
    # A copy of tied embeddings is no parameter more.
    assert model.parameter_count == ModelFolder.open(root / name).parameter_count
    # A byte a number and a scale of four for each token, beside the table or instead of it.
    plain = weight_memory(config, dtype, LAYERS[layers], CPU).weights
    instead = 0 if name == "llama-tied" else VOCAB_SIZE * config.description.hidden_size * dtype.itemsize
    assert model.weight_bytes == plain - instead + VOCAB_SIZE * (config.description.hidden_size + 4)


@pytest.mark.slow  # Small heads have the same buffer.
def test_an_8b_models_head_takes_half_and_its_part_of_the_buffer() -> None:
    config, on_card = parse_config(LLAMA_8B), torch.device("cuda", 0)
    plain, low = (weight_memory(config, torch.bfloat16, None, on_card, head=head) for head in (None, HEADS["int8"]))
    assert plain.weights - low.weights == 128_256 * (4096 - 4)
    # It is restored in parts of at most 256 MiB.
    assert (plain.scratch, low.scratch) == (0, 1 << 28)


@head_names
@model_names
def test_dummy_weights_are_the_unquantized_ones_rounded(root: pathlib.Path, name: str, head: str) -> None:
    config = ModelFolder.open(root / name).config
    plain = load_model(None, config, torch.bfloat16, CPU, "dummy", 7, ignore_progress)
    placement = Placement(torch.bfloat16, CPU, head_scheme=HEADS[head])
    model = CausalLM(config.description, placement, 16)
    fill_with_noise(model.weight_targets(), expected_tensors(config), 7, ignore_progress)
    assert isinstance(plain.lm_head.weight, torch.Tensor)
    assert torch.equal(head_numbers(model), rounded(head, plain.lm_head.weight.data, torch.bfloat16))
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)


@head_names
@model_names
def test_the_report_states_bits_and_distance(root: pathlib.Path, name: str, head: str) -> None:
    stored = safetensors.torch.load_file(root / name / "model.safetensors")[FILLED_BY[name]]
    model = loaded(root / name, head, "int8")
    report, alone = quantization_report(model), quantization_report(loaded(root / name, head))
    assert report is not None and alone is not None
    error = float((head_numbers(model) - stored).norm() / stored.norm())
    for each in (report, alone):
        assert (each.head_scheme, each.head_bits_per_weight) == (head, 8 + 8 * 4 / 64)
        assert each.head_relative_error == pytest.approx(error, rel=1e-3)
    assert report.scheme == "int8" and ".layers." in report.worst_tensor
    assert (alone.scheme, alone.bits_per_weight, alone.worst_tensor) == ("", 0.0, "")
    assert model.head_quantization is not None and model.head_quantization.worst_tensor == FILLED_BY[name]


def test_the_head_of_a_folder_that_is_quantized_already_may_be(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(root / "llama-wide", tmp_path, Recipe("gptq"))
    model, before = loaded(folder.path, "int8"), load(folder.path)
    stored = safetensors.torch.load_file(root / "llama-wide" / "model.safetensors")
    assert torch.equal(head_numbers(model), rounded("int8", stored["lm_head.weight"]))
    assert isinstance(model.quantization, StoredSummary) and model.quantization == before.quantization
    report = quantization_report(model)
    assert report is not None and (report.scheme, report.head_scheme) == ("gptq int4", "int8")
    config = ModelFolder.open(folder.path).config
    assert weight_memory(config, torch.float32, None, CPU, head=HEADS["int8"]).weights == model.weight_bytes


def test_beside_layers_in_nf4(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A folder's own, and rounded here."""
    path = tmp_path / "nf4"
    write_nf4(root / "llama-wide", path, True, ("lm_head", "embed_tokens"))
    stored = safetensors.torch.load_file(root / "llama-wide" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head_numbers(loaded(path, "fp8")), rounded("fp8", stored))
    write_checkpoint(tmp_path / "wide", "llama-wide-heads")
    folder = ModelFolder.open(tmp_path / "wide")
    about = (folder, folder.config, torch.float32, CPU, "folder", 0, ignore_progress)
    model = load_model(*about, scheme=Scheme.named("nf4", 64), head=HEADS["int8"])  # type: ignore[arg-type]
    report = quantization_report(model)
    assert report is not None and (report.scheme, report.head_scheme) == ("nf4", "int8")


@model_names
@pytest.mark.parametrize(("head", "value"), [("int8", math.nan), ("fp8", math.inf)])
def test_what_is_not_finite_is_refused(tmp_path: pathlib.Path, name: str, head: str, value: float) -> None:
    write_checkpoint(tmp_path, name)
    file = damage(tmp_path, FILLED_BY[name], value)
    with pytest.raises(InvalidModelFolder, match=rf"{file}: tensor '{FILLED_BY[name]}' holds a value that is not"):
        loaded(tmp_path, head)


@head_names
@model_names
def test_one_that_is_packed_wrongly_is_refused_by_name(
    root: pathlib.Path, name: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(rows: torch.Tensor, target: QuantizedWeight, first_row: int, magnitudes: torch.Tensor | None) -> None:
        quantize_rows(rows, target, first_row, magnitudes)
        if target.num_outputs == VOCAB_SIZE:
            target.packed[first_row : first_row + len(rows)] = target.packed[first_row : first_row + len(rows)].roll(
                1, 1
            )

    monkeypatch.setattr(low_bit_weight, "quantize_rows", broken)
    with pytest.raises(QuantizationRefused, match=rf"tensor '{FILLED_BY[name]}' is not what was read"):
        loaded(root / name, head, "fp8")


@head_names
def test_a_product_that_differs_from_its_reference_is_refused(
    root: pathlib.Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = quantized_linear.linear

    def broken(
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = linear(x, weight, bias, out_dtype, out)
        if weight.num_outputs == VOCAB_SIZE:
            out[:, 3] = 0
        return out

    monkeypatch.setattr(quantized_linear, "linear", broken)
    with pytest.raises(QuantizationRefused, match="layer 'lm_head': its .* product of 1 rows differs"):
        loaded(root / "llama-wide", head)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 256, 257, 1000])
def test_activations_are_never_rounded(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that could, and does for the layers' FP8 weights of the same size."""
    monkeypatch.setattr(card, "has_fp8_products", lambda device: True)
    monkeypatch.setattr(quantized_linear, "uses_triton", lambda tensor: True)
    kept = {
        kind: allocate(kind, 128_256, 64, 64, torch.bfloat16, CPU, Arrangement(keeps_activations=True))
        for kind in (QuantKind.INT8, QuantKind.FP8)
    }
    for weight in kept.values():
        assert path_rule(num_rows, weight) is not Path.SCALED
        assert not gemm_fp8.can_scale(weight) and not gemm_int8.can_scale(weight)
    rounding = allocate(QuantKind.FP8, 128_256, 64, 64, torch.bfloat16, CPU)
    assert (path_rule(num_rows, rounding) is Path.SCALED) == (num_rows >= 65)


def test_activations_are_not_both_rounded_and_kept() -> None:
    both = Arrangement(inputs=InputRounding(torch.int8), keeps_activations=True)
    with pytest.raises(ValueError, match="rounded or kept, not both"):
        allocate(QuantKind.INT8, 64, 64, 64, torch.bfloat16, CPU, both)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@head_names
@model_names
def test_the_kernels_give_the_same_logits(root: pathlib.Path, name: str, head: str) -> None:
    model = loaded(root / name, head)
    hidden = torch.randn(40, model.hidden_size, generator=torch.Generator().manual_seed(2))
    expected = model.logits(hidden)
    with forced():
        for rows in (1, 12, 40):
            found = model.logits(hidden[:rows])
            torch.testing.assert_close(found, expected[:rows], atol=TOLERANCE, rtol=0)
            assert found.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@head_names
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_cards_logits_are_those_of_the_dequantized_weight(head: str, is_tied: bool) -> None:
    """Whatever number of rows, at the size of an 8B model's head.

    Nothing of the original stays where it is not needed.
    """
    config = parse_config({**LLAMA_8B, "num_hidden_layers": 1, "tie_word_embeddings": is_tied})
    on_card = torch.device("cuda", 0)
    about = (None, config, torch.bfloat16, on_card, "dummy", 0, ignore_progress, 64)
    model = load_model(*about, head=HEADS[head])  # type: ignore[arg-type]
    assert model.head_weight is not None
    assert model.weight_bytes == weight_memory(config, torch.bfloat16, None, on_card, head=HEADS[head]).weights
    numbers = torch.empty(model.vocab_size, model.hidden_size, device=on_card)
    dequantize(model.head_weight.quantized, numbers)
    for rows in (1, 8, 16, 17, 64, 96, 256, 300):
        hidden = torch.randn(rows, model.hidden_size, device=on_card).bfloat16()
        found, expected = model.logits(hidden), hidden.double() @ numbers[:4096].double().t()
        assert found.dtype == torch.float32 and found.shape == (rows, model.vocab_size)
        # Weights are rounded to bf16 where they are restored for many rows; activations never are.
        assert float((found[:, :4096] - expected).norm() / expected.norm()) < 5e-3
        last = hidden.double() @ numbers[-999:].double().t()
        assert float((found[:, -999:] - last).norm() / last.norm()) < 5e-3
        tokens, finite = model.most_likely(hidden)
        assert finite.all() and torch.equal(tokens, found.argmax(1))
