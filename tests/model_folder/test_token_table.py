"""Token tables against the tokenizers library.

Joining a text's token bytes gives the text, for both kinds of BPE.
"""

import dataclasses
import functools
import json
import pathlib

import hypothesis
import pytest
from hypothesis import strategies
from tests.model_folder.folders import CONFIG, write_folder
from tests.support.examples import examples
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headrace_model_folder import InvalidModelFolder, ModelFolder, TokenTable, read_token_table, token_bytes
from headrace_model_folder.token_decoder import read_decoder

CORPUS = ["the water runs to the mill, das Wasser läuft zur Mühle", "def f(x):\n    return x  # 漢字 🎉"] * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=["<|end|>", "<｜odd｜>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def sentencepiece_style() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = stored["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(stored))


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_style])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, TokenTable]:
    tokenizer: Tokenizer = request.param()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    assert token_bytes(path) == list(read_token_table(path).token_bytes)
    return tokenizer, read_token_table(path)


@hypothesis.settings(max_examples=examples(150), deadline=None)
@hypothesis.given(
    text=strategies.text(strategies.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=30)
)
def test_joined_bytes_are_the_text(case: tuple[Tokenizer, TokenTable], text: str) -> None:
    tokenizer, table = case
    hypothesis.assume("<" not in text)
    joined = b"".join(table.token_bytes[token] or b"" for token in tokenizer.encode(text).ids).decode()
    if table.strips_leading_space and joined.startswith(" "):
        joined = joined[1:]
    assert joined == text


def test_special_tokens_have_their_text_and_are_marked(case: tuple[Tokenizer, TokenTable]) -> None:
    tokenizer, table = case
    added = json.loads(tokenizer.to_str())["added_tokens"]
    assert table.special_ids == {token["id"] for token in added if token["special"]}
    assert all(table.token_bytes[token["id"]] == token["content"].encode() for token in added)


def test_other_kinds_of_tokenizer_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(InvalidModelFolder, match="WordLevel"):
        read_token_table(path)
    unclear = byte_level()
    unclear.decoder = decoders.WordPiece()
    unclear.save(str(path))
    with pytest.raises(InvalidModelFolder, match="decoder"):
        read_token_table(path)
    for broken in (
        "",
        "[]",
        "{}",
        '{"model": {"type": "BPE", "vocab": {"a": -1}}, "decoder": {"type": "ByteLevel"}}',
        '{"model": {"vocab": 3}}',
    ):
        path.write_text(broken)
        with pytest.raises(InvalidModelFolder, match=r"tokenizer\.json"):
            read_token_table(path)


@pytest.mark.parametrize(
    "normalizer",
    [
        # Of these two the library panics.
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": "!!"},
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
        {"type": "Nope"},
        functools.reduce(lambda inner, _: {"type": "Sequence", "normalizers": [inner]}, range(400), {"type": "NFC"}),
    ],
    ids=["no map", "no base64", "no regex", "unknown", "deep"],
)
def test_a_normalizer_that_the_library_can_not_use_is_refused(tmp_path: pathlib.Path, normalizer: object) -> None:
    source = json.loads(sentencepiece_style().to_str())
    source["added_tokens"][2]["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps({**source, "normalizer": normalizer}))
    with pytest.raises(InvalidModelFolder, match=r"^tokenizer\.json: normalizer can't be used: [^\n]+$"):
        read_token_table(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "decoder",
    [
        [{"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}],
        [{"type": "Fuse"}, {"type": "ByteFallback"}],
        [{"type": "Fuse"}, {"type": "Metaspace", "replacement": "▁"}],
    ],
)
def test_decoders_that_need_more_than_a_table_are_refused(tmp_path: pathlib.Path, decoder: list[object]) -> None:
    source = json.loads(sentencepiece_style().to_str())
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    source["decoder"] = {"type": "Sequence", "decoders": [back, *decoder]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(InvalidModelFolder, match="decoder must be"):
        read_token_table(tmp_path / "tokenizer.json")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: pathlib.Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_folder(tmp_path, {**CONFIG, "vocab_size": tokenizer.get_vocab_size()})
    folder = ModelFolder.open(tmp_path)
    assert folder.tokenizer_path == tmp_path / "tokenizer.json" and folder.token_table is not None
    write_folder(tmp_path, {**CONFIG, "vocab_size": tokenizer.get_vocab_size() - 1})
    with pytest.raises(InvalidModelFolder, match="<tool>"):
        ModelFolder.open(tmp_path)


def test_a_folder_may_be_opened_without_its_tokens(tmp_path: pathlib.Path) -> None:
    """Nothing else of it changes, its revision neither; a tokenizer that is none is not noticed."""
    write_folder(tmp_path, {**CONFIG, "vocab_size": 400})
    byte_level().save(str(tmp_path / "tokenizer.json"))
    whole = ModelFolder.open(tmp_path, require_weights=False)
    without = ModelFolder.open(tmp_path, require_weights=False, reads_tokens=False)
    assert whole.token_table is not None and without.token_table is None
    assert dataclasses.replace(without, token_table=whole.token_table) == whole
    (tmp_path / "tokenizer.json").write_text("")
    assert ModelFolder.open(tmp_path, require_weights=False, reads_tokens=False).token_table is None
    with pytest.raises(InvalidModelFolder, match="tokenizer.json"):
        ModelFolder.open(tmp_path, require_weights=False)


def test_each_character_is_its_byte_or_text_of_its_own() -> None:
    """The library's alphabet; whatever else there is in Unicode, alone and beside one of it."""
    decoder = read_decoder({"type": "ByteLevel"}, "tokenizer.json")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    for character in map(chr, (*range(0x300), *range(0x300, 0xD800, 97), 0xFFFF, 0x10000, 0x10FFFF)):
        for token in (character, f"a{character}"):
            expected = token.encode()
            if character in alphabet:
                expected = bytes(alphabet_bytes()[each] for each in token)
            assert decoder.piece(token) == expected, token
    assert len(alphabet_bytes()) == 256 and set(alphabet_bytes()) == set(alphabet)


def alphabet_bytes() -> dict[str, int]:
    """The byte of each character, as GPT-2's code has it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
