"""The vocabulary in a GGUF file's metadata as a tokenizer.json and a chat template.

Owns the three kinds of vocabulary that our tokenizer stack can express exactly: byte-level BPE
("gpt2") with the ways of cutting text that it names, SentencePiece's BPE ("llama"), whose merges
follow from its scores, and the same with merges of its own ("gemma4"). Any other is refused by
name. A file may hold the whole tokenizer.json instead.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_model_folder.chat_template import TEMPLATE_LIMIT, ChatTemplate
from headrace_model_folder.errors import shown
from headrace_model_folder.fields import Fields

_PREFIX = "tokenizer.ggml."
_WHOLE = "tokenizer.huggingface.json"
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_WORDS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_WORDS
# Qwen 3.5's: marks belong to words.
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What vocabularies are far from (the largest have some 2^18 tokens of at most a few hundred
# characters); beyond, making merges of scores would take a file's reader hours or all memory.
_MAX_TOKEN_CHARACTERS = 1024
_MAX_CHARACTERS = 1 << 23
_MAX_MERGE_CHARACTERS = 1 << 26
# Name in the file -> where text is cut before tokens are merged, and whether a word that is a token
# is taken whole; the latter begin texts with their first token too.
_CUTS = {
    "gpt-2": (_GPT2, False),
    "llama-bpe": (_LLAMA3, True),
    "llama3": (_LLAMA3, True),
    "llama-v3": (_LLAMA3, True),
    "qwen2": (_QWEN2, False),
    "qwen35": (_QWEN35, False),
    # Qwen's vocabulary under other special tokens, cut alike (llama.cpp's `llama-vocab.cpp`).
    "deepseek-r1-qwen": (_QWEN2, False),
    "tekken": (_TEKKEN, True),
    # gpt-oss and Phi-4-mini; GLM-4, Phi-4 and OLMo 2, which cut as Llama 3 does.
    "gpt-4o": (_O200K, False),
    "glm4": (_LLAMA3, False),
    "chatglm-bpe": (_LLAMA3, False),
    "dbrx": (_LLAMA3, False),
}
# Qwen's own tokenizer composes characters first.
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")


def gguf_tokenizer_json(file: str, metadata: dict[str, Any], vocab_size: int) -> bytes | None:
    """Makes a tokenizer.json that encodes as the file's vocabulary says; None if it has none.

    Args:
        file: Name of the file, for messages.
        metadata: Metadata of the file's header.
        vocab_size: Rows of the embedding, which is as many tokens as there may be.

    Raises:
        InvalidModelFolder: a vocabulary that can't be expressed or contradicts itself; file, key
            and rule are named.
    """
    fields = Fields(file, metadata)
    if _WHOLE in metadata:
        return fields.text(_WHOLE).encode()
    kind = metadata.get(f"{_PREFIX}model", "no_vocab")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama", "gemma4"):
        raise fields.error(
            f"{_PREFIX}model",
            f"must be gpt2 (byte-level BPE), llama or gemma4 (SentencePiece BPE), is {shown(kind)}",
        )
    vocabulary = _Vocabulary(fields, vocab_size)
    made = _byte_level(fields, vocabulary) if kind == "gpt2" else _sentencepiece(fields, vocabulary, kind)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        **made,
        "post_processor": _frame(fields, vocabulary, _begins_texts(fields, kind)),
    }
    return msgspec.json.encode(document)


def gguf_chat_template(file: str, metadata: dict[str, Any]) -> ChatTemplate:
    """The chat template, and the special tokens it may name.

    Raises InvalidModelFolder for a template that is no text or too long.
    """
    fields = Fields(file, metadata)
    source = fields.text(_TEMPLATE) if _TEMPLATE in metadata else None
    if source is not None and len(source) > TEMPLATE_LIMIT:
        raise fields.error(_TEMPLATE, f"has {len(source)} characters, at most {TEMPLATE_LIMIT} are read")
    tokens = metadata.get(f"{_PREFIX}tokens", [])
    named: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"{_PREFIX}{key}_token_id")
        if (
            type(number) is int
            and isinstance(tokens, list)
            and 0 <= number < len(tokens)
            and isinstance(tokens[number], str)
        ):
            named[f"{name}_token"] = tokens[number]
    return ChatTemplate(source, named)


class _Vocabulary:
    """Tokens with their kinds, checked."""

    def __init__(self, fields: Fields, vocab_size: int) -> None:
        self._fields = fields
        self.tokens: list[str] = self._list("tokens", str)
        self._check_sizes(vocab_size)
        self.kinds: list[int] = self._list("token_type", int) or [_NORMAL] * len(self.tokens)
        self._same_length("token_type", self.kinds)

    def _check_sizes(self, vocab_size: int) -> None:
        longest = max(map(len, self.tokens), default=0)
        characters = sum(map(len, self.tokens))
        if not self.tokens:
            rule = "is missing or empty"
        elif len(self.tokens) > vocab_size:
            rule = f"has {len(self.tokens)} entries, more than the embedding has rows ({vocab_size})"
        elif longest > _MAX_TOKEN_CHARACTERS:
            rule = f"has a token of {longest} characters, at most {_MAX_TOKEN_CHARACTERS} are read"
        elif characters > _MAX_CHARACTERS:
            rule = f"has {characters} characters, at most {_MAX_CHARACTERS} are read"
        else:
            return
        raise self._fields.error(f"{_PREFIX}tokens", rule)

    def scores(self) -> list[float]:
        """Score of each token."""
        scores = self._list("scores", float)
        self._same_length("scores", scores)
        return scores

    def merges(self) -> list[list[str]]:
        """Pairs that are merged, in order."""
        known, pairs = set(self.tokens), []
        for index, merge in enumerate(self._list("merges", str)):
            # Only the space between the two is one: the alphabet has another character for it.
            pair = merge.split(" ")
            if len(pair) != 2 or pair[0] not in known or pair[1] not in known or "".join(pair) not in known:
                raise self._fields.error(
                    f"{_PREFIX}merges", f"entry {index} must be two tokens that make a third, is {shown(merge)}"
                )
            pairs.append(pair)
        return pairs

    def ids(self) -> dict[str, int]:
        """Token -> id. Of equal tokens, which some files fill up with, text becomes the first."""
        ids: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            ids.setdefault(token, number)
        return ids

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in texts as they are. Control tokens are no part of answers."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": self.tokens[number], **plain, "special": kind == _CONTROL}
            for number, kind in enumerate(self.kinds)
            if kind in (_CONTROL, _USER_DEFINED) and self.tokens[number]
        ]

    def id_of(self, key: str) -> int | None:
        """The token that metadata name for a purpose; None if they name none."""
        name = f"{_PREFIX}{key}_token_id"
        return None if self._fields.get(name) is None else self._fields.integer(name, 0, len(self.tokens) - 1)

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._fields.get(f"{_PREFIX}{key}")
        if values is None:
            return []
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self._fields.error(f"{_PREFIX}{key}", f"must be an array of {kind.__name__}")
        return values

    def _same_length(self, key: str, values: list[Any]) -> None:
        if len(values) != len(self.tokens):
            raise self._fields.error(
                f"{_PREFIX}{key}", f"must have an entry for each of {len(self.tokens)} tokens, has {len(values)}"
            )


def _byte_level(fields: Fields, vocabulary: _Vocabulary) -> dict[str, Any]:
    name = fields.text(f"{_PREFIX}pre", "default")
    if name not in _CUTS:
        raise fields.error(f"{_PREFIX}pre", f"must be one of {', '.join(_CUTS)}, is {shown(name)}")
    pattern, takes_whole = _CUTS[name]
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, bytes_of_text]},
        "decoder": bytes_of_text,
        "model": {
            "type": "BPE",
            "vocab": vocabulary.ids(),
            "merges": vocabulary.merges(),
            "ignore_merges": takes_whole,
        },
    }


def _sentencepiece(fields: Fields, vocabulary: _Vocabulary, kind: str) -> dict[str, Any]:
    has_merges = kind == "gemma4"
    prefixes = fields.boolean(f"{_PREFIX}add_space_prefix", not has_merges)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if prefixes else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixes else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    unknown = vocabulary.id_of("unknown")
    ids, merges = (vocabulary.ids(), vocabulary.merges()) if has_merges else _scored(fields, vocabulary)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": merges,
        },
    }


def _scored(fields: Fields, vocabulary: _Vocabulary) -> tuple[dict[str, int], list[list[str]]]:
    """Tokens, and the merges that their scores stand for.

    Whatever two tokens make a third, the third's score is their turn.
    """
    ids, scores = vocabulary.ids(), vocabulary.scores()
    normal = {token for token, number in ids.items() if vocabulary.kinds[number] == _NORMAL}
    ranked, characters = [], 0
    for token in normal:
        cuts = [cut for cut in range(1, len(token)) if token[:cut] in normal and token[cut:] in normal]
        number = ids[token]
        ranked += [(-scores[number], number, cut, token) for cut in cuts]
        characters += len(cuts) * len(token)
        if characters > _MAX_MERGE_CHARACTERS:
            raise fields.error(
                f"{_PREFIX}tokens",
                f"make merges of more than {_MAX_MERGE_CHARACTERS} characters: their parts are tokens too",
            )
    ranked.sort()
    return ids, [[token[:cut], token[cut:]] for _, _, cut, token in ranked]


def _begins_texts(fields: Fields, kind: str) -> bool:
    """Whether the vocabulary's kind puts its first token before a text by default."""
    return kind != "gpt2" or _CUTS[fields.text(f"{_PREFIX}pre", "default")][1]


def _frame(fields: Fields, vocabulary: _Vocabulary, begins: bool) -> dict[str, Any] | None:
    """What is put before and behind a text."""
    first = vocabulary.id_of("bos") if fields.boolean(f"{_PREFIX}add_bos_token", begins) else None
    last = vocabulary.id_of("eos") if fields.boolean(f"{_PREFIX}add_eos_token", False) else None
    if first is None and last is None:
        return None
    texts = {number: vocabulary.tokens[number] for number in (first, last) if number is not None}

    def frame(*names: str) -> list[dict[str, Any]]:
        before = [{"SpecialToken": {"id": texts[first], "type_id": 0}}] if first is not None else []
        behind = [{"SpecialToken": {"id": texts[last], "type_id": 0}}] if last is not None else []
        return [*before, *({"Sequence": {"id": name, "type_id": 0}} for name in names), *behind]

    special = {text: {"id": text, "ids": [number], "tokens": [text]} for number, text in texts.items()}
    return {"type": "TemplateProcessing", "single": frame("A"), "pair": frame("A", "B"), "special_tokens": special}
