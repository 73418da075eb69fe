"""Wordings of list tasks for training, and the ways a list is written; data only.

Answers belong to `corpus_lists`.
"""

from __future__ import annotations

from corpus_grammar import Grammar

DO = "[|||please |can you |could you |would you |I want you to |kindly |let us |now |try to |you should |I'd like you to ]"
NUMBERS = "[this|these|these numbers|the numbers|these values|the list|this list|this row of numbers|the following numbers|what follows|the following|all of these|the digits|my numbers|the following list|them all]"
ITEMS = "[this|the list|this list|these words|the words|these items|the items|the following words|the following list|the following|what follows|all these things|this series|this row|these entries|my list]"
X = "[: |: |:\n|, |. | - | ]{x}"
GIVEN = "[here is a list|this is my list|I have these|take these|look at these|given|the list is|this is what I have|consider|I wrote down|list|on my paper:|we have|they gave me|my row is|in my notes][:| |:\n] {x}[.|;|\n| -|,] "
UP = "[in ascending order|in increasing order|from smallest to largest|from the smallest to the largest|from small to big|from lowest to highest|starting with the smallest|smallest first|with the smallest number first|by size, small to large|in rising order|so that they go up|upwards|from little to large|so that they grow|by value]"
DOWN = "[in descending order|in decreasing order|from largest to smallest|from the largest to the smallest|from big to small|from highest to lowest|starting with the largest|largest first|with the biggest number first|in falling order|so that they go down|downwards|in reverse order of size|so that they shrink|biggest first]"
ARRANGE = (
    "[sort|order|arrange|put|rank|write|list|place|bring|rearrange|organise|set|give me|show me|print|return|sort out]"
)

SORT_WORDINGS = Grammar(
    f"{DO}{ARRANGE} {NUMBERS} {UP}{X}[|.|?]",
    f"{DO}{ARRANGE} {{x}} {UP}[.||?|, please.]",
    f"{DO}[sort|order|sort out|rank]{X}[|.|?]",
    f"{DO}[sort|order|rank] {NUMBERS}{X}[|.|?]",
    f"{GIVEN}{DO}{ARRANGE} [them|it|these|the numbers|all] {UP}[.||?]",
    f"{GIVEN}{DO}[sort|order|sort out|rank] [it|these|the numbers|all of them|this list|the list][.||?]",
    f"{UP}{X}",
    f"{{x}}[ - |: |\n|, ]{UP}[, please|.||?]",
    f"{{x}}[ - |. |\n|; ]{DO}{ARRANGE} [them|these|the numbers] {UP}[.||?]",
    "[sorted|sorted list|in order|ordered]: {x}",
    f"[what is|what would be|tell me|show me|give me|how does it look,] {{x}} [sorted|in order|ordered|{UP}][?|.|]",
    f"{ARRANGE} {UP}[: |:\n|, |. ]{{x}}",
    "[how|in which order] do {x} [follow each other|come] [by size|when sorted|if you sort them]?",
)
SORT_DOWN_WORDINGS = Grammar(
    f"{DO}{ARRANGE} {NUMBERS} {DOWN}{X}[|.|?]",
    f"{DO}{ARRANGE} {{x}} {DOWN}[.||?|, please.]",
    f"{GIVEN}{DO}{ARRANGE} [them|it|these|the numbers|all] {DOWN}[.||?]",
    f"{DOWN}{X}",
    f"{{x}}[ - |: |\n|, ]{DOWN}[, please|.||?]",
    f"{{x}}[ - |. |\n|; ]{DO}{ARRANGE} [them|these|the numbers] {DOWN}[.||?]",
    f"[what is|what would be|tell me|show me|give me] {{x}} [sorted |]{DOWN}[?|.|]",
    f"{ARRANGE} {DOWN}[: |:\n|, |. ]{{x}}",
    f"[sort|order|rank] {NUMBERS}, [but |]{DOWN}{X}",
)
MOST, LEAST = (
    "[largest|biggest|highest|greatest|maximum|maximal|top]",
    "[smallest|lowest|minimum|least|minimal|littlest|bottom]",
)
PICK = "[what is|which is|tell me|find|give me|name|show me|say|return|pick|choose|look for|determine|I want|I need|what's|write down|point out|do you see]"


