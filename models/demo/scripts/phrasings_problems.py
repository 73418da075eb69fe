"""Wordings of word problems for training: who, what happened, in which order, and what is asked.

A wording is drawn in two steps: verbs, places and times are drawn as slots, then a grammar orders
them. Answers and numbers belong to `corpus_arithmetic`; `{a}` is always the first operand, wherever
it stands in the sentence.
"""

from __future__ import annotations

from corpus_arithmetic_templates import GAIN, GROUPS, LOSE
from corpus_draw import Draw
from corpus_grammar import Grammar, odd_word

# Present, third person, past, participle, -ing form; _ stands for a space.
GAIN_VERBS = tuple(
    line.split()
    for line in """find finds found found finding|buy buys bought bought buying|get gets got got getting|win wins won won winning
collect collects collected collected collecting|receive receives received received receiving|pick picks picked picked picking
gather gathers gathered gathered gathering|earn earns earned earned earning|order orders ordered ordered ordering
make makes made made making|borrow borrows borrowed borrowed borrowing|discover discovers discovered discovered discovering
inherit inherits inherited inherited inheriting|bring brings brought brought bringing|add adds added added adding
fetch fetches fetched fetched fetching|pick_up picks_up picked_up picked_up picking_up|take_in takes_in took_in taken_in taking_in
bring_home brings_home brought_home brought_home bringing_home|catch catches caught caught catching
put_in puts_in put_in put_in putting_in|trade_for trades_for traded_for traded_for trading_for""".replace(
        "\n", "|"
    ).split("|")
)
LOSE_VERBS = tuple(
    line.split()
    for line in """lose loses lost lost losing|sell sells sold sold selling|give_away gives_away gave_away given_away giving_away
drop drops dropped dropped dropping|break breaks broke broken breaking|throw_away throws_away threw_away thrown_away throwing_away
lend lends lent lent lending|donate donates donated donated donating|misplace misplaces misplaced misplaced misplacing
return returns returned returned returning|trade_away trades_away traded_away traded_away trading_away|burn burns burned burned burning
hide hides hid hidden hiding|use_up uses_up used_up used_up using_up|waste wastes wasted wasted wasting|use uses used used using
send_away sends_away sent_away sent_away sending_away|remove removes removed removed removing|take_out takes_out took_out taken_out taking_out
leave_behind leaves_behind left_behind left_behind leaving_behind|share_out shares_out shared_out shared_out sharing_out
pass_on passes_on passed_on passed_on passing_on|forget forgets forgot forgotten forgetting|spoil spoils spoiled spoiled spoiling
crush crushes crushed crushed crushing|ruin ruins ruined ruined ruining|offer_to_a_friend offers_to_a_friend offered_to_a_friend offered_to_a_friend offering_to_a_friend
cut_up cuts_up cut_up cut_up cutting_up|bury buries buried buried burying|bite bites bit bitten biting|give_back gives_back gave_back given_back giving_back
ship ships shipped shipped shipping|mail_off mails_off mailed_off mailed_off mailing_off|swallow swallows swallowed swallowed swallowing""".replace(
        "\n", "|"
    ).split("|")
)
PLAIN_VERBS = tuple(
    line.split()
    for line in """find finds found found finding|buy buys bought bought buying|sell sells sold sold selling|paint paints painted painted painting
wash washes washed washed washing|draw draws drew drawn drawing|move moves moved moved moving|lift lifts lifted lifted lifting
sort sorts sorted sorted sorting|stack stacks stacked stacked stacking|make makes made made making|order orders ordered ordered ordering
print prints printed printed printing|clean cleans cleaned cleaned cleaning|fold folds folded folded folding|deliver delivers delivered delivered delivering
pick picks picked picked picking|load loads loaded loaded loading|collect collects collected collected collecting|see sees saw seen seeing
hide hides hid hidden hiding|repair repairs repaired repaired repairing|weigh weighs weighed weighed weighing|check checks checked checked checking
wrap wraps wrapped wrapped wrapping|use uses used used using|store stores stored stored storing|show shows showed shown showing""".replace(
        "\n", "|"
    ).split("|")
)
PLACES = tuple(
    """in the kitchen|on the table|in the garden|on the shelf|in a chest|in the cellar|in the car|on the floor|at home|at school|in the office|
in the shop|under the bed|on the desk|in a bowl|in the hall|behind the house|in the attic|on the wagon|in a drawer|in a sack|on a plate|
in the barn|at the market|on the window sill|in the cupboard|in a bucket|in a suitcase|on the stairs|in the pocket""".replace(
        "\n", ""
    ).split("|")
)
TIMES = tuple(
    """in the morning|in the evening|at noon|before lunch|after lunch|at night|last week|this week|yesterday|today|in spring|in summer|
on Wednesday|on Thursday|on Friday|on Saturday|on Sunday|in May|in June|in the first hour|in the second hour|on the first day|on the second day|
at first|then|later|last year|this year|before the break|after the break|in winter|in autumn""".replace("\n", "").split(
        "|"
    )
)
RELATIVES = tuple(
    "sister brother friend neighbour mother father aunt uncle cousin teacher grandmother classmate boss".split()
)
SINGULAR = {"boxes": "box", "shelves": "shelf"}

