"""Vocabularies of GGUF files.

Texts become the ids that the model's own tokenizer gives, or the file is refused by key.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model_folder.test_gguf import FILE, VOCAB, opened, refused, small
from tests.support.examples import examples
from tests.support.gguf_writer import Gguf, demo_tokenizer, from_folder
from tests.support.running_server import DEMO
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_model_folder.gguf.tokenizer import gguf_tokenizer_json
from headrace_model_folder.token_table import parse_token_table

# Of the embedding.
ROWS = 1 << 15
CORPUS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; it's WE'LL see, I'd say.\n\n  Two  spaces\tand tabs.",
    "Größe, naïve café, Ελληνικά, русский текст, 日本語のテキスト, العربية, e\u0301 composed, 👩‍👩‍👧 and \U0001f600.",
    "def f(x):\r\n    return x**2 + 3.14159  # comment /* */\r\n",
    "I'LL they'Ve CamelCaseWords ALLCAPS mixedCASE 1000000 1,000,000.00",
] * 4  # fmt: skip
TEXTS = [
    *dict.fromkeys(CORPUS),
    "",
    " ",
    "\n",
    "  a",
    "a  ",
    "<|x|>inside<|x|>",
    "\u00e9 e\u0301",
    "x" * 300,
    "1234567",
    "don't DON'T",
]
_CUTS = {
    # As the models' own tokenizer.json files have them.
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "llama-bpe": pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
            r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "qwen2": pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
            r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "tekken": pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "gpt-4o": pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
}  # fmt: skip
_CUTS["qwen35"] = pre_tokenizers.Sequence([
    pre_tokenizers.Split(tokenizers.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| "
        r"?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # fmt: skip
_CUTS["deepseek-r1-qwen"] = _CUTS["qwen2"]
_CUTS["glm4"] = _CUTS["chatglm-bpe"] = _CUTS["dbrx"] = _CUTS["llama-bpe"]
_COMPOSED = {"qwen2", "qwen35", "deepseek-r1-qwen"}
_BOS = {"llama-bpe", "tekken"}


def trained(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer of the kind, with two special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in _BOS))
    tokenizer.pre_tokenizer = _CUTS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "<|x|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metadata_of(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "<|x|>") else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
    }


def made(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    source = gguf_tokenizer_json(FILE, metadata, ROWS)
    assert source is not None
    return tokenizers.Tokenizer.from_buffer(source)


@pytest.mark.parametrize("pre", list(_CUTS))
def test_byte_level_vocabularies_encode_as_their_own_tokenizers(pre: str) -> None:
    theirs = trained(pre)
    metadata = metadata_of(theirs, pre)
    ours, table = made(metadata), parse_token_table(gguf_tokenizer_json(FILE, metadata, ROWS) or b"")
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        expected = text if pre not in _COMPOSED else tokenizers.normalizers.NFC().normalize_str(text)
        assert b"".join(table.token_bytes[i] or b"?" for i in ids).decode() == expected
        # Llama 3's and Mistral's kinds begin with the first token unless the file says otherwise.
        assert ours.encode(text).ids == ([0] if pre in _BOS else []) + ids
    assert table.special_ids == {0, 1}


@settings(max_examples=examples(60), deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_encoded_alike(text: str) -> None:
    theirs, ours = _PAIR
    assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


_THEIRS = trained("llama-bpe")
_PAIR = _THEIRS, made(metadata_of(_THEIRS, "llama-bpe"))


def test_metadata_decide_what_stands_before_and_behind(tmp_path: pathlib.Path) -> None:
    metadata = metadata_of(trained("gpt-2"), "gpt-2") | {"tokenizer.ggml.eos_token_id": 1}
    assert made(metadata).encode("a").ids == made(metadata).encode("a", add_special_tokens=False).ids
    both = made(metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("a").ids == [0, *both.encode("a", add_special_tokens=False).ids, 1]


# ---- SentencePiece ----

_PIECES = [
    "\u2581the",
    "\u2581th",
    "\u2581t",
    "he",
    "th",
    "er",
    "\u2581",
    "t",
    "h",
    "e",
    "r",
    "s",
    "in",
    "i",
    "n",
    "\u2581in",
    "\u2581the",
    "\u2581\u2581",
    "ing",
    "g",
    "\u00e9",
]


def sentencepiece_metadata(prefix: bool = True) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 bytes, pieces by falling score, a control and a user-defined token."""
    pieces = list(dict.fromkeys(_PIECES))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|im|>", "[USER]"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 3, 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def greedy(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE as it is described.

    Again and again the neighbours whose union has the best score, the first of equals; what is no
    piece becomes bytes.
    """
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {t: s for t, s, k in zip(tokens, metadata["tokenizer.ggml.scores"], kinds, strict=True) if k == 1}
    prefix = "\u2581" if metadata["tokenizer.ggml.add_space_prefix"] and text else ""
    symbols = list(prefix + text.replace(" ", "\u2581"))
    while True:
        joined = [
            (-scores[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in scores
        ]
        if not joined:
            break
        _, place = min(joined)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    ids = {token: number for number, token in reversed(list(enumerate(tokens)))}
    return [n for s in symbols for n in ([ids[s]] if s in scores else [3 + byte for byte in s.encode()])]


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(alphabet="then rsig\u00e9\n\u65e5", max_size=24), prefix=st.booleans())
def test_sentencepiece_vocabularies_are_merged_by_score(text: str, prefix: bool) -> None:
    metadata = sentencepiece_metadata(prefix)
    tokenizer = made(metadata)
    assert tokenizer.encode(text, add_special_tokens=False).ids == greedy(text, metadata)
    assert tokenizer.encode(text).ids == [1, *greedy(text, metadata)]
    assert tokenizer.decode(greedy(text, metadata)) == text


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(alphabet="then rsig\u00e9\n\u65e5", max_size=24))
def test_sentencepiece_vocabularies_with_merges_of_their_own_are_merged_by_them(text: str) -> None:
    """Gemma 4's: scores say nothing, and no space is put before a text."""
    by_score = sentencepiece_metadata(False)
    pieces = dict.fromkeys(_PIECES)
    merges = [f"{piece[:cut]} {piece[cut:]}" for piece in pieces for cut in range(1, len(piece))]
    stated = [merge for merge in merges if set(merge.split(" ")) <= set(pieces)]
    scores = [0.0] * len(by_score["tokenizer.ggml.tokens"])
    own = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.scores": scores, "tokenizer.ggml.merges": stated}
    metadata = {key: value for key, value in by_score.items() if not key.endswith("add_space_prefix")} | own
    tokenizer = made(metadata)
    assert tokenizer.encode(text, add_special_tokens=False).ids == greedy(text, by_score)
    assert tokenizer.encode(text).ids == [1, *greedy(text, by_score)]
    assert tokenizer.decode(greedy(text, by_score)) == text


