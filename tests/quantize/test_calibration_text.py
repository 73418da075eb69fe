"""Text becomes pieces; what is held out is never calibrated on."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.quantize.quantize_parts import DRAFT, request, write_text
from tokenizers import Tokenizer

from headrace_quantize.calibration_text import CalibrationText, read_pieces
from headrace_quantize.checks import QuantizeRefused

TOKENIZER = DRAFT / "tokenizer.json"


def pieces(text: pathlib.Path, **options: object) -> CalibrationText:
    given_options = {"method": "gptq", "calibration": (str(text),), **options}
    return read_pieces(request(DRAFT, text.parent / "out", **given_options), TOKENIZER)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    # Longer texts are tokenized in parts, between which no token spans.
    path = write_text(tmp_path_factory.mktemp("text"), 100)
    assert path.stat().st_size < 1 << 16
    return path


# A piece of a few ids may occur twice in a text of templates.
@pytest.mark.slow  # Texts change with their corpora alone.
@settings(max_examples=12)
@given(length=st.integers(16, 300), samples=st.integers(1, 12))
def test_no_text_is_both_calibrated_on_and_held_out(text: pathlib.Path, length: int, samples: int) -> None:
    found = pieces(text, sequence_length=length, samples=samples)
    assert len(found.calibration) == samples and found.held_out
    assert {len(piece) for piece in (*found.calibration, *found.held_out)} == {length}
    opening = Tokenizer.from_file(str(TOKENIZER)).encode("").ids
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(text.read_text(), add_special_tokens=False).ids
    body = length - len(opening)
    whole = [opening + ids[first : first + body] for first in range(0, len(ids) - body + 1, body)]
    assert whole[-len(found.held_out) :] == found.held_out
    border = len(whole) - len(found.held_out)
    assert border * body > 0.85 * len(ids) or len(found.held_out) == 1
    places = [whole.index(piece) for piece in found.calibration]
    assert all(place < border for place in places)
    assert len(set(places)) > len(places) // 2


def test_another_file_to_measure_with_leaves_all_of_the_text(text: pathlib.Path) -> None:
    other = write_text(text.parent, 30, "other.txt", seed=2)
    alone, beside = pieces(text, samples=4), pieces(text, samples=4, evaluation=str(other))
    assert beside.held_out != alone.held_out and beside.digest != alone.digest
    assert beside.calibration[0] == alone.calibration[0]
    assert beside.calibration[-1] != alone.calibration[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a few words", "--calibration has text for 0 samples of 64 tokens beside the tenth .*, --samples is 16"),
        (b" \n\t\n" * 2000, "--calibration: .*bad.txt holds nothing but white space"),
        (b"word " * 200, "; --samples 2 works|; --samples 3 works|; --samples 1 works"),
        (b"\xff\xfe", "is not UTF-8 at byte 0"),
    ],
)
def test_text_that_does_not_suffice_is_refused(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(QuantizeRefused, match=message):
        pieces(tmp_path / "bad.txt")


def test_a_short_text_to_measure_with_is_refused(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(QuantizeRefused, match="has less than --sequence-length 64 tokens"):
        pieces(text, evaluation=str(tmp_path / "short.txt"))
