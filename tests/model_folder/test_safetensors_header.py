"""safetensors headers that do not describe their file exactly are refused by file and tensor."""

import json
import pathlib
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies
from tests.model_folder.folders import write_safetensors
from tests.support.examples import examples

from headrace_model_folder import InvalidModelFolder
from headrace_model_folder.safetensors_header import read_header

FILE = "model.safetensors"


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def refused(folder: pathlib.Path) -> str:
    with pytest.raises(InvalidModelFolder) as error:
        read_header(folder, FILE)
    assert FILE in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_valid_file_is_described(tmp_path: pathlib.Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry(8, 24, [2, 2]),
        "a": entry(0, 8),
        "empty": entry(24, 24, [0, 5]),
    }
    write_safetensors(tmp_path / FILE, header, 24)
    found = read_header(tmp_path, FILE)
    start = found.file_size - 24
    assert {name: (r.shape, r.offset - start, r.num_bytes) for name, r in found.tensors.items()} == {
        "a": ((2,), 0, 8),
        "b": ((2, 2), 8, 16),
        "empty": ((0, 5), 24, 0),
    }


@pytest.mark.parametrize(
    ("header", "num_bytes", "rule", "tensor"),
    [
        ({"a": entry(0, 16)}, 12, "truncated", "a"),
        ({"a": entry(0, 16)}, 20, "after its last tensor", None),
        ({"a": entry(0, 16), "b": entry(8, 24)}, 24, "overlaps", "b"),
        ({"a": entry(0, 16), "b": entry(20, 24)}, 24, "hole", "b"),
        ({"a": entry(4, 16)}, 16, "hole", "a"),
        ({"a": entry(0, 16, [5])}, 16, "needs 20 bytes", "a"),
        ({"a": entry(0, 16, [2**62, 2**62])}, 16, "needs", "a"),
        ({"a": entry(0, 16, [0, 2**62])}, 16, "needs 0 bytes", "a"),
        ({"a": entry(0, 16, [-4])}, 16, "shape", "a"),
        ({"a": entry(0, 16, [True, 4])}, 16, "shape", "a"),
        ({"a": entry(0, 16, [1] * 99 + [4])}, 16, "shape", "a"),
        ({"a": entry(0, 16, dtype="F31")}, 16, "dtype", "a"),
        ({"a": {"dtype": "F32", "shape": [4]}}, 16, "data_offsets", "a"),
        ({"a": {**entry(0, 16), "data_offsets": [16, 0]}}, 16, "data_offsets", "a"),
        ({"a": {**entry(0, 16), "more": 1}}, 16, "exactly", "a"),
        ({"a": []}, 16, "exactly", "a"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__", None),
        (b"[]", 0, "object", None),
        (b'{"a": 1, "a": 2}', 0, "twice", "a"),
        (b'{"a": NaN}', 0, "NaN", None),
        (b"{" * 100_000, 0, "JSON", None),
        (b"\xff\xff", 0, "JSON", None),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(
    tmp_path: pathlib.Path, header: Any, num_bytes: int, rule: str, tensor: str | None
) -> None:
    write_safetensors(tmp_path / FILE, header, num_bytes)
    message = refused(tmp_path)
    assert rule in message
    assert tensor is None or f"'{tensor}'" in message


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused_unread(tmp_path: pathlib.Path, length: int) -> None:
    (tmp_path / FILE).write_bytes(length.to_bytes(8, "little") + b"{}")
    assert "header" in refused(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path: pathlib.Path, size: int) -> None:
    write_safetensors(tmp_path / FILE, {"a": entry(0, 16)}, 16)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:size])
    assert "truncated" in refused(tmp_path)


def test_hostile_names_can_not_break_the_line(tmp_path: pathlib.Path) -> None:
    write_safetensors(tmp_path / FILE, {"x\n\x1b[31m" + "y" * 10_000: entry(0, 16, [5])}, 16)
    assert len(refused(tmp_path)) < 400


@hypothesis.settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=strategies.data())
def test_a_mutated_file_is_read_or_refused_but_never_out_of_bounds(
    tmp_path: pathlib.Path, data: strategies.DataObject
) -> None:
    valid = json.dumps({"a": entry(0, 8), "b": entry(8, 24, [2, 2])}).encode()
    raw = bytearray(len(valid).to_bytes(8, "little") + valid + bytes(24))
    for _ in range(data.draw(strategies.integers(0, 4))):
        raw[data.draw(strategies.integers(0, len(raw) - 1))] = data.draw(strategies.integers(0, 255))
    (tmp_path / FILE).write_bytes(raw[: data.draw(strategies.integers(0, len(raw)))])
    try:
        found = read_header(tmp_path, FILE)
    except InvalidModelFolder:
        return
    size = (tmp_path / FILE).stat().st_size
    assert all(0 <= r.offset <= r.offset + r.num_bytes <= size for r in found.tensors.values())
