"""Models read from GGUF files.

The logits of the numbers that their bits stand for, in the memory that was planned, with every type
where files have it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import VOCAB_SIZE, ignore_progress, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_pinned_loader import load_late
from tests.support.examples import examples
from tests.support.gguf_numbers import BLOCK_KINDS, KINDS
from tests.support.gguf_writer import Gguf, from_folder
from tests.support.model_builds import load_model, weight_memory
from tests.support.running_server import DEMO

from headrace_backend.layers.rotary import rope_frequencies
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization import product_check
from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.weights.block_records import as_in_file, block_kinds
from headrace_backend.weights.destination import OrderedRows, TensorRows
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.weight_formats.block_weight import BlockKind, BlockWeight
from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_model_folder.safetensors_header import RowOrder

CPU = torch.device("cpu")
# fp32 with sums in another order; logits are of order 10.
TOLERANCE = 3e-4
# Of the demo model's eight.
NUM_LAYERS = 3
# Types of the files that carry these names, roughly: values and half of the down projections have
# more bits.
MIXES = {
    "Q4_K_M": {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q4_K", "lm_head": "Q6_K", "": "Q4_K"},
    "Q3_K_M": {"v_proj": "Q5_K", "o_proj": "Q4_K", "": "Q3_K"},
    "Q2_K": {"v_proj": "Q3_K", "embed_tokens": "Q2_K", "lm_head": "Q6_K", "": "Q2_K"},
    "IQ4_XS": {"v_proj": "Q5_K", "embed_tokens": "IQ4_NL", "lm_head": "Q6_K", "": "IQ4_XS"},
    "odd": {"q_proj": "F16", "k_proj": "Q5_1", "v_proj": "BF16", "gate_proj": "Q4_1", "up_proj": "F32", "": "Q5_0"},
}


def kind_of(mix: str, name: str) -> str:
    return next(kind for part, kind in MIXES[mix].items() if part in name)


def written(path: pathlib.Path, source: pathlib.Path, kind: str) -> tuple[Gguf, pathlib.Path]:
    """The model of a folder as a GGUF file.

    A folder with the numbers that the file stands for, in fp32.
    """
    gguf, exact = from_folder(source, (lambda name, _: kind_of(kind, name)) if kind in MIXES else kind)
    plain = path / f"{kind}-exact"
    plain.mkdir(exist_ok=True)
    (plain / "config.json").write_text((source / "config.json").read_text())
    safetensors.torch.save_file(exact, plain / "model.safetensors")
    gguf.write(path / f"{kind}.gguf")
    return gguf, plain


Written = Callable[[str], tuple[Gguf, pathlib.Path, pathlib.Path]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The demo model's first layers as a GGUF file of a kind.

    With a folder that has the numbers which it stands for.
    """
    path = tmp_path_factory.mktemp("demo")
    write_first_layers(path / "source")

    @functools.cache
    def made(kind: str) -> tuple[Gguf, pathlib.Path, pathlib.Path]:
        gguf, plain = written(path, path / "source", kind)
        return gguf, plain, path / f"{kind}.gguf"

    return made


def write_first_layers(path: pathlib.Path) -> None:
    """Writes the demo model with the first `NUM_LAYERS` of its layers alone."""
    path.mkdir()
    config = json.loads((DEMO / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}))
    tensors = safetensors.torch.load_file(DEMO / "model.safetensors")
    behind = tuple(f"model.layers.{layer}." for layer in range(NUM_LAYERS, config["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(behind)}
    safetensors.torch.save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def read(file: pathlib.Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    folder = ModelFolder.open(file)
    return load_model(folder, folder.config, dtype, CPU, "folder", 0, ignore_progress)


def logits(model: CausalLM, vocab: int = VOCAB_SIZE) -> torch.Tensor:
    tokens = np.random.default_rng(3).integers(0, vocab, 70).tolist()
    row = Row(tokens)
    driver = PagedDriver(model)
    return torch.cat([*driver.step([row], [40]), *driver.step([row], [29]), *driver.step([row], [1])])


EVERY_TYPE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "odd"]
# Every kind of one family, and every family; the others of both in the slow part.
EVERYDAY = {*(("llama-wide", kind) for kind in EVERY_TYPE), ("qwen2", "Q8_0"), ("qwen3", "odd")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in EVERYDAY else pytest.mark.slow)
        for name in ("llama-wide", "qwen2", "qwen3")
        for kind in EVERY_TYPE
    ],
)
def test_logits_are_those_of_the_numbers(tmp_path: pathlib.Path, name: str, kind: str) -> None:
    """All families: Llama's rotated rows and biases, Qwen's norms and biases.

    80 inputs fit no block and stay plain.
    """
    write_checkpoint(tmp_path / "source", name)
    _, plain = written(tmp_path, tmp_path / "source", kind)
    torch.testing.assert_close(logits(read(tmp_path / f"{kind}.gguf")), logits(load(plain)), atol=TOLERANCE, rtol=0)


# A K type alone is slow: each is in one of the mixes.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind",
    [*MIXES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in BLOCK_KINDS if kind.endswith("_K"))],
)
def test_the_demo_models_logits_are_those_of_the_numbers(demo: Written, kind: str) -> None:
    """256 inputs: one K block.

    704, of the down projections, fit none and are Q8_0, as in files of such models.
    """
    _, plain, file = demo(kind)
    model, expected = read(file), load(plain)
    torch.testing.assert_close(logits(model, 4096), logits(expected, 4096), atol=2e-3, rtol=0)
    assert model.parameter_count == ModelFolder.open(plain).parameter_count


