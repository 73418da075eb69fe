"""Wordings of follow-up questions: why, shorter, more, again, another topic, and sums that go on.

Data only; the answers come from `corpus_follow_up`. `{t}` is a topic's name, `{c}` a number.
"""

from __future__ import annotations

from corpus_draw import Phrasings
from corpus_grammar import Grammar

IT = "[it|that|this|it|that]"
REASON = Phrasings(
    train=("Why?", "Why does it help?", "Why does that matter?", "What is it good for?", "And why?", "What for?"),
    unseen=("Why is it worth it?", "What would I gain from that?", "And why is that a good thing?"),
)
SHORTER = Phrasings(
    train=("Shorter, please.", "In one sentence, please.", "Briefer?", "tl;dr", "Can you say that in one sentence?"),
    unseen=("Fewer words, please.", "Can you make that shorter?", "Squeeze it into one line."),
)
MORE = Phrasings(
    train=("Tell me more.", "More, please.", "Go on.", "What else?", "Can you say more about it?"),
    unseen=("Can you go deeper?", "Keep talking.", "What more is there to say?"),
)
AGAIN = Phrasings(
    train=("Again, please.", "Can you repeat that?", "Say that again.", "Once more.", "Pardon?"),
    unseen=("Would you say it another time?", "I missed that.", "What was that again?"),
)
OTHER = Phrasings(
    train=("And what is {t}?", "What about {t}?", "How about {t}?", "And {t}?"),
    unseen=("Now turn to {t}.", "Let us go on to {t}.", "Does that also hold for {t}?"),
)
PLUS = Phrasings(
    train=("Plus {c}?", "And plus {c}?", "Add {c}.", "Now add {c} to it.", "And {c} more?"),
    unseen=("Put {c} on top of that.", "Raise the result by {c}.", "Then {c} on top?"),
)
MINUS = Phrasings(
    train=("Minus {c}?", "And minus {c}?", "Subtract {c}.", "Take {c} away from it.", "And {c} less?"),
    unseen=("Lower the result by {c}.", "Remove {c} from that.", "Then {c} off?"),
)
TIMES = Phrasings(
    train=("Times {c}?", "And times {c}?", "Multiply it by {c}.", "Now times {c}.", "And that times {c}?"),
    unseen=("Take the result {c} times.", "Then {c} times that?", "Multiply the result with {c}."),
)