def _extreme(kind: str, short: str) -> Grammar:
    return Grammar(
        f"{DO}{PICK} the {kind} [number|value|one|entry|of the numbers|element|] [in|of|among|from|in the list|in this list|out of|within][ |: |:\n]{{x}}[?|.|]",
        f"{GIVEN}[what is|which is|tell me|find|name|give me|which number is|which one is|which of them is] the {kind}[ number| one| value|][?|.|]",
        f"which [number|of these numbers|of these|one|value|of them|of the following] is the {kind}[: |, | - |? |?\n]{{x}}[?|.|]",
        f"{{x}}[: |? | - |. |\n|, ][what is|which is|which number is|tell me|which one is|name] the {kind}[ number| one| value|][?|.|]",
        f"[the |]{kind} [number |value |one |][of|in|among|:] {{x}}[?|.|]",
        f"{short}[imum|][ of |: | in ]{{x}}[?|]",
        f"[in|of|among|from|looking at] {{x}}[,|:] [which|what|which number|which value] is the {kind}[ one| number|]?",
        f"[which|what] [number|value] [here |]is the {kind}[? |?\n|: |, ]{{x}}[.|]",
        unseen=(
            "Of the numbers {x}, which is the largest?",
            "Of the numbers {x}, which is the smallest?",
            "Tell me the maximum in this list: {x}",
            "Tell me the minimum in this list: {x}",
        ),
    )


LARGEST_WORDINGS, SMALLEST_WORDINGS = _extreme(MOST, "max"), _extreme(LEAST, "min")
BACK = "[in reverse|in reverse order|backwards|the other way round|from back to front|from the end to the start|from end to beginning|starting with the last|starting from the end|with the last one first|last one first|in the reversed order|from right to left|reversed|from the back|mirrored, last item first]"
WRITE = "[write|say|print|give me|put|read|show|tell me|output|repeat|return|recite|copy|type|spell out|go through|set|arrange]"
REVERSE_WORDINGS = Grammar(
    f"{DO}[reverse|turn around|turn round|flip|invert|mirror|swap round] {ITEMS}{X}[|.|?]",
    f"{DO}[reverse|turn around|flip|invert|mirror]{X}[|.|?]",
    f"{DO}{WRITE} {ITEMS} {BACK}{X}[|.|?]",
    f"{DO}{WRITE} {{x}} {BACK}[.||?|, please.]",
    f"{GIVEN}{DO}[reverse|turn around|flip|invert] [it|them|the list|this list|the order|their order][.||?]",
    f"{GIVEN}{DO}{WRITE} [it|them|the list|all] {BACK}[.||?]",
    f"{BACK}{X}",
    f"{{x}}[ - |: |\n|, ]{BACK}[, please|.||?]",
    f"{{x}}[ - |. |\n|; ]{DO}[reverse|turn around|flip] [it|them|this|the list][.||?]",
    f"[what is|what would be|how does it read:|how is] {{x}} {BACK}[?|]",
    f"{DO}[change|reverse|flip|turn around|invert] the order of {{x}}[.||?]",
    f"{DO}start [with|at|from] the [last|end] and {WRITE} {ITEMS}{X}[|.|?]",
)
COUNT_WORDINGS = Grammar(
    "how many [words|items|things|entries|elements|words or items|parts|names|members] [are|do you see|are there|do you count|stand|can you find|do I have] [in|in the list|in this list|here|below|in what follows|on this list][: |:\n|, | - |? | ]{x}[?||.]",
    f"{DO}[count|count up|count out] {ITEMS}{X}[|.|?]",
    f"{DO}[count|count up] {{x}}[.||?]",
    f"{GIVEN}how many [words|items|things|entries|elements] [are there|is that|are these|do you count|are in it|does it have]?",
    f"{GIVEN}{DO}[count|number] [them|it|the items|the words][.||?]",
    "{x}[: |? | - |. |\n|, ]how many [words|items|things|entries|elements|] [are these|are there|is that|do you count|does the list have|are in this list]?",
    "[what is|tell me|give me|find|say] the [length|size|count] of [this list|the list|]{x}[?|.|]",
    "how [long|big|large] is [the list|this list|the following list|my list][: |:\n|, | - | ]{x}[?||.]",
    "[length|count|list length|number of words|item count|size][ of |: | of the list |? ]{x}[?|]",
    "[does|how many entries does|how many words does|how many items does] [the list|this list|my list] [have|contain|hold|show][: |, |? |:\n]{x}[?|]",
    unseen=("Tell me how many things are listed here: {x}", "What is the number of items in {x}?"),
)