def test_sentencepieces_special_tokens_are_found_in_texts() -> None:
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = made(metadata).encode("the<|im|>in[USER]", add_special_tokens=False).ids
    assert ids[0] == tokens.index("\u2581the") and tokens.index("<|im|>") in ids and ids[-1] == tokens.index("[USER]")
    table = parse_token_table(gguf_tokenizer_json(FILE, metadata, ROWS) or b"")
    assert tokens.index("<|im|>") in table.special_ids and tokens.index("[USER]") not in table.special_ids
    assert table.strips_leading_space and table.token_bytes[3 + 65] == b"A"
    assert not parse_token_table(
        gguf_tokenizer_json(FILE, sentencepiece_metadata(False), ROWS) or b""
    ).strips_leading_space


# ---- whole files ----


def test_the_demo_models_tokenizer_travels_in_a_file(tmp_path: pathlib.Path) -> None:
    gguf, _ = from_folder(DEMO, "F16")
    gguf.metadata |= demo_tokenizer(DEMO)
    folder, plain = ModelFolder.open(gguf.write(tmp_path / FILE)), ModelFolder.open(DEMO)
    assert folder.token_table == plain.token_table
    assert folder.chat_template == plain.chat_template
    assert folder.template.special_tokens["bos_token"] == plain.template.special_tokens["bos_token"]
    assert folder.generation_defaults.eos_token_ids == plain.generation_defaults.eos_token_ids
    ours, theirs = (
        tokenizers.Tokenizer.from_buffer(folder.tokenizer_json()),
        tokenizers.Tokenizer.from_buffer(plain.tokenizer_json()),
    )
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_a_vocabulary_travels_in_a_file(tmp_path: pathlib.Path) -> None:
    gguf = small()
    metadata = sentencepiece_metadata()
    gguf.metadata |= {key: value for key, value in metadata.items() if "token_id" not in key}
    entries = len(metadata["tokenizer.ggml.tokens"])
    said = f"tokenizer.ggml.tokens has {entries} entries, more than the embedding has rows ({VOCAB})"
    assert said in refused(tmp_path, gguf) and VOCAB < 259


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "bert"},
         "tokenizer.ggml.model must be gpt2 (byte-level BPE), llama or gemma4 (SentencePiece BPE), is 'bert'"),
        ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre must be one of gpt-2, llama-bpe"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre must be one of gpt-2, llama-bpe"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is missing or empty"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of str"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type must have an entry for each of"),
        ({"tokenizer.ggml.merges": ["a"]},
         "tokenizer.ggml.merges entry 0 must be two tokens that make a third, is 'a'"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "tokenizer.ggml.merges entry 0"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges entry 0"),
        ({"tokenizer.ggml.bos_token_id": 1000, "tokenizer.ggml.add_bos_token": True},
         "tokenizer.ggml.bos_token_id must be an integer from 0 to"),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false"),
        ({"tokenizer.huggingface.json": 5}, "tokenizer.huggingface.json must be a string"),
    ],
)  # fmt: skip
def test_vocabularies_that_contradict_themselves_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidModelFolder) as error:
        gguf_tokenizer_json(FILE, metadata_of(_THEIRS, "llama-bpe") | changes, ROWS)
    assert str(error.value).startswith(FILE) and said in str(error.value)