SUM_ASKED = (
    "[How many {things} [does {name} have|does {he} have|are there|has {name} got|do we count|is that|does that make|are that]"
    "[| now| in total| altogether| in all| in the end| then| all in all]?|How many is that[| in total| together]?|What is the [total|sum]?|"
    "Find the [total|sum].|Count the {things}.|How many {things} in [total|all]?|How many are there now?|How many now?|"
    "Tell me how many {things} [there are|{name} has|that is][ now|].|Give the number of {things}[ now| in the end|].|"
    "What is the number of {things} now?|How many {things} together?]"
)
LEFT_ASKED = (
    "[How many {things} [are left|remain|are left over|does {he} have left|does {name} still have|does {name} keep|stay|are still there|"
    "has {name} got now|does {he} have now|does that leave|are there now|can {name} still use|will be left|remain in the end]?|"
    "How many are left[| over| now]?|How many remain?|What is left?|What remains?|How many {things} left?|Find the number of {things} that [are left|remain].|"
    "Tell me how many {things} [are left|remain|{he} still has].|Count what is left.|How many does {he} still have?|How many is that now?]"
)
NEXT = "[, and|, then {he}|. Then {he}|. Later {he}|. After that {he}|. The next day {he}|. {He}|. {name}|. A day later {name}| and then| and|. Soon {he}|. Now {he}|; {he}]"
HAS = "[has|had|owns|owned|starts with|begins with|has got|keeps|carries around|started with|had in the beginning|possesses|got]"
PAIRED = "[bag|box|basket|drawer|jar|case|chest|room|bowl|sack|cup|hand|pocket|pile|row|wagon]"

