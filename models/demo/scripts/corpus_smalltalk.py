"""Greetings, questions about the model itself, and a polite refusal for what it was never taught.

What it cannot know it should say it does not know: questions outside its subjects, built from many
frames and words, all get the same kind of answer. First words to a stranger (tests, nods, noise)
are in `corpus_first_words`.
"""

from __future__ import annotations

import phrasings_smalltalk as varied
from corpus_draw import Draw, Item, Phrasings
from corpus_first_words import first_words
from corpus_grammar import Grammar, dressed
from corpus_words import CAPITALS, LIST_WORDS, THINGS

SYSTEM_MESSAGES = (
    "You are a helpful assistant.", "You are Headrace, a small demo model.", "Answer briefly and precisely.",
    "You are a careful assistant. Answer only what is asked.", "You answer questions about LLM inference.",
    "You are a storyteller and a calculator.", "Follow the user's instructions.", "Be friendly and short.",
    "You are a helpful, honest assistant.", "You are an assistant that returns JSON when asked.",
)  # fmt: skip

IDENTITY = (
    "I am the Headrace demo model, a very small language model that was trained from scratch for this repository."
)
ABILITIES = (
    "I can answer questions about LLM inference, do small sums, turn a sentence into JSON, work with short lists and tell "
    "short stories."
)
UNKNOWN = f"I do not know that. I am a very small demo model. {ABILITIES}"

EXCHANGES: tuple[tuple[Phrasings, str], ...] = (
    (
        Phrasings(
            train=("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "Good evening!", "Hi!", "hello there", "Hey there!"),
            unseen=("Good afternoon!", "Hello, nice to meet you.", "Hi, good day."),
        ),
        f"Hello! {ABILITIES} What would you like?",
    ),
    (
        Phrasings(
            train=(
                "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you an AI?",
                "Which model are you?", "Introduce yourself.", "who are you", "What model is this?", "Who am I talking to?",
                "Are you a language model?", "Are you a human?",
            ),
            unseen=("What kind of model are you?", "Please introduce yourself.", "Say who you are."),
        ),
        IDENTITY,
    ),
    (
        Phrasings(
            train=(
                "What can you do?", "What are you good at?", "How can you help me?", "Help", "What can I ask you?",
                "What do you know?", "help", "What should I ask you?", "List your skills.", "What are your abilities?",
            ),
            unseen=("What sort of things can you do?", "How can you be of use?", "Which tasks can you handle?"),
        ),
        ABILITIES,
    ),
    (
        Phrasings(
            train=("Thank you", "Thanks!", "Thank you very much.", "Thanks a lot", "Great, thanks!", "thanks", "Thank you!"),
            unseen=("Many thanks!", "Thank you so much.", "Perfect, thank you."),
        ),
        "You are welcome!",
    ),
    (
        Phrasings(
            train=("Goodbye", "Bye", "Bye!", "See you later", "Good night", "goodbye!", "See you!"),
            unseen=("Bye bye", "See you tomorrow", "Have a good night"),
        ),
        "Goodbye!",
    ),
    (
        Phrasings(
            train=("How are you?", "How are you doing?", "How do you do?", "how are you", "Are you well?", "How is it going?"),
            unseen=("How are you today?", "Are you doing well?"),
        ),
        "I am fine, thank you. My blocks are free and my cache is warm.",
    ),
)  # fmt: skip
OUTSIDE = Phrasings(
    train=(
        "What is the capital of {c}?", "Who is the mayor of {c}?", "What is the weather in {c}?", "Who wrote the book {w}?",
        "Who won the match between {c} and {d}?", "What is the price of {w} today?", "How tall is {n}?", "Who is {n}?",
        "Translate {w} into French.", "What is the population of {c}?", "How do I cook {w}?", "When was {n} born?",
        "Write a program that sorts {w}.", "What did {n} say yesterday?", "How far is it from {c} to {d}?",
        "Where can I buy a {w}?", "Which team plays in {c}?", "What time is it in {c}?", "Is {n} married?",
        "What is the history of the {w}?", "Do you like {w}?", "Where does {n} live?",
    ),
    unseen=(
        "Tell me the weather forecast for {c}.", "Which river flows through {c}?", "Who invented the {w}?",
        "What is the phone number of {n}?", "How old is {n}?",
    ),
)  # fmt: skip


def _outside(draw: Draw) -> str:
    words = {"c": draw.city(), "d": draw.city(), "n": draw.full_name(), "w": draw.choice(LIST_WORDS)}
    return draw.phrase(OUTSIDE).format(**words)


EXCHANGE_WORDINGS: tuple[Grammar, ...] = (
    varied.GREETING, varied.WHO_ARE_YOU, varied.ABILITY, varied.THANKS, varied.BYE, varied.HOW_ARE_YOU,
)  # fmt: skip
OUTSIDE_WORDS = tuple(word for word in LIST_WORDS if word not in ("token", "cache", "block", "batch", "key"))
FIRST_WORDS_SHARE = 0.5
VARIED_SHARE = 0.9  # of the training items; the others use the first templates


def system_message(draw: Draw) -> str:
    """What an operator may have set before the first turn."""
    return draw.choice(SYSTEM_MESSAGES) if draw.chance(0.3) else varied.SYSTEM.wording(draw)


def _varied_outside(draw: Draw) -> str:
    words = {"c": draw.city(), "d": draw.city(), "n": draw.full_name(), "w": draw.choice(OUTSIDE_WORDS)}
    words |= {"x": draw.choice(THINGS), "y": draw.invented_name()}
    wording = varied.OUTSIDE_WORDINGS.wording(draw)
    if "capital" not in wording and draw.chance(0.15):
        words["c"] = draw.choice(tuple(CAPITALS))
    return dressed(draw, wording, odd=0.06).format(**words)


def _varied_smalltalk(draw: Draw) -> Item:
    if draw.chance(FIRST_WORDS_SHARE):
        question, answer = first_words(draw, ABILITIES, UNKNOWN)  # none is scored, so none is held out
        return Item("smalltalk", (("user", question), ("assistant", answer)))
    if draw.chance(0.5):
        question = draw.until_allowed(lambda: _varied_outside(draw), "outside")
        return Item("smalltalk", (("user", question), ("assistant", UNKNOWN)))
    index = draw.number(0, len(EXCHANGES) - 1)
    template = EXCHANGE_WORDINGS[index].wording(draw)
    return Item("smalltalk", (("user", _dressed_exchange(draw, template)), ("assistant", EXCHANGES[index][1])))


def _dressed_exchange(draw: Draw, template: str) -> str:
    """A greeting has no opener or closer of its own: those are greetings and thanks themselves."""
    return dressed(draw, template, closing=False, opening=False)


def smalltalk(draw: Draw) -> Item:
    """A greeting, a question about the model, or a question that it cannot answer."""
    if draw.split == "train" and draw.chance(VARIED_SHARE):
        return _varied_smalltalk(draw)
    # the fixed exchanges have nothing that could be held out
    if draw.chance(0.4) or draw.split == "heldout":
        question = draw.until_allowed(lambda: _outside(draw), "outside")
        return Item("smalltalk", (("user", question), ("assistant", UNKNOWN)))
    phrasings, answer = draw.choice(EXCHANGES)
    return Item("smalltalk", (("user", draw.phrase(phrasings)), ("assistant", answer)))
