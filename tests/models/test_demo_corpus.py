"""The demo corpus keeps its promises: held-out items never occur in training, seeds repeat, answers are well-formed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "demo" / "scripts"))

from corpus import CHAT_DOMAINS, evaluation_item, render, training_item  # noqa: E402
from corpus_draw import Draw, is_held_out  # noqa: E402
from corpus_inference import topics  # noqa: E402

OPERATION = re.compile(r"(\d+) ([+×-]) (\d+) = ")
SPLITS = ("heldout", "phrasing")


def _exchanges(count: int, seed: int) -> set[tuple[str, str]]:
    """Question and answer pairs of training documents."""
    draw = Draw(seed, "train")
    pairs: set[tuple[str, str]] = set()
    for _ in range(count):
        turns = training_item(draw).turns
        pairs.update(
            (asked[1], said[1]) for asked, said in zip(turns, turns[1:], strict=False) if said[0] == "assistant"
        )
    return pairs


@pytest.fixture(scope="module")
def trained() -> set[tuple[str, str]]:
    return _exchanges(60_000, 11)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("domain", sorted(set(CHAT_DOMAINS) - {"story_follow_up"}))
def test_held_out_questions_never_occur_in_training(domain: str, split: str, trained: set[tuple[str, str]]) -> None:
    draw = Draw(20260, split)
    asked = {question for question, _ in trained}
    items = [evaluation_item(draw, domain) for _ in range(300)]
    assert not {item.turns[-2][1] for item in items} & asked


@pytest.mark.parametrize("split", SPLITS)
def test_held_out_stories_before_a_follow_up_never_occur_in_training(split: str, trained: set[tuple[str, str]]) -> None:
    draw = Draw(20260, split)
    told = {answer for _, answer in trained}
    assert not {evaluation_item(draw, "story_follow_up").turns[1][1] for _ in range(300)} & told


def _first_operation(answer: str) -> tuple[str, frozenset[str]] | None:
    """The operation and its two numbers, in any order."""
    found = OPERATION.match(answer)
    return (found[2], frozenset((found[1], found[3]))) if found else None


@pytest.mark.parametrize("domain", ["arithmetic", "word_problem"])
def test_held_out_number_pairs_never_occur_in_training(domain: str, trained: set[tuple[str, str]]) -> None:
    seen = {_first_operation(answer) for _, answer in trained} - {None}
    draw = Draw(20260, "heldout")
    asked = {_first_operation(evaluation_item(draw, domain).answer) for _ in range(500)} - {None}
    assert len(asked) > 200
    assert not asked & seen


def test_names_are_divided_between_training_and_held_out() -> None:
    training, held_out = Draw(3, "train"), Draw(3, "heldout")
    assert not any(is_held_out("name", training.first_name()) for _ in range(2000))
    assert all(is_held_out("name", held_out.first_name()) for _ in range(200))


@pytest.mark.parametrize("split", ["train", *SPLITS])
def test_the_same_seed_gives_the_same_documents(split: str) -> None:
    first, second = Draw(7, split), Draw(7, split)
    other = Draw(8, split)
    domains = sorted(CHAT_DOMAINS) * 20
    texts = [render(evaluation_item(first, domain).turns) for domain in domains]
    assert texts == [render(evaluation_item(second, domain).turns) for domain in domains]
    assert texts != [render(evaluation_item(other, domain).turns) for domain in domains]


@pytest.mark.parametrize("split", ["train", *SPLITS])
def test_extraction_answers_are_compact_json_copied_from_the_text(split: str) -> None:
    draw = Draw(5, split)
    for _ in range(500):
        item = evaluation_item(draw, "extraction")
        values = json.loads(item.answer)
        assert item.answer == json.dumps(values, separators=(",", ":"), ensure_ascii=False)
        question = item.turns[-2][1]
        assert all(value is None or str(value) in question for value in values.values())


@pytest.mark.parametrize("split", ["train", *SPLITS])
def test_every_equation_in_an_answer_is_true(split: str) -> None:
    draw = Draw(5, split)
    for _ in range(1000):
        sides = evaluation_item(draw, "word_problem").answer.split(", so ")[0].split(" = ")
        assert len({eval(side.replace("×", "*")) for side in sides}) == 1


@pytest.mark.parametrize("split", ["train", *SPLITS])
def test_texts_have_no_slot_left_and_mention_what_was_asked(split: str) -> None:
    draw = Draw(5, split)
    for _ in range(600):
        item = evaluation_item(draw, "story")
        assert not re.search(r"[{}]|\ba [aeiou]|\ban [^aeiouh]", item.answer), item.answer
        assert all(word in item.answer for word in item.mentions)


def test_topics_have_names_questions_and_answers_of_their_own() -> None:
    loaded = topics()
    assert len(loaded) >= 60
    assert len({topic.short for topic in loaded}) == len(loaded)
    assert all(len(topic.asks) >= 3 and topic.names and topic.long.startswith(topic.short) for topic in loaded)