def test_every_type_is_held_as_it_was_written(demo: Written) -> None:
    model = read(demo("Q4_K_M")[2])
    qkv = model.block_weights["model.layers.0.self_attn.qkv_proj.weight"]
    assert [(part.kind, part.num_outputs) for part in qkv.blocks] == [(BlockKind.Q4_K, 384), (BlockKind.Q6_K, 128)]
    assert (
        isinstance(model.model.embed_tokens.weight, BlockLinearWeight)
        and model.lm_head.weight is model.model.embed_tokens.weight
    )
    summary = model.quantization
    assert isinstance(summary, StoredSummary) and summary.scheme == "Q4_K+Q8_0+Q6_K"
    held = [part for weight in model.block_weights.values() for block in weight.blocks for part in block.parts]
    weights = sum(weight.num_block_weights for weight in model.block_weights.values())
    assert summary.bits_per_weight == 8 * sum(part.nbytes for part in held) / weights


@pytest.mark.parametrize("kind", ["Q4_K_M", "odd", "F16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_plan_said(demo: Written, kind: str, dtype: torch.dtype) -> None:
    gguf, _, file = demo(kind)
    folder, model = ModelFolder.open(file), read(file, dtype)
    held = list(model.parameters())
    held += [part for weight in model.block_weights.values() for block in weight.blocks for part in block.parts]
    assert model.weight_bytes == sum(tensor.nbytes for tensor in held)
    assert weight_memory(folder.config, dtype, None, CPU, records=folder.tensors).weights == model.weight_bytes
    on_card = weight_memory(folder.config, dtype, None, torch.device("cuda", 0), records=folder.tensors).scratch
    assert (on_card > 0) == bool(model.block_weights)
    if kind == "Q4_K_M":
        in_blocks = sum(len(data) for of, _, data in gguf.tensors.values() if KINDS[of].inputs > 1)
        assert sum(weight.num_bytes for weight in model.block_weights.values()) <= 1.05 * in_blocks


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["Q4_K_M", "odd"])
@pytest.mark.parametrize("piece_bytes", [1500, 1 << 20])
def test_a_cards_loader_gives_the_same_weights(demo: Written, kind: str, piece_bytes: int) -> None:
    """Pieces of any number of rows, also such as end within a head whose rows alternate."""
    file = demo(kind)[2]
    folder = ModelFolder.open(file)
    kinds = block_kinds(folder.tensors)
    late = CausalLM(folder.config.description, Placement(torch.float32, CPU, blocks=kinds), 128)
    load_late(file, as_in_file(late.weight_targets(), folder.tensors), piece_bytes, 3)
    direct = read(file)
    for name, parameter in direct.named_parameters():
        assert torch.equal(late.get_parameter(name), parameter)
    for path, weight in direct.block_weights.items():
        for found, expected in zip(late.block_weights[path].blocks, weight.blocks, strict=True):
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(found.parts, expected.parts, strict=True)
            )


