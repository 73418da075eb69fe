"""What is said of a card: whether it will do, whether it was measured, and what becomes of FP8."""

from __future__ import annotations

import pytest
import torch
from tests.support.compiled_kernels import _SHARED_BYTES

from headrace_backend import cards
from headrace_backend.cards import Card, has_fp8_products, in_words, unmeasured, why_too_old
from headrace_kernels import card as rules

A100, A10, L40S = Card("NVIDIA A100-SXM4-80GB", (8, 0)), Card("NVIDIA A10", (8, 6)), Card("NVIDIA L40S", (8, 9))
H100, H200 = Card("NVIDIA H100 80GB HBM3", (9, 0)), Card("NVIDIA H200", (9, 0))
B200 = Card("NVIDIA B200", (10, 0))


def test_cards_from_ampere_on_are_taken() -> None:
    assert why_too_old(Card("Tesla T4", (7, 5))) == "Tesla T4 has compute capability 7.5, the kernels need 8.0 or more"
    assert not [card for card in (A100, A10, L40S, H100, B200) if why_too_old(card)]


def test_cards_that_nobody_measured_say_so_and_whether_kernels_are_compiled_for_them() -> None:
    assert unmeasured(H200) is None and unmeasured(H100) is None
    assert unmeasured(L40S) == (
        "not measured on this card: NVIDIA L40S, compute capability 8.9; launch rules are those of H200, kernels are "
        "compiled for it and not run on it"
    )
    assert str(unmeasured(B200)).endswith("kernels are not tried on its generation")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (H200, "launch rules were chosen on this card; FP8 weights are multiplied as FP8"),
        (H100, "measured with the launch rules of H200; FP8 weights are multiplied as FP8"),
        (
            L40S,
            "not measured on this card; kernels are compiled for it in tests; FP8 weights are multiplied as FP8, "
            "those in blocks in 16 bits",
        ),
        (
            A100,
            "not measured on this card; kernels are compiled for it in tests; FP8 weights are multiplied in 16 bits",
        ),
        (
            B200,
            "not measured on this card, nor compiled for its generation in tests; FP8 weights are multiplied as FP8, "
            "those in blocks in 16 bits",
        ),
    ],
)
def test_an_operator_hears_what_was_measured_and_what_becomes_of_fp8(card: Card, said: str) -> None:
    assert in_words(card) == said


def test_generations_that_are_said_to_be_compiled_are_those_of_the_tests() -> None:
    assert {major * 10 + minor for major, minor in cards._COMPILED} == _SHARED_BYTES.keys()


@pytest.mark.parametrize("card", [A100, A10, L40S, H100])
def test_words_and_launch_rules_agree_on_fp8(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
    assert rules.has_fp8_products.__wrapped__(torch.device("cuda", 0)) == has_fp8_products(card)
