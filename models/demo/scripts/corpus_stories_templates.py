"""Who and where of the demo stories, and the first hand-written requests and questions; data only.

The unseen ones among the requests and questions are never trained on.
"""

from __future__ import annotations

from corpus_draw import Phrasings
from phrasings_stories import UNSEEN_ASK

ANIMALS = tuple(
    "fox rabbit bear mouse owl hedgehog badger squirrel otter duck goose cat dog donkey goat sparrow turtle frog beaver "
    "raven wolf hare".split()
)
PEOPLE: tuple[tuple[str, str], ...] = (
    ("girl", "she"), ("boy", "he"), ("baker", "he"), ("baker", "she"), ("sailor", "he"), ("sailor", "she"), ("gardener", "she"),
    ("gardener", "he"), ("painter", "she"), ("tailor", "he"), ("teacher", "she"), ("farmer", "he"), ("shepherd", "he"),
    ("clockmaker", "she"), ("fisherman", "he"), ("robot", "he"), ("wizard", "he"), ("princess", "she"), ("miller", "he"),
)  # fmt: skip
PRONOUNS = {"he": ("he", "his", "him"), "she": ("she", "her", "her")}
TRAITS = tuple(
    "curious shy cheerful clever patient quiet stubborn friendly careful lazy brave young kind thoughtful forgetful "
    "honest little gentle".split()
)
HOMES = (
    "at the edge of a forest", "by the sea", "near an old mill", "on a green hill", "beside a slow river", "at the end of a long road",
    "in a village without a name", "behind the railway station", "in a valley full of apple trees", "next to the lighthouse",
    "under a very old oak", "in the middle of a noisy town", "on a small island", "at the foot of a mountain",
)  # fmt: skip
PLACES = (
    "the old lighthouse", "the silent lake", "the hollow tree", "the market square", "the ruined tower", "the long beach",
    "the stone bridge", "the dark forest", "the windmill", "the hidden garden", "the blue mountain", "the empty castle",
    "the frozen pond", "the apple orchard", "the deep cave", "the harbor", "the old railway", "the snowy pass",
)  # fmt: skip
WEATHERS = tuple("sunny rainy windy foggy cold warm stormy snowy bright grey".split())

ASK = Phrasings(
    train=(
        "Tell me a story about {a_kind} named {hero} and {a_object}.", "Tell me a short story about {hero} the {kind} and {a_object}.",
        "Write a story about {a_kind} called {hero} who has something to do with {a_object}.",
        "Write a short story with {a_kind} named {hero}, {a_object} and {place}.", "Can you tell a story about {hero}, {a_kind}, and {a_object}?",
        "I would like a story about {a_kind} named {hero} and {a_object} at {place}.", "Story please: {a_kind} named {hero}, {a_object}.",
        "Please write a story about {hero}, {a_kind}. There should be {a_object} in it.", "Tell me a story in which {hero} the {kind} goes to {place} and there is {a_object}.",
        "A bedtime story about {a_kind} named {hero} and {a_object}, please.", "Make up a story about {a_kind} named {hero} and {a_object}.",
        "Tell a story with {hero} the {kind} and {a_object}.", "Once upon a time there was {a_kind} named {hero} with {a_object}. Go on.",
    ),
    unseen=UNSEEN_ASK,
)  # fmt: skip
ASK_FREELY = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "I would like to hear a story.", "Tell me a bedtime story, please.",
    "Write a short story about friendship.", "Story time!", "Tell me a story about an animal.", "Can you tell me a story?",
    "Write a little story for children.", "tell me a story",
)  # fmt: skip
FREE_SHARE = 0.12
FOLLOW_UPS: tuple[tuple[Phrasings, str], ...] = (
    (
        Phrasings(
            train=("Who was the story about?", "Who is the hero of the story?", "Who was the main character?"),
            unseen=("Which character is the story mainly about?", "Who was it about?"),
        ),
        "The story was about {hero}, a {trait} {kind}.",
    ),
    (
        Phrasings(
            train=("Who was the friend in the story?", "Whom did {hero} meet?", "Who is {friend}?", "What was the friend's name?"),
            unseen=("What is the friend of {hero} called?", "Which friend did {hero} have in the story?"),
        ),
        "The friend was {friend}, a {friend_kind}.",
    ),
    (
        Phrasings(
            train=("Where did {hero} live?", "Where was the house of {hero}?", "Where is the home of {hero}?"),
            unseen=("In what place did {hero} have a home?", "Tell me where {hero} lived."),
        ),
        "{hero} lived {home}.",
    ),
    (
        Phrasings(
            train=("What thing was in the story?", "Which object was important?", "What object is the story about?"),
            unseen=("Which thing mattered in the story?", "Name the object in the story."),
        ),
        "It was {a_object}.",
    ),
)  # fmt: skip