def test_scores_must_be_there_for_sentencepiece() -> None:
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(InvalidModelFolder, match=r"tokenizer\.ggml\.scores must have an entry for each"):
        gguf_tokenizer_json(FILE, metadata, ROWS)


def sentencepieces(*tokens: str) -> dict[str, Any]:
    """A vocabulary of these and no others, all normal."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
    }


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["x" * 1025, "y"], "has a token of 1025 characters, at most 1024 are read"),
        (["x" * (1 << 25)], "has a token of 33554432 characters, at most 1024 are read"),
        ([f"{number:01000d}" for number in range(1 << 13 | 1 << 9)],
         "has 8704000 characters, at most 8388608 are read"),
        (["x"] * (ROWS + 1), f"has {ROWS + 1} entries, more than the embedding has rows ({ROWS})"),
        ([letter * size for letter in "abc" for size in range(1, 1025)],
         "make merges of more than 67108864 characters"),
    ],
)  # fmt: skip
def test_vocabularies_that_would_take_a_reader_for_ever_are_refused(tokens: list[str], said: str) -> None:
    with pytest.raises(InvalidModelFolder) as error:
        gguf_tokenizer_json(FILE, sentencepieces(*tokens), ROWS)
    assert str(error.value).startswith(f"{FILE}: tokenizer.ggml.tokens {said}")


def test_a_vocabulary_at_the_limits_is_read() -> None:
    whole = "".join(chr(0x4E00 + number) for number in range(1024))
    tokens = ["a", "b", "ab", whole, whole[:1], whole[1:]]
    source = gguf_tokenizer_json(FILE, sentencepieces(*tokens), len(tokens))
    assert json.loads(source or b"")["model"]["merges"] == [["a", "b"], [whole[:1], whole[1:]]]


def test_a_chat_template_must_be_a_text_of_some_size(tmp_path: pathlib.Path) -> None:
    gguf: Gguf = small()
    gguf.metadata["tokenizer.chat_template"] = "{{ messages }}"
    assert opened(tmp_path, gguf).chat_template == "{{ messages }}"
    gguf.metadata["tokenizer.chat_template"] = "x" * ((1 << 20) + 1)
    assert "tokenizer.chat_template has 1048577 characters" in refused(tmp_path, gguf)
    gguf.metadata["tokenizer.chat_template"] = 3
    assert "tokenizer.chat_template must be a string" in refused(tmp_path, gguf)