REASON_WORDINGS = Grammar(
    f"[and |but |so |okay, |hm, |good, |yes, but |]why[| is {IT} so| so| though| really| exactly][?|??|]",
    f"[and |but |so |okay, |]why [does|would|should|could] {IT} [help|matter|work|help me|be useful|be better|be good|pay|make sense][?|]",
    f"[and |but |so |okay, |]why is {IT} [useful|good|important|needed|done|necessary|better|helpful|done that way|faster|so important|relevant][?|]",
    f"[and |but |]why [do we need|do people use|would I use|should I use|does one need|do servers do|do you need|would anybody want|would I want|bother with|have|use] {IT}[?|]",
    f"[and |but |so |]what [is|'s] {IT} [good for|for|useful for|used for|needed for][?|]",
    f"[and |but |so |]what is the [point|use|benefit|advantage|purpose|reason|sense|idea|gain|good][| of {IT}| behind {IT}][?|]",
    f"[and |but |]how does {IT} help[| me| us| a server| in practice| with speed| the user| anybody][?|]",
    f"[and |]what does {IT} [bring|help|give me|buy me|change|solve|improve|do for me|do for users][?|]",
    "[and |]what for[?|]",
    "[give me|tell me|name|what is] [a|one|the|any] [reason|benefit|advantage|argument][.|?|, please.|]",
    f"who [needs|wants|uses] {IT}[?|]",
    f"[should I care|so what|is {IT} important|is {IT} useful|does {IT} matter|what is so good about {IT}|and without {IT}|what would happen without {IT}|what if I do not have {IT}][?|]",
    unseen=REASON.unseen,
)
SHORTER_WORDINGS = Grammar(
    "[shorter|briefer|short|brief|more briefly|too long|in short|in brief|in a nutshell|tl;dr|tldr|summary|a summary|the short version|a shorter answer|less text|not so long|short version][, please|, thanks||][.|!|?|]",
    "[and |now |okay, |][in|with|as] [one|a single|just one|only one|a short] [sentence|line|phrase][, please|][.|?|!|]",
    f"[can you |could you |please |now |][say|put|explain|write|repeat|tell me] {IT} [shorter|in one sentence|more briefly|in fewer words|in short|in one line|in a nutshell|in a few words|briefly][, please|][.|?|]",
    f"[make|keep] {IT} [short|shorter|brief|briefer][, please|][.|!|]",
    f"[please |can you |could you |][sum {IT} up|summarise {IT}|summarize {IT}|shorten {IT}|cut {IT} down|summarise|summarize|shorten][, please|][.|?|]",
    f"[simpler|more simply|easier|in simple words|in plain words|simple words|in simpler terms|I did not get {IT}|I do not understand|I don't understand|too complicated|that is too much|explain {IT} simply|like I am five|ELI5][, please|][.|?|!|]",
    unseen=SHORTER.unseen,
)
MORE_WORDINGS = Grammar(
    f"[please |can you |could you |][tell me|say|explain|write|give me] [more|a bit more|a little more|something more|some more][| about {IT}| of {IT}| on {IT}][, please|][.|?|!|]",
    "[more|go on|continue|and then|what else|anything else|more details|more detail|details|in more detail|elaborate|next|longer|a longer answer|and further|more about it|and|further][, please|][.|?|!|...|]",
    "[I want|I would like|I'd like] [to know more|to hear more|more|more details|a longer answer|to learn more][, please|][.|!|]",
    f"[is there|is that all|was that all|that is all|what else is there|anything more|what else should I know|explain {IT} in more detail][?|]",
    unseen=MORE.unseen,
)
AGAIN_WORDINGS = Grammar(
    "[again|once more|one more time|repeat|pardon|come again|sorry|what|excuse me][, please|][?|.|!|]",
    "[please |can you |could you |would you |][repeat|say] [that|it|your answer|this|the last answer][ again| once more|][, please|][.|?|]",
    "[what did you say|I did not hear that|I forgot what you said|the same again|your last answer again][, please|][?|.|]",
    unseen=AGAIN.unseen,
)
OTHER_WORDINGS = Grammar(
    "[and|what about|how about|and what about|okay, and|now|then|so|and now|and what is|and what are|but what is|and what does it mean:|good. And|thanks. And] {t}[?|??|]",
    "[then |and then |but ][what is|what's|what are] {t}[, then|][?|]",
    "[now |then |next |please ][explain|describe|define|tell me about] {t}[, please|][.|]",
    "[next|another one|other question|next question|another question]: {t}[.|?|]",
    unseen=OTHER.unseen,
)
PLUS_WORDINGS = Grammar(
    "[and |now |then |and then |okay, |]plus {c}[?|.||=|, please.]",
    "[and |now |then |please |]add [{c}|another {c}|{c} more|{c} to it|{c} to that|{c} to the result][?|.|]",
    "[and |with |][{c} more|another {c}][?|.|]",
    "[what|how much] is [that|it] plus {c}[?|]",
    "[and |now |]+ {c}[?||=]",
    "[if I|when I|now I] add {c}[ to it| to that|][?|]",
    unseen=PLUS.unseen,
)
MINUS_WORDINGS = Grammar(
    "[and |now |then |and then |okay, |]minus {c}[?|.||=|, please.]",
    "[and |now |then |please |][subtract|take away|take] {c}[ from it| from that|][?|.|]",
    "[and |][{c} less|without {c}|less {c}][?|.|]",
    "[what|how much] is [that|it] minus {c}[?|]",
    "[and |now |]- {c}[?||=]",
    unseen=MINUS.unseen,
)
TIMES_WORDINGS = Grammar(
    "[and |now |then |and then |okay, |]times {c}[?|.||=|, please.]",
    "[and |now |then |please |]multiply [it|that|this] [by|with] {c}[?|.|]",
    "[what|how much] is [that|it] times {c}[?|]",
    "[and |now |][*|x|×] {c}[?||=]",
    "[and |now |]{c} times [that|as much|as many][?|]",
    unseen=TIMES.unseen,
)
