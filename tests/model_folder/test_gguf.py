"""GGUF files: what they state becomes a model's configuration, records and text.

Everything that does not describe its file exactly is refused, naming file and key or tensor.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.gguf_numbers import KINDS, quantize
from tests.support.gguf_writer import Gguf, Typed

from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_model_folder.gguf.header import TYPES, read_gguf_header
from headrace_model_folder.safetensors_header import RowOrder

FILE = "small.gguf"
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 32, 64, 4, 2, 9


def small(arch: str = "llama", kind: str = "Q8_0", tied: bool = False) -> Gguf:
    """A model of one layer."""
    key = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,), "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (key, HIDDEN),
        "blk.0.attn_v.weight": (key, HIDDEN), "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN), "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }  # fmt: skip
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    if arch == "qwen2":
        shapes |= {f"blk.0.attn_{part}.bias": (HIDDEN if part == "q" else key,) for part in "qkv"}
    if arch == "qwen3":
        shapes |= {f"blk.0.attn_{part}_norm.weight": (HIDDEN // HEADS,) for part in "qk"}
    generator = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        of = kind if len(shape) == 2 else "F32"
        values = generator.normal(0, 1, (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])).astype(np.float32)
        tensors[name] = (of, shape, quantize(of, values).tobytes())
    metadata = {
        "general.architecture": arch,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": 1,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 500_000.0,
    }
    return Gguf(metadata, tensors)


def opened(folder: pathlib.Path, gguf: Gguf) -> ModelFolder:
    return ModelFolder.open(gguf.write(folder / FILE))


def refused(folder: pathlib.Path, gguf: Gguf | bytes) -> str:
    if isinstance(gguf, bytes):
        (folder / FILE).write_bytes(gguf)
    else:
        gguf.write(folder / FILE)
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(folder / FILE)
    assert FILE in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_valid_file_is_described(tmp_path: pathlib.Path) -> None:
    folder = opened(tmp_path, small())
    config = folder.config
    model, attention = config.description, config.description.attention
    assert (config.architecture, model.hidden_size, len(model.layers)) == ("LlamaForCausalLM", HIDDEN, 1)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (HEADS, KV_HEADS, 8)
    assert (config.vocab_size, model.layers[0].mlp.inner, config.max_position_embeddings) == (VOCAB, INNER, 128)
    # fp32 in the file; what was meant are these.
    assert (model.norm.eps, model.rope.theta) == (1e-5, 500_000.0)
    assert not model.head.tied and not attention.query.bias and config.torch_dtype == "bfloat16"
    assert (folder.name, folder.gguf_file, folder.weights_folder) == ("small", FILE, tmp_path)
    assert folder.revision.startswith("small@") and folder.token_table is None
    assert {record.dtype for record in folder.tensors.values()} == {"Q8_0", "F32"}
    assert folder.tensors["model.layers.0.self_attn.q_proj.weight"].order == RowOrder(4, 2)
    assert folder.tensors["model.layers.0.self_attn.v_proj.weight"].order is None


def test_offsets_lead_to_the_data(tmp_path: pathlib.Path) -> None:
    gguf = small()
    header = read_gguf_header(tmp_path, gguf.write(tmp_path / FILE).name)
    raw = (tmp_path / FILE).read_bytes()
    for name, (kind, shape, data) in gguf.tensors.items():
        found = header.tensors[name]
        assert (found.type.name, found.shape) == (kind, shape)
        assert raw[found.offset : found.offset + found.num_bytes] == data


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_the_families_switches(tmp_path: pathlib.Path, arch: str) -> None:
    model = opened(tmp_path, small(arch, tied=True)).config.description
    assert model.head.tied
    assert model.attention.query.bias == (arch == "qwen2")
    assert bool(model.attention.norms) == (arch == "qwen3")


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")]
)
def test_the_type_of_activations_follows_from_the_matrices(tmp_path: pathlib.Path, kind: str, dtype: str) -> None:
    assert opened(tmp_path, small(kind=kind)).config.torch_dtype == dtype


def test_a_folder_with_one_file_is_that_file_and_one_with_two_is_none(tmp_path: pathlib.Path) -> None:
    small().write(tmp_path / FILE)
    assert ModelFolder.open(tmp_path).gguf_file == FILE
    small().write(tmp_path / "other.gguf")
    with pytest.raises(InvalidModelFolder, match="has several GGUF files"):
        ModelFolder.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidModelFolder, match="config.json"):
        ModelFolder.open(tmp_path)


def test_a_link_to_a_file_of_another_name_is_followed_inside_a_cache_only(tmp_path: pathlib.Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    small().write(blobs / "0123")
    (snapshot / FILE).symlink_to(blobs / "0123")
    assert ModelFolder.open(snapshot / FILE).name == "small"
    (tmp_path / FILE).symlink_to(tmp_path / "blobs" / "0123")
    assert ModelFolder.open(tmp_path / FILE).name == "small"
    (blobs / FILE).symlink_to("/etc/hostname")
    with pytest.raises(InvalidModelFolder, match="leads out of the model folder"):
        ModelFolder.open(blobs / FILE)


def test_the_revision_changes_with_metadata_size_and_weights(tmp_path: pathlib.Path) -> None:
    first = opened(tmp_path, small()).revision
    assert opened(tmp_path, small()).revision == first
    other = small()
    other.metadata["general.name"] = "else"
    assert opened(tmp_path, other).revision != first
    raw = small().write(tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(raw + bytes(32))
    assert ModelFolder.open(tmp_path / FILE).revision != first
    (tmp_path / FILE).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert ModelFolder.open(tmp_path / FILE).revision != first


def rope(**changes: Any) -> Callable[[Gguf], None]:
    return lambda gguf: gguf.metadata.update({f"llama.rope.scaling.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (rope(type="linear", factor=4.0), ("linear", 4.0, 0, None)),
        (rope(type="none"), ("default", 1.0, 0, None)),
        (rope(type="yarn", factor=4.0, original_context_length=64), ("yarn", 4.0, 64, None)),
        (lambda g: g.metadata.update({"llama.rope.scale_linear": 2.0}), ("linear", 2.0, 0, None)),
    ],
)
def test_ways_of_stretching_the_context(
    tmp_path: pathlib.Path, change: Callable[[Gguf], None], expected: tuple[str, float, int, None]
) -> None:
    gguf = small()
    change(gguf)
    found = opened(tmp_path, gguf).config.description.rope
    assert (found.rope_type, found.factor, found.original_max_position_embeddings, found.attention_factor) == expected


def test_a_factor_on_yarns_sharpness_counts(tmp_path: pathlib.Path) -> None:
    gguf = small()
    rope(type="yarn", factor=4.0, original_context_length=64, attn_factor=0.5)(gguf)
    assert opened(tmp_path, gguf).config.description.rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_divisors_of_frequencies_are_read(tmp_path: pathlib.Path) -> None:
    gguf = small()
    gguf.tensors["rope_freqs.weight"] = ("F32", (4,), struct.pack("<4f", 1, 1.5, 4, 8))
    folder = opened(tmp_path, gguf)
    assert (
        folder.config.description.rope.frequency_divisors == (1.0, 1.5, 4.0, 8.0)
        and "rope_freqs.weight" not in folder.tensors
    )
    gguf.tensors["rope_freqs.weight"] = ("F32", (4,), struct.pack("<4f", 1, 0, 4, 8))
    assert "'rope_freqs.weight' must hold numbers from 1e-6" in refused(tmp_path, gguf)
    gguf.tensors["rope_freqs.weight"] = ("F32", (3,), struct.pack("<3f", 1, 1, 1))
    assert "'rope_freqs.weight' must be F32 [4]" in refused(tmp_path, gguf)


def test_the_window_of_mistral(tmp_path: pathlib.Path) -> None:
    gguf = small()
    gguf.metadata["llama.attention.sliding_window"] = 16
    config = opened(tmp_path, gguf).config
    assert (config.architecture, config.description.attention.window) == ("MistralForCausalLM", 16)


def _without(key: str) -> Callable[[Gguf], None]:
    return lambda gguf: gguf.metadata.pop(key)


def _with(**changes: Any) -> Callable[[Gguf], None]:
    return lambda gguf: gguf.metadata.update({key.replace("__", "."): value for key, value in changes.items()})


def _tensor(name: str, kind: str, shape: tuple[int, ...]) -> Callable[[Gguf], None]:
    numbers = int(np.prod(shape)) // KINDS[kind].inputs * KINDS[kind].num_bytes
    return lambda gguf: gguf.tensors.update({name: (kind, shape, bytes(numbers))})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("general.architecture"), "general.architecture is missing"),
        (_with(general__architecture="gemma"), "qwen3, qwen35, qwen35moe, qwen3moe, seed_oss, smollm3, is 'gemma'"),
        (_without("llama.block_count"), "llama.block_count is missing"),
        (_with(llama__block_count=0), "llama.block_count must be an integer from 1"),
        (_with(llama__block_count=2000), "num_hidden_layers must be an integer from 1 to 1024, is 2000"),
        (_with(llama__block_count=2), "tensor 'blk.1.attn_q.weight' is missing"),
        (_with(llama__attention__head_count="4"), "llama.attention.head_count must be an integer"),
        (_with(llama__attention__head_count=[4, 4]), "llama.attention.head_count must be an integer"),
        (_with(llama__attention__head_count_kv=3), "num_key_value_heads must divide"),
        (_with(llama__attention__value_length=16),
         "llama.attention.value_length must be the length of a head's key (8)"),
        (_with(llama__rope__dimension_count=4), "partial_rotary_factor must be 1: this architecture"),
        (_with(llama__embedding_length=64), "tensor 'token_embd.weight' has shape [9, 32], [9, 64] expected"),
        (_with(llama__vocab_size=10), "llama.vocab_size must be the rows of 'token_embd.weight' (9), is 10"),
        (_with(llama__expert_count=8), "llama.expert_used_count is missing"),
        (_with(split__count=3), "split.count is 3: a model split among files must be merged first"),
        (_with(llama__attention__layer_norm_rms_epsilon=float("nan")), "layer_norm_rms_epsilon must be a number"),
        (_with(llama__rope__scaling__type="longrope"),
         "llama.rope.scaling.type must be none, linear or yarn, is 'longrope'"),
        (_with(llama__tensor_data_layout="other"), "llama.tensor_data_layout must be 'reference'"),
        (_with(tokenizer__ggml__eos_token_id=9), "eos_token_id must be token ids from 0 to 8, has 9"),
        (_with(general__alignment=12), "general.alignment must be a multiple of 8"),
        (_with(general__alignment=Typed("u64", 1 << 40)), "general.alignment must be a multiple of 8"),
        (_with(**{"bad key": 1}), "metadata key 'bad key' must be ASCII without spaces"),
        (lambda g: g.tensors.pop("blk.0.ffn_up.weight"), "tensor 'blk.0.ffn_up.weight' is missing"),
        (lambda g: g.tensors.pop("token_embd.weight"), "tensor 'token_embd.weight' must be there"),
        (_tensor("blk.0.extra.weight", "F32", (4,)), "tensor 'blk.0.extra.weight' is surplus"),
        (_tensor("blk.0.ffn_up.weight", "Q4_0", (32, 64)),
         "tensor 'blk.0.ffn_up.weight' has shape [32, 64], [64, 32] expected"),
        (_tensor("blk.0.attn_norm.weight", "Q8_0", (32,)), "tensor 'blk.0.attn_norm.weight' has type Q8_0"),
        (lambda g: setattr(g, "version", 1), "version must be 2 or 3, is 1"),
        (lambda g: setattr(g, "version", 3 << 24), "version is big-endian"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path: pathlib.Path, change: Callable[[Gguf], None], said: str) -> None:
    gguf = small()
    change(gguf)
    assert said in refused(tmp_path, gguf)


def test_types_that_are_not_served_are_named(tmp_path: pathlib.Path) -> None:
    raw = bytearray(small().write(tmp_path / FILE).read_bytes())
    name = b"blk.0.ffn_up.weight"
    place = raw.index(name) + len(name) + 4 + 16
    raw[place : place + 4] = struct.pack("<I", 21)
    assert "tensor 'blk.0.ffn_up.weight' has the type IQ3_S, one of F32, F16, Q4_0" in refused(tmp_path, bytes(raw))
    raw[place : place + 4] = struct.pack("<I", 12)
    assert "has rows of 32 numbers, which Q4_K can't cut into blocks of 256" in refused(tmp_path, bytes(raw))


def _offset_place(raw: bytes, name: str) -> int:
    return raw.index(name.encode()) + len(name) + 4 + 16 + 4


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (0, "overlaps the tensor before it"),
        (33, "which is no multiple of 32"),
        (1 << 62, "is truncated"),
        ((1 << 64) - 32, "is truncated"),
    ],
)
def test_offsets_that_lie_are_refused(tmp_path: pathlib.Path, offset: int, said: str) -> None:
    raw = bytearray(small().write(tmp_path / FILE).read_bytes())
    place = _offset_place(raw, "blk.0.ffn_up.weight")
    raw[place : place + 8] = struct.pack("<Q", offset)
    assert said in refused(tmp_path, bytes(raw))


@pytest.mark.parametrize("count", [1 << 17 | 1, 1 << 32, (1 << 64) - 1])
@pytest.mark.parametrize("place", [8, 16])
def test_absurd_counts_cost_nothing(tmp_path: pathlib.Path, count: int, place: int) -> None:
    raw = bytearray(small().write(tmp_path / FILE).read_bytes())
    raw[place : place + 8] = struct.pack("<Q", count)
    assert "must be at most" in refused(tmp_path, bytes(raw))


@pytest.mark.parametrize("kind", [0, 4, 7, 8, 9, 12, 13, 77])
@pytest.mark.parametrize("count", [1 << 24, 1 << 61, (1 << 64) - 1])
def test_arrays_longer_than_the_file_are_not_begun(tmp_path: pathlib.Path, kind: int, count: int) -> None:
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, count)
    assert "is truncated" in refused(tmp_path, raw + bytes(100))


def test_arrays_of_more_entries_than_any_vocabulary_are_refused(tmp_path: pathlib.Path) -> None:
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 1 << 23)
    (tmp_path / FILE).write_bytes(raw)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(1 << 24)
    with pytest.raises(
        InvalidModelFolder,
        match=f"{FILE}: arrays have 8388608 entries together, with metadata 'k'; at most 4194304 are read",
    ):
        ModelFolder.open(tmp_path / FILE)


def test_arrays_of_a_whole_header_are_counted_together(tmp_path: pathlib.Path) -> None:
    """Each by itself is below the limit.

    An entry in a file is far smaller than what it becomes.

    The last is of texts without a letter.
    """
    count = 1 << 20
    raw = [b"GGUF", struct.pack("<IQQ", 3, 0, 5)]
    for key, kind, entry_bytes in [*((key, 0, 1) for key in "abcd"), ("e", 8, 8)]:
        raw += [struct.pack("<Q", 1), key.encode(), struct.pack("<IIQ", 9, kind, count), bytes(count * entry_bytes)]
    said = "arrays have 5242880 entries together, with metadata 'e'; at most 4194304 are read"
    assert said in refused(tmp_path, b"".join(raw))


def test_arrays_within_arrays_are_counted_too(tmp_path: pathlib.Path) -> None:
    inner = struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20)
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 5)
    assert "at most 4194304 are read" in refused(tmp_path, raw + inner * 5)


def test_a_header_of_more_bytes_than_any_is_refused(tmp_path: pathlib.Path) -> None:
    size = 64 << 20
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, size)
    (tmp_path / FILE).write_bytes(raw)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(len(raw) + size)
    with pytest.raises(InvalidModelFolder, match=f"{FILE}: metadata and tensor list have more than {size} bytes"):
        ModelFolder.open(tmp_path / FILE)


def test_arrays_within_arrays_end(tmp_path: pathlib.Path) -> None:
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    assert "nested more than" in refused(tmp_path, raw + struct.pack("<IQ", 9, 1) * 100_000)


def test_names_and_keys_occur_once(tmp_path: pathlib.Path) -> None:
    raw = bytearray(small().write(tmp_path / FILE).read_bytes())
    place = raw.index(b"blk.0.ffn_up.weight")
    twice = bytes(raw[:place]) + b"blk.0.ffn_up.weighx" + bytes(raw[place + 19 :])
    assert "'blk.0.ffn_up.weight' is missing" in refused(tmp_path, twice)
    entry = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 1)
    assert "key 'k' occurs twice" in refused(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry * 2)
    assert "must be true (1) or false (0), is 2" in refused(
        tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IB", 7, 2)
    )


def test_other_files_are_no_gguf(tmp_path: pathlib.Path) -> None:
    assert "is no GGUF file: it begins with b'GGML'" in refused(tmp_path, b"GGML" + bytes(100))
    assert "is truncated" in refused(tmp_path, b"")


_RAW: dict[str, bytes] = {}


@pytest.fixture
def raw(tmp_path: pathlib.Path) -> bytes:
    if "raw" not in _RAW:
        gguf = small()
        gguf.metadata |= {"tokenizer.ggml.tokens": ["a", "b"], "general.tags": ["x", "yy"], "a.flag": True}
        _RAW["raw"] = gguf.write(tmp_path / "whole").read_bytes()
    return _RAW["raw"]


@hypothesis.settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(tmp_path: pathlib.Path, raw: bytes, cut: float) -> None:
    refused(tmp_path, raw[: int(cut * (len(raw) - 32))])


@hypothesis.settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_any_damage_to_a_header_is_refused_or_harmless(tmp_path: pathlib.Path, raw: bytes, data: st.DataObject) -> None:
    """Nothing else than our refusal comes out, and what is accepted lies inside the file."""
    damaged = bytearray(raw)
    header_bytes = len(small().header()[0])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_bytes))] = data.draw(st.integers(0, 255))
    (tmp_path / FILE).write_bytes(damaged)
    try:
        folder = ModelFolder.open(tmp_path / FILE)
    except InvalidModelFolder as error:
        assert FILE in str(error)
    else:
        assert all(record.offset + record.num_bytes <= len(damaged) for record in folder.tensors.values())


def test_both_sides_know_the_same_types() -> None:
    assert {(number, kind.name, kind.block_inputs, kind.block_bytes) for number, kind in TYPES.items()} == {
        (kind.number, name, kind.inputs, kind.num_bytes) for name, kind in KINDS.items()
    }
