"""The demo model's generated questions, asked of an engine and judged for `accuracy`.

Owns the questions' number and how they are sent: greedy, all at once, each up to its own end. Which
questions there are, and what a right answer is, is the demo model's own evaluation
(`models/demo/scripts`), on values and phrasings that training never saw.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import sys
from typing import Any

from tokenizers import Tokenizer

from benchmarks.engine_session import EngineSession, Prompt, engine_session

DEMO = pathlib.Path(__file__).resolve().parents[1] / "models" / "demo"
# The evaluation is a folder of scripts, not a package.
sys.path.insert(0, str(DEMO / "scripts"))

from corpus import DOMAINS, evaluation_item, render, training_item  # noqa: E402
from corpus_draw import Draw, Item  # noqa: E402
from demo_model import END_ID, EOS_ID  # noqa: E402
from demo_shards import SPOKEN_BIT, Encoder  # noqa: E402
from evaluate import COUNTS, MAX_NEW_TOKENS, is_right, prompt_ids  # noqa: E402

SPLITS = ("heldout", "phrasing")
_MAX_NEW_TOKENS = 160
_SEED = 20_261


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One item as ids."""

    item: Item
    prompt: list[int]
    max_tokens: int


def encoder() -> Encoder:
    """The demo model's tokenizer."""
    return Encoder(Tokenizer.from_file(str(DEMO / "tokenizer.json")))


def questions(count: int) -> list[Question]:
    """About `count` questions, in the evaluation's shares of domains.

    Half come from each of the evaluation's splits.
    """
    encode, share = encoder(), count / (len(SPLITS) * sum(COUNTS.values()))
    drawn = []
    for split in SPLITS:
        draw = Draw(_SEED, split)
        for domain in DOMAINS:
            items = [evaluation_item(draw, domain) for _ in range(max(1, round(COUNTS[domain] * share)))]
            most = MAX_NEW_TOKENS.get(domain, _MAX_NEW_TOKENS)
            drawn += [Question(item, prompt_ids(encode, item), most) for item in items]
    return drawn


def documents(count: int) -> list[tuple[list[int], list[bool]]]:
    """Held-out texts as ids, and which of the ids the model is meant to say."""
    draw, encode = Draw(_SEED, "heldout"), encoder()
    rows = encode.encode_many([training_item(draw) for _ in range(count)])
    return [([token & (SPOKEN_BIT - 1) for token in row], [bool(token & SPOKEN_BIT) for token in row]) for row in rows]


def training_text(seed: int, count: int) -> str:
    """Documents with the values and phrasings of training, one after the other.

    They are as the model reads them.
    """
    draw = Draw(seed, "train")
    texts = []
    for _ in range(count):
        turns = training_item(draw).turns
        texts.append(f"<|bos|>{render(turns)}{'<|eos|>' if turns[0][0] == 'text' else ''}")
    return "".join(texts)


async def right_answers(settings: dict[str, Any], asked: list[Question]) -> list[bool]:
    """Which questions an engine with these EngineConfig fields answers right."""
    decode = encoder().tokenizer
    async with engine_session(settings) as session:
        answers = await asyncio.gather(*(_answer(session, question) for question in asked))
    judged = []
    for question, ids in zip(asked, answers, strict=True):
        ended = bool(ids) and ids[-1] in (END_ID, EOS_ID)
        text = decode.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        judged.append(is_right(question.item, text, ended and ids[-1] == END_ID))
    return judged


async def _answer(session: EngineSession, question: Question) -> list[int]:
    """The answer's ids, its end included."""
    prompt = Prompt.of(question.prompt, question.max_tokens, stop_ids=(END_ID, EOS_ID))
    answer = await session.ask(prompt)
    return answer.token_ids