@settings(max_examples=examples(100), deadline=None)
@given(
    groups=st.integers(1, 3),
    order=st.builds(RowOrder, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from((0, 7))),
    cuts=st.lists(st.integers(0, 90), max_size=6),
    kept=st.tuples(st.integers(0, 200), st.integers(1, 200)),
)
def test_rows_are_put_into_order_whatever_the_pieces_and_whatever_is_kept(
    groups: int, order: RowOrder, cuts: list[int], kept: tuple[int, int]
) -> None:
    """Halves of heads that alternate, and value heads by place, with rows before them or none."""
    size = order.first + groups * order.size
    expected = torch.arange(size)
    grouped = expected[order.first :].view(groups, order.inner, order.outer, order.run)
    rows = torch.cat((expected[: order.first], grouped.transpose(1, 2).flatten()))
    start = min(kept) % size
    wanted = range(start, max(start + 1, min(max(kept), size)))
    target = torch.full((len(wanted),), -1)
    into = OrderedRows(TensorRows(target), order, wanted, size)
    bounds = sorted({0, len(into.read), *(cut for cut in cuts if cut < len(into.read))})
    for first, end in itertools.pairwise(bounds):
        into.put(first, rows[into.read.start + first : into.read.start + end])
    assert torch.equal(target, expected[wanted.start : wanted.stop])


def test_divisors_of_frequencies_are_used(tmp_path: pathlib.Path) -> None:
    """Llama 3.1's stretched context, as the tensor that its files have."""
    write_checkpoint(tmp_path / "source", "llama-llama3")
    gguf, plain = written(tmp_path, tmp_path / "source", "F32")
    rope = ModelFolder.open(plain).config.description.rope
    stretched, _ = rope_frequencies(rope, 8, 64)
    default = 1000.0 ** -(torch.arange(0, 8, 2) / 8)
    gguf.tensors["rope_freqs.weight"] = ("F32", (4,), (default / stretched).numpy().tobytes())
    gguf.write(tmp_path / "F32.gguf")
    torch.testing.assert_close(logits(read(tmp_path / "F32.gguf")), logits(load(plain)), atol=TOLERANCE, rtol=0)


def test_a_scale_that_is_not_finite_is_refused_by_name(demo: Written, tmp_path: pathlib.Path) -> None:
    gguf = _copied(demo("Q4_K")[0])
    kind, shape, data = gguf.tensors["blk.2.attn_k.weight"]
    damaged = bytearray(data)
    damaged[144 * 100 : 144 * 100 + 2] = np.float16(np.nan).tobytes()
    gguf.tensors["blk.2.attn_k.weight"] = (kind, shape, bytes(damaged))
    gguf.write(tmp_path / "bad.gguf")
    with pytest.raises(
        QuantizationRefused,
        match=r"bad\.gguf: tensor 'model\.layers\.2\.self_attn\.k_proj\.weight' holds a scale that is not",
    ):
        read(tmp_path / "bad.gguf")


def _copied(gguf: Gguf) -> Gguf:
    return dataclasses.replace(gguf, tensors=dict(gguf.tensors))


def test_a_plain_number_that_is_not_finite_is_refused_by_name(demo: Written, tmp_path: pathlib.Path) -> None:
    gguf = _copied(demo("Q4_K")[0])
    kind, shape, data = gguf.tensors["blk.2.attn_norm.weight"]
    gguf.tensors["blk.2.attn_norm.weight"] = (kind, shape, np.float32(np.inf).tobytes() + data[4:])
    gguf.write(tmp_path / "bad.gguf")
    with pytest.raises(
        InvalidModelFolder, match=r"bad\.gguf: tensor 'model\.layers\.2\.input_layernorm\.weight' holds a value"
    ):
        read(tmp_path / "bad.gguf")


def test_a_product_that_differs_from_its_reference_is_refused_by_layer(
    demo: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = product_check.block_quantized.linear

    def broken(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
        out = linear(x, weight)
        if weight.kind is BlockKind.Q8_0:
            out[:, 3] = 0
        return out

    monkeypatch.setattr(product_check.block_quantized, "linear", broken)
    with pytest.raises(
        QuantizationRefused, match=r"layer 'model\.layers\.0\.mlp\.down_proj': its Q8_0 product of 8 rows"
    ):
        read(demo("Q4_K")[2])


on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q3_K_M", "odd"])
def test_a_card_holds_and_checks_the_same_bits(demo: Written, kind: str) -> None:
    file = demo(kind)[2]
    folder, card = ModelFolder.open(file), torch.device("cuda", 0)
    model = load_model(folder, folder.config, torch.bfloat16, card, "folder", 0, ignore_progress)
    for path, weight in read(file).block_weights.items():
        for found, expected in zip(model.block_weights[path].blocks, weight.blocks, strict=True):
            assert all(
                torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(found.parts, expected.parts, strict=True)
            )