GAIN_WORDINGS = Grammar(
    f"{{name}} {HAS} {{a}} {{things}}[| {{place}}]{NEXT} [{{does}}|{{did}}] {{b}} [more|more {{things}}|{{things}}|extra {{things}}|other {{things}}|new {{things}}|new ones|of the same]. {SUM_ASKED}",
    f"[There are|There were|We have|Somebody put|I see] {{a}} {{things}} {{place}}. [{{name}}|{{name}}'s {{relative}}|A {{relative}}] [puts|adds|lays|brings|places|throws] {{b}} [more|more {{things}}|{{things}}|others][| there| to them| with them]. {SUM_ASKED}",
    f"{{name}} {HAS} {{a}} {{things}}. [A|{{His}}|The] {{relative}} [gives|sends|lends|brings|hands|buys] {{him}} {{b}} [more|{{things}}|more {{things}}|others]. {SUM_ASKED}",
    f"[A|The|{{His}}] {{relative}} [gave|gives|brought|sent] {{name}} {{b}} {{things}}. Before[ that|], {{he}} had {{a}}[| {{things}}]. {SUM_ASKED}",
    f"{{name}} [{{did}}|{{does}}] {{b}} {{things}}, [but|and|while|though] {{he}} already [had|owned|has] {{a}}. {SUM_ASKED}",
    f"Having {{a}} {{things}}, {{name}} [{{does}}|{{did}}] [another {{b}}|{{b}} more|{{b}} extra]. {SUM_ASKED}",
    f"[At the beginning|In the beginning|To start with|First|One day|This morning] [there are|there were|we saw|{{name}} sees] {{a}} {{things}}[;|,|.] [then|and|afterwards|soon|in the evening] {{b}} [new|more|other|further] ones [arrive|come in|are bought|are found|turn up|are brought|are {{done}}|come]. {SUM_ASKED}",
    f"The [number|count|stock|pile] of {{things}} [goes up|rises|grows|increases|climbs] from {{a}} by {{b}}. {SUM_ASKED}",
    "How many {things} [does {name} have|are there|will there be|will {name} have|are that] if {he} [has|had|owns] {a} and [{does}|gets] {b} more?",
    "[If|When|Suppose|Say|Imagine] {name} [has|owns|had] {a} {things} and [{does}|then {does}] {b} [more|others|new ones][,|.] [how many {things} does {he} have|how many are there|what is the total|how many {things} is that]?",
    "{name} [wants to|is going to|plans to|has to|will] {do} {b} {things} and [already has|has|owns] {a}. How many {things} will {he} have?",
    f"To the {{a}} {{things}} [of {{name}}|{{place}}|that {{name}} has|{{name}} owns], [a|{{his}}] {{relative}} adds {{b}}[| more]. {SUM_ASKED}",
    unseen=GAIN.unseen,
)
TWO_PART_WORDINGS = Grammar(
    "{name} {did} {a} {things} {time} and {b}[ more| {things}| others|] {time2}. How many {things} [did {he} {do}|did {name} {do}|were {done}|is that|was that|were that][| in total| altogether| in all]?",
    f"{{Time}} {{name}} {{does}} {{a}} {{things}}[ and|,|;|.] {{time2}} [{{he}} {{does}}|{{name}} {{does}}|another|] {{b}}[| more| {{things}}]. {SUM_ASKED}",
    "{Time} {a} {things} [are|were] {done}, {time2} [|another |]{b}[| more]. How many {things} [are|were] {done}[| in total| altogether| by {name}]?",
    "{name} {does} {a} {things} and {his} {relative} [{does}|] {b}[| {things}| more]. How many {things} [do they {do}|are {done}|is that|do they have|do both have][| together| in total| altogether]?",
    f"[There are|{{name}} has|{{name}} keeps|{{name}} sees|We count] {{a}} {{things}} {{place}} and {{b}}[ more| {{things}}| others|] {{place2}}. {SUM_ASKED}",
    f"{{a}} {{things}} [are|lie|stand|wait] {{place}}[ and|,|;] {{b}} [|more |others |]{{place2}}. [{{name}} counts them. |{{name}} takes all of them. |All belong to {{name}}. |]{SUM_ASKED}",
    f"[In|One|The first] {PAIRED} [has|holds|contains|there are] {{a}} {{things}}[ and|,|;] [the other|another|the second|a second][| one] [has|] {{b}}[| {{things}}]. {SUM_ASKED}",
    f"{{name}} has {{a}} [{{color}}|small|old|big|good] {{things}} and {{b}} [{{color2}}|large|new|little|bad] [ones|{{things}}]. {SUM_ASKED}",
    "How many {things} [are|make|is|are that:] {a} {place} and {b} {place2}[ together|]?",
    unseen=GAIN.unseen,
)
LOSE_WORDINGS = Grammar(
    f"{{name}} {HAS} {{a}} {{things}}[| {{place}}][{NEXT}|, but][ {{does}}| {{did}}] {{b}}[| of them| {{things}}| of these| of the {{things}}]. {LEFT_ASKED}",
    f"[There are|There were|We had|Somebody left|I saw] {{a}} {{things}} {{place}}. {{name}} [{{does}}|{{did}}|takes away|took|takes] {{b}}[| of them| {{things}}]. {LEFT_ASKED}",
    f"{{name}} [{{did}}|{{does}}|has {{done}}|had {{done}}] {{b}} [of|out of] [{{his}}|the|] {{a}} {{things}}. {LEFT_ASKED}",
    f"{{b}} of [{{name}}'s|the|{{his}}|these|our] {{a}} {{things}} [are|were|have been|got|had been] {{done}}[| by {{name}}| {{time}}]. {LEFT_ASKED}",
    f"[Of|From|From among] [|the |{{his}} |all ]{{a}} {{things}}[|, {{name}} had|, {{name}} has], {{b}} [are|were|have been|got] {{done}}. {LEFT_ASKED}",
    f"[Of|From] [the|{{his}}|] {{a}} {{things}}[,|] {{name}} [{{does}}|{{did}}|has {{done}}] {{b}}[|, sadly|, alas]. {LEFT_ASKED}",
    f"[There were|There are|{{name}} had|{{name}} saw] {{a}} {{things}} {{place}}[, but|. But|; then|. {{Time}}|, and] {{b}}[| of them] [were {{done}}|broke|disappeared|rolled away|got lost|went missing|are gone|were bad|had to go|got wet|vanished|were stolen|fell down|melted]. {LEFT_ASKED}",
    "{name} [brought|took|sent|bought|made|ordered|showed|dragged] {a} {things} [to the market|to a friend|to school|from town|into the house|on a trip|to {his} {relative}|through the rain], but {b}[| of them] [broke|were lost|were bad|fell down|got wet|disappeared|were stolen|did not fit]. How many {things} [were still good|were left|came through|were fine|did {name} keep|remained|could be used]?",
    "[If|When|Suppose|Say|Imagine] {name} [has|owns|had] {a} {things} and [{does}|then {does}|must {do}] {b}[| of them][,|.] [how many {things} are left|how many remain|how many {things} does {he} keep|what is left]?",
    "How many {things} [are left|remain|does {name} keep|does {name} still have|will be left] [if|when|after] {he} [has|had] {a} and [{does}|{did}] {b}[| of them]?",
    f"{{Doing}} {{b}} of {{his}} {{a}} {{things}} [was a mistake|was not easy|was necessary|took {{name}} all day|made {{name}} sad]. {LEFT_ASKED}",
    "[When|Once|As soon as] {name} has {done} {b} of {a} {things}, [how many {things} are left|how many remain|how many are still there|what is left]?",
    f"The [number|count|stock|pile] of {{things}} [goes down|falls|shrinks|drops|sinks] from {{a}} by {{b}}. {LEFT_ASKED}",
    f"[A|The|{{His}}] {{relative}} [takes|took|borrows|needs|wants|steals] {{b}} of [{{name}}'s {{a}} {{things}}|the {{a}} {{things}} that {{name}} has]. {LEFT_ASKED}",
    "{name} needs {a} {things} and has [only |]{b}. How many [{things} |more {things} |more |][are missing|does {he} need|are still needed|must {he} find]?",
    "{name} has {a} {things}, {his} {relative} has {b}. How many [more {things}|{things} more] does {name} have?",
    unseen=LOSE.unseen,
)
EACH = "[each|in each|in every one|in each of them|per {box}|in each {box}|every time]"
GROUP_WORDINGS = Grammar(
    f"{{name}} [has|buys|fills|owns|finds|gets|sells|carries|brings|bought|had|ordered] {{a}} {{boxes}} [with|of|that contain|holding] {{b}} {{things}} {EACH}. {SUM_ASKED}",
    f"{{name}} [has|buys|fills|owns|finds|gets|sees|brings|bought] {{a}} {{boxes}}[,|:|;] {{b}} {{things}} {EACH}. {SUM_ASKED}",
    f"{{name}} [has|buys|fills|owns|finds|gets|bought] {{a}} {{boxes}}. [Each|Every one|Each one|Each {{box}}|Every {{box}}|Each of them|One {{box}}] [contains|has|holds|is filled with|comes with|has room for|is full with] {{b}}[| {{things}}]. {SUM_ASKED}",
    f"[There are|We see|{{name}} counts|On the table are|Here are] {{a}} {{boxes}}[;|,|.| and] [every|each] [one|{{box}}|of them] [has|contains|is filled with|holds] {{b}} {{things}}. {SUM_ASKED}",
    f"[Each|Every one|All] of [{{name}}'s|the|these|our] {{a}} {{boxes}} [contains|has|holds|is filled with] {{b}} {{things}}. {SUM_ASKED}",
    f"{{b}} {{things}} [are|go|fit|lie|belong] [in|into] [each|every one|every single one] of [the |these |{{name}}'s |]{{a}} {{boxes}}. {SUM_ASKED}",
    f"{{name}} [lays|packed up|sorts|stores|drops|lined up|throws|gathers] {{b}} {{things}} in [each|every single one|all] of {{a}} {{boxes}}. {SUM_ASKED}",
    "How many {things} [are|fit|lie|does {name} have|are there] in {a} {boxes} [with|of|that hold] {b} [{things} |]each?",
    "[If|When|Suppose|Say] [one|a single|every|each] {box} [holds|contains|has] {b} {things}[,|.] [how many {things} are in|how many {things} do we find in|how many {things} fit into|what do we get from] {a} {boxes}?",
    "[If|When|Suppose|Say] {name} [has|fills|buys|sees] {a} {boxes} [of|with] {b} {things} [each|per {box}][,|.] [how many {things} is that|how many {things} does {he} have|what is the total|how many {things} are there]?",
    "{a} {boxes}, {b} {things} [each|per {box}|in each]: [how many {things} does {name} have|how many in total|how many {things} are there|what is the total]?",
    f"One {{box}} [holds|has|contains] {{b}} {{things}}. {{name}} [has|buys|fills|takes] {{a}} {{boxes}}[| of this kind| like that]. {SUM_ASKED}",
    "{name} {does} {b} {things} [a day|every day|each day|an hour|per day]. How many {things} [does {he} {do}|is that|are {done}] in {a} [days|hours]?",
    unseen=GROUPS.unseen,
)
ASIDE = Grammar(
    "{name} is {n} years old.",
    "[It is|It was] a [sunny|rainy|cold|warm|windy|quiet] [day|morning|afternoon].",
    "{name} lives [near the sea|in a small town|on a hill|far away].",
    "{name} likes {things}[ very much| a lot|].",
    "[The shop|School|The market] [opens|closes|starts] at {n}.",
    "{His} [dog|cat|sister|brother] is called {other}.",
    "[Nobody|Everybody] [knows why|is happy|is watching].",
    "{He} has [a good|a bad|a fine|no] plan.",
    "The {things} are [very |quite |]{color}.",
    "{name} is [in a hurry|glad|tired|at home].",
)
PRONOUNS = (("he", "his", "him"), ("she", "her", "her"), ("they", "their", "them"))


