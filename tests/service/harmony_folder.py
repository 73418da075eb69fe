"""A small model folder as gpt-oss's: its kind of tokenizer, its special tokens, a template."""

from __future__ import annotations

import json
import pathlib
from typing import Any
from unittest import mock

from tests.service.model_folder import write_model_folder
from tiktoken_ext import openai_public
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (pathlib.Path(__file__).parent / "harmony.jinja").read_text()
# In the order of their ids.
SPECIAL = (
    "<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>", "<|constrain|>",
    "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|reserved_200009|>",
    "<|reserved_200010|>", "<|reserved_200011|>", "<|call|>", "<|reserved_200013|>",
)  # fmt: skip
# Those that generation_config.json names: conversions have left <|call|> out.
ENDS = ("<|return|>", "<|endoftext|>")
_CORPUS = [
    "assistant analysis commentary final to=functions.weather json They ask for the weather, so I'll look it up.",
    "größer naïve DON'T don't CamelCase HTTPServer x=1; 12345 67  \n\n\t東京 日本語 🙂🙃 /path/to\n",
] * 20


def _encoding() -> dict[str, Any]:
    """What tiktoken knows of gpt-oss's tokenizer, but for the ranks that it would fetch."""
    with mock.patch.object(openai_public, "load_tiktoken_bpe", lambda *args, **named: {}):
        return openai_public.o200k_harmony()


def split_pattern() -> str:
    """The expression by which gpt-oss's tokenizer splits text."""
    return str(_encoding()["pat_str"])


def full_size_tokenizer() -> bytes:
    """A tokenizer.json of gpt-oss's size, with all of its special tokens at their ids."""
    saved = json.loads(harmony_tokenizer().to_str())
    plain = [token for token in saved["model"]["vocab"] if token not in SPECIAL]
    special = {number: text for text, number in _encoding()["special_tokens"].items()}
    plain += [f"word{number}" for number in range(len(plain), min(special))]
    saved["model"]["vocab"] = {token: number for number, token in enumerate(plain)}
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    saved["added_tokens"] = [{"id": number, "content": special[number], **shape} for number in sorted(special)]
    return json.dumps(saved).encode()


def harmony_tokenizer(ignore_merges: bool = False) -> Tokenizer:
    """A byte-level BPE with that expression and harmony's special tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(split_pattern()), "removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def write_harmony_folder(folder: pathlib.Path, template: str = TEMPLATE) -> pathlib.Path:
    """Writes the folder and returns its path."""
    write_model_folder(folder, template)
    tokenizer = harmony_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    ends = [tokenizer.token_to_id(text) for text in ENDS]
    config |= {"vocab_size": tokenizer.get_vocab_size() + 8, "bos_token_id": None, "eos_token_id": ends[0]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