def _end(which: str) -> Grammar:
    thing = "[word|item|entry|one|thing|element|name|member]"
    return Grammar(
        f"{DO}{PICK} the {which} {thing} [in|of|from|on|in the list|of this list|of the following list|here][ |: |:\n|, ]{{x}}[?|.|]",
        f"{GIVEN}[what is|which is|tell me|name|give me|say] the {which} {thing}[?|.|]",
        f"which [word|item|one|entry|of these|thing] [comes|is|stands|appears|is written] {which}[: |, | - |? |?\n| in ]{{x}}[?|.|]",
        f"{{x}}[: |? | - |. |\n|, ][what is|which is|tell me|name] the {which} {thing}[?|.|]",
        f"[the |]{which} {thing}[ of |: | in ]{{x}}[?|.|]",
        f"what [comes|stands|is|do you read] {which} [in|on|in the list][: | ]{{x}}[?|]",
        f"[which {thing}|what] [does|do] {{x}} [START|START] with?".replace(
            "START|START", "begin|start" if which == "first" else "end|stop"
        ),
        unseen=(f"Give me the {which} entry in this list: {{x}}", f"In {{x}}, which item is {which}?"),
    )


FIRST_WORDINGS, LAST_WORDINGS = _end("first"), _end("last")
AGAIN = "[repeat|say|write|copy|echo|print|return|type|output|give back|speak|reproduce|read out|quote]"
REPEAT_WORDINGS = Grammar(
    f"{DO}{AGAIN} [this|after me|this text|the following|these words|exactly this|what I say|what follows|this line|this sentence|the next words|word for word|the text below|just this|only this|the following text|it back to me|this for me|the words below|once more|again][: |:\n|: |, | - |:\n\n]{{x}}",
    f"{DO}{AGAIN}: {{x}}",
    f"{{x}}[\n|\n\n| - | -> ]{DO}{AGAIN} [this|it|that|the line above|the text above|these words|what I wrote][.||, please.| exactly.| word for word.| once more.]",
    "[after me|repeat|echo|copy|parrot|again|copy test|your turn|same words][: | - |:\n]{x}",
    '[I say|I write|my text is|the text is|here is a text|the line is|I said][:| ] ["{x}"|{x}][.|,| -|\n] [now|and now|then|please] [you|you too|repeat it|say it|copy it|write it|you say it][.||!]',
    f"{DO}{AGAIN} [\"{{x}}\"|'{{x}}'][.|| again.| for me.| without changes.| exactly.]",
    f"{DO}[answer|reply|respond] [only |]with [these words|this text|the same words|exactly this|this|the following][: |:\n]{{x}}",
    f"[do not change anything|without any change|letter by letter|exactly as it stands][, |: ]{AGAIN} [this|it|the text|the following][: |:\n]{{x}}",
    f"{DO}{AGAIN} [what I wrote|my words|my line|my message|everything after the colon|what comes now|what stands here]: {{x}}",
    unseen=("Say this back to me: {x}", "Write exactly what I write: {x}", "Type the following again: {x}"),
)