def _verb_slots(draw: Draw, verbs: tuple[list[str], ...]) -> dict[str, object]:
    forms = [form.replace("_", " ") for form in draw.choice(verbs)]
    if draw.chance(0.03):  # the question alone must be enough where the verb is not known
        stem = odd_word(draw)
        forms = [stem, f"{stem}s", f"{stem}ed", f"{stem}ed", f"{stem}ing"]
    return {**dict(zip(("do", "does", "did", "done", "doing"), forms, strict=True)), "Doing": forms[4].capitalize()}


def slots(draw: Draw, kind: str, name: str, boxes: str) -> dict[str, object]:
    """Everything a wording of this kind may mention besides the numbers and the things."""
    he, his, him = draw.choice(PRONOUNS[:2])
    place, place2 = draw.random.sample(PLACES, 2)
    time, time2 = draw.random.sample(TIMES, 2)
    verbs = {"gain": GAIN_VERBS, "lose": LOSE_VERBS, "two": PLAIN_VERBS, "groups": PLAIN_VERBS}[kind]
    return {
        "name": name,
        "he": he,
        "his": his,
        "him": him,
        "He": he.capitalize(),
        "His": his.capitalize(),
        "place": place,
        "place2": place2,
        "time": time,
        "time2": time2,
        "Time": time[0].upper() + time[1:],
        "relative": draw.choice(RELATIVES),
        "color": "red",
        "color2": "blue",
        "box": SINGULAR.get(boxes, boxes[:-1]),
        "boxes": boxes,
        "n": draw.number(5, 60),
        **_verb_slots(draw, verbs),
    }


def wording(draw: Draw, kind: str) -> str:
    """A template of the kind gain, two, lose or groups.

    In one out of eight cases it has a fact that does not matter.
    """
    grammar = {"gain": GAIN_WORDINGS, "two": TWO_PART_WORDINGS, "lose": LOSE_WORDINGS, "groups": GROUP_WORDINGS}[kind]
    text = grammar.wording(draw)
    if draw.chance(0.12):
        return f"{ASIDE.wording(draw)} {text}"
    return text
