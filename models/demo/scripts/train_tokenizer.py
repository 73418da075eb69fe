"""Trains the demo model's byte-level BPE tokenizer and writes its Hugging Face files.

Owns the vocabulary and the splitting rule; the chat template is that of `tool_corpus.layout`.
Digits are always single tokens, so that arithmetic sees columns. A capitalised word never carries
the space before it: a name has the same tokens wherever it stands, which makes copying it exactly
something a small model can learn.

    python train_tokenizer.py --out FOLDER [--documents 40000] [--vocab 4096] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from corpus import document_texts
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tool_corpus.layout import CHAT_TEMPLATE

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
SPLIT = (
    r"\p{N}|\p{Lu}+(?!\p{Ll})|\p{Lu}\p{Ll}*| ?\p{Ll}+(?:'\p{Ll}+)?|[\p{Lo}\p{Lm}\p{Lt}\p{M}]+"
    r"| ?[^\s\p{L}\p{N}]+|\s+"
)


def build_tokenizer() -> Tokenizer:
    """An untrained tokenizer with our splitting rule; encoding plain text puts `<|bos|>` first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sample(documents: int, seed: int) -> Iterator[str]:
    yield from document_texts(seed, documents)


def train_tokenizer(documents: int, vocab_size: int, seed: int) -> Tokenizer:
    """Learns the merges from seeded corpus documents; equal arguments give equal tokenizers."""
    tokenizer = build_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents, seed), trainer)
    _fill_vocabulary(tokenizer, vocab_size)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def _fill_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Adds reserved tokens until the vocabulary has its size.

    A small corpus may give fewer merges than asked for; so ids and embedding rows are equally many.
    """
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(missing)])
    assert tokenizer.get_vocab_size() == vocab_size


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the demo tokenizer.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=40000)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_tokenizer(train_tokenizer(options.documents, options.vocab, options.seed), options.out)


if __name__ == "__main__":
    main()
