"""generation_config.json: the sampling defaults that a model's makers recommend. Everything else in that file configures `transformers` and is not read."""

from __future__ import annotations

import dataclasses
import pathlib

from headrace_model_folder.bounded_files import MIB, exists_inside, read_json_object
from headrace_model_folder.fields import Fields

GENERATION_FILE = "generation_config.json"


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests that leave a parameter out. None: the model's makers say nothing."""

    # 0 means greedy.
    temperature: float | None = None
    top_p: float | None = None
    # 0 means all tokens.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    # Empty if neither generation_config.json nor config.json names one.
    eos_token_ids: tuple[int, ...] = ()


def read_generation_defaults(
    folder: pathlib.Path, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> GenerationDefaults:
    """Reads generation_config.json if the folder has one.

    Args:
        folder: The model folder.
        vocab_size: Bound of token ids.
        eos_token_ids: config.json's ids, used where generation_config.json names none.

    Raises:
        InvalidModelFolder: a value out of range, naming the field.
    """
    if not exists_inside(folder, GENERATION_FILE):
        return GenerationDefaults(eos_token_ids=eos_token_ids)
    fields = Fields(GENERATION_FILE, read_json_object(folder, GENERATION_FILE, MIB))

    def number(key: str, low: float, high: float) -> float | None:
        return None if fields.get(key) is None else fields.number(key, low, high)

    return GenerationDefaults(
        temperature=0.0 if fields.get("do_sample") is False else number("temperature", 0.0, 100.0),
        top_p=number("top_p", 1e-6, 1.0),
        # A top_k above the vocabulary keeps all tokens, and so does 0.
        top_k=None if fields.get("top_k") is None else min(fields.integer("top_k", 0, 1 << 31), vocab_size),
        min_p=number("min_p", 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1e-3, 1e3),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size) or eos_token_ids,
    )
