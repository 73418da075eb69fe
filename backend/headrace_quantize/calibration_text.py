"""Text files -> pieces of token ids: those to calibrate on, and those to measure with.

Owns the division: the last tenth of the calibration text is held out unless there is a file to
evaluate on, and what is calibrated on are pieces spread evenly over the rest. Nothing is drawn at
random, so that a run that is resumed sees the same pieces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from headrace_quantize.checks import QuantizeRefused
from headrace_quantize.config import QuantizeConfig

_MOST_BYTES = 256 << 20
# A tokenizer is given the text in parts of whole lines of about so many characters: all cores work,
# and no part is long.
_PART_CHARACTERS = 1 << 16
_HELD_OUT_SHARE = 10
# Each is read by both models.
_MOST_HELD_OUT = 64

Pieces = list[list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationText:
    """Pieces of `sequence_length` ids."""

    calibration: Pieces
    held_out: Pieces
    # Of all files.
    digest: str


def read_pieces(config: QuantizeConfig, tokenizer_path: pathlib.Path) -> CalibrationText:
    """The text that a request names; empty lists where it names none.

    Raises:
        QuantizeRefused: A file can't be read, is no UTF-8, has no text or too much; there is less
            text than the samples take.
    """
    tokenizer, length = Tokenizer.from_file(str(tokenizer_path)), config.sequence_length
    texts = [_read("--calibration", file) for file in config.calibration]
    pieces = _pieces(tokenizer, texts, length)
    digest = hashlib.sha256()
    evaluation: list[str] = []
    if config.evaluation is not None:
        evaluation = [_read("--evaluation", config.evaluation)]
        held_out = _pieces(tokenizer, evaluation, length)[:_MOST_HELD_OUT]
        if not held_out:
            raise QuantizeRefused(f"--evaluation: {config.evaluation} has less than --sequence-length {length} tokens")
    else:
        count = min(max(len(pieces) // _HELD_OUT_SHARE, 1), _MOST_HELD_OUT) if texts else 0
        pieces, held_out = pieces[: max(len(pieces) - count, 0)], pieces[max(len(pieces) - count, 0) :]
    for text in (*texts, "evaluation", *evaluation):
        digest.update(hashlib.sha256(text.encode()).digest())
    return CalibrationText(_spread(pieces, config) if texts else [], held_out, digest.hexdigest())


def _spread(pieces: Pieces, config: QuantizeConfig) -> Pieces:
    if len(pieces) < config.samples:
        held = "" if config.evaluation else " beside the tenth that is held out"
        works = f"; --samples {len(pieces)} works" if pieces else ""
        raise QuantizeRefused(
            f"--calibration has text for {len(pieces)} samples of {config.sequence_length} tokens{held}, --samples is "
            f"{config.samples}{works}"
        )
    return [pieces[index * len(pieces) // config.samples] for index in range(config.samples)]


def _read(flag: str, file: str) -> str:
    path = pathlib.Path(file)
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise QuantizeRefused(f"{flag}: {file} has {size:,} bytes, at most {_MOST_BYTES:,} are read")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise QuantizeRefused(f"{flag}: {file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise QuantizeRefused(f"{flag}: {file} is not UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise QuantizeRefused(f"{flag}: {file} holds nothing but white space")
    return text


def _pieces(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Pieces:
    """The texts' ids, cut; each piece begins as the tokenizer begins a text."""
    opening = tokenizer.encode("").ids[: length - 1]
    parts = [part for text in texts for part in _parts(text)]
    encoded = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    ids = list(itertools.chain.from_iterable(part.ids for part in encoded))
    body = length - len(opening)
    return [opening + ids[first : first + body] for first in range(0, len(ids) - body + 1, body)]


def _parts(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _PART_CHARACTERS) + 1 or len(text)
        yield text[begin:end]
        begin = end
