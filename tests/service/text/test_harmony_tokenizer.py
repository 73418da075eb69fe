"""A tokenizer of gpt-oss's kind: its tokens are those of the library that it was made with."""

from __future__ import annotations

import functools

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tests.service.harmony_folder import SPECIAL, TEMPLATE, full_size_tokenizer, harmony_tokenizer, split_pattern
from tokenizers import Tokenizer

from headrace_model_folder.token_table import TokenTable, library_tokenizer, parse_token_table
from headrace_service.output_forms.model_form import ModelForm

_WORDS = [*SPECIAL[:9], "assistant", " They'LL ", "don't", "HTTPServer", "1234567", "  \n\n ", "/\n", "東京", "é", "🙂"]


@functools.cache
def both(ignore_merges: bool) -> tuple[Tokenizer, TokenTable, tiktoken.Encoding]:
    saved = harmony_tokenizer(ignore_merges).to_str().encode()
    table = parse_token_table(saved)
    ranks = {text: number for number, text in enumerate(table.token_bytes) if number not in table.special_ids and text}
    # The library wants the ranks of bytes before those of merges, which is how they were trained.
    special = {(table.token_bytes[number] or b"").decode(): number for number in table.special_ids}
    oracle = tiktoken.Encoding("small", pat_str=split_pattern(), mergeable_ranks=ranks, special_tokens=special)
    return library_tokenizer(saved), table, oracle


@pytest.mark.parametrize("ignore_merges", [False, True])
@given(text=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(_WORDS), max_size=12).map("".join)))
def test_tokens_and_their_bytes_are_those_of_the_other_library(ignore_merges: bool, text: str) -> None:
    tokenizer, table, oracle = both(ignore_merges)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == oracle.encode(text, allowed_special="all")
    assert b"".join(table.token_bytes[token] or b"" for token in ids) == oracle.decode_bytes(ids) == text.encode()


def test_all_of_its_special_tokens_are_special() -> None:
    tokenizer, table, _ = both(False)
    assert table.special_ids == {tokenizer.token_to_id(text) for text in SPECIAL}


@pytest.mark.slow  # It makes 200,000 tokens.
def test_a_tokenizer_of_its_size_has_its_special_tokens_where_they_are() -> None:
    saved = full_size_tokenizer()
    table, tokenizer = parse_token_table(saved), library_tokenizer(saved)
    assert len(table.token_bytes) == tokenizer.get_vocab_size() == 201_088
    ids = {text: number for number in table.special_ids if (text := (table.token_bytes[number] or b"").decode())}
    assert (ids["<|return|>"], ids["<|channel|>"], ids["<|start|>"], ids["<|call|>"]) == (
        200002,
        200005,
        200006,
        200012,
    )
    form = ModelForm.of(TEMPLATE, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, table.special_ids)
    assert form.call_format == "harmony" and form.ending_ids == (200_002, 200_012)
