"""Wordings of requests for a story and of questions about one, for training; data only.

Grammars are grouped by what the request says of the story, because a story has to keep to that. The
stories belong to `corpus_stories`.
"""

from __future__ import annotations

from corpus_grammar import Grammar

UNSEEN_ASK = (
    "I want to hear about {a_kind} called {hero} and {a_object}. Tell me a story!",
    "Invent a tale of {a_kind} named {hero} and {a_object}.",
    "Could you write something short about {hero} the {kind} and {a_object}?",
    "My child wants a story with {a_kind} named {hero} and {a_object}.",
)
DO = "[|||please |can you |could you |would you |will you |I want you to |kindly |now |I'd like you to |you should |let us ]"
TELL = "[tell|tell me|tell us|write|write me|make up|create|compose|think up|narrate|give me|read me|tell the children|come up with|imagine|tell my daughter|craft|produce|write down|put together|begin|dream up|share]"
STORY = "[a story|a story|a short story|a little story|a bedtime story|a fairy story|a nice story|a children's story|a new story|one story|a funny story|a small adventure|an adventure|a story for children|a warm story|a story in a few sentences|a two-paragraph story|a brief story|a fable|a yarn]"
WISH = "[I want|I would like|I'd like|we want|the children want|my daughter wants|my son would like|I need|we need|my class needs|may I have|can I have|can we have|could we have|I wish for|how about|what about|I am in the mood for|it is time for|give us|next:|today I'd love]"
ABOUT = "[about|about|with|on|of|featuring|starring|that is about|in which we meet|whose hero is|around|that has to do with|involving|where the main character is]"
HERO = "[{a_kind} named {hero}|{a_kind} called {hero}|{hero} the {kind}|{hero}, {a_kind}|the {kind} {hero}|{hero}, the {kind}|{hero} ({a_kind})|{a_kind} whose name is {hero}|{hero}, who is {a_kind}|{a_kind} with the name {hero}|my friend {hero} the {kind}]"
AND_OBJECT = "[ and {a_object}|, and {a_object}|, {a_object}| with {a_object}| who has {a_object}| who finds {a_object}| who owns {a_object}| plus {a_object}| and also {a_object}| who needs {a_object}| and his or her {object}| who carries {a_object}| and, of course, {a_object}| who loves {a_object}|; it should also have {a_object} in it| together with {a_object}| and the {object}]"
THERE = "[there [is|should be|must be] {a_object} in it|{a_object} [plays a role|is important|should appear|must occur|matters]|it should [mention|contain|have|feature] {a_object}|use {a_object}|put {a_object} into it|do not forget {a_object}|include {a_object}|I also want {a_object} in it|the {object} matters]"
AT = "[|||, at {place}|, set at {place}| at {place}|. It happens at {place}|, and they are at {place}|. Place: {place}]"

FULL = Grammar(
    f"{DO}{TELL} {STORY} {ABOUT} {HERO}{AND_OBJECT}{AT}[.||?|!|, please.]",
    f"{WISH} {STORY} {ABOUT} {HERO}{AND_OBJECT}{AT}[.||?|!|, please.]",
    f"{STORY} {ABOUT} {HERO}{AND_OBJECT}{AT}[.||?|!|, please.]",
    f"{DO}{TELL} {STORY} {ABOUT} {HERO}[. | - |; |, and ]{THERE}{AT}[.||!]",
    f"{WISH} {STORY} {ABOUT} {HERO}[. | - |; ]{THERE}{AT}[.||!]",
    f"[story|short story|tale for children|bedtime story|story time|task: story|topic of the story|new story|story wanted|story idea][:| -|,] {HERO}{AND_OBJECT}{AT}[.||!|, please]".replace(
        "tale for children", "children's story"
    ),
    "[hero|main character|name|who][: | = | - ]{hero}[, |; |\n|. ][kind|what|species or job|type|being][: | = | - ]{kind}[, |; |\n|. ][object|thing|item|with][: | = | - ]{object}[, |; |\n|. ][write|tell|make up|give me|now tell] [a|the|a short] story[.||!|, please.]",
    "[story|write a story|tell a story|a story][: | with these words: | with: | using the words | from these words: | out of ]{hero}, {kind}, {object}[.||, {place}.]",
    f"[there was|once there was|one day there was|imagine|let there be|here is|we have|take] {HERO}{AND_OBJECT}{AT}. [Go on|Continue|Tell the rest|What happened|Tell the story|Write the story|And then|Make a story of it|How does it go on][.|?|!]",
    f"what [happened|could happen|happens] [to|when we meet|with] {HERO}{AND_OBJECT}{AT}? [Tell the story|Tell me|Write it as a story|Make it a story|Tell it as a story].",
    f"[continue|begin|start|open] [a|the] story [with|about] {HERO}{AND_OBJECT}{AT}[.||!]",
    f"do you know [the story|a story|any story] {ABOUT} {HERO}{AND_OBJECT}?",
    f"[I love stories|I cannot sleep|it is late|we are bored|we have ten minutes|it is raining][.|,|!] {DO}{TELL} {STORY} {ABOUT} {HERO}{AND_OBJECT}[.||!]",
    f"{DO}{TELL} {STORY} {ABOUT} [a {{trait}}|a very {{trait}}|the {{trait}}] {{kind}} [named|called] {{hero}}{AND_OBJECT}[.||!]",
    f"{HERO}{AND_OBJECT}{AT}: {DO}{TELL} {STORY}[ about them| with both||.]",
    f"{DO}{TELL} {STORY} in which {HERO} [finds|uses|loses|needs|has|sees|gets|wants|carries|looks for] {{a_object}}{AT}[.||!]",
    f"{HERO}{AND_OBJECT}{AT} [- story please|- a story, please|: story|- make it a story|. Story!|. A story!]",
    f"[something|anything|a few lines|a text|two paragraphs|some sentences|a page] [for children |nice |for the evening |sweet |]{ABOUT} {HERO}{AND_OBJECT}[.||!|, please.]",
    f"{DO}[write|tell me|make up|compose] [anything|a few lines|a text|two paragraphs|some sentences|a page|what happened] {ABOUT} {HERO}{AND_OBJECT}[.||!|?|, please.]",
    f"{DO}let {HERO} [find|use|lose|have|need] {{a_object}} in [a story|a short story|your story][.||!]",
    f"[my grandson|my little brother|the class|a girl|our guest|the baby|my niece] [asks for|would love|needs|is waiting for|wishes for] {STORY} {ABOUT} {HERO}{AND_OBJECT}[.||!]",
    unseen=UNSEEN_ASK,
)
HERO_ONLY = Grammar(
    f"{DO}{TELL} {STORY} {ABOUT} {HERO}{AT}[.||?|!]",
    f"{WISH} {STORY} {ABOUT} {HERO}{AT}[.||?|!]",
    f"{STORY} {ABOUT} {HERO}[.||!|, please.]",
    f"[story|bedtime story]: {HERO}",
)
OBJECT_ONLY = Grammar(
    f"{DO}{TELL} {STORY} {ABOUT} {{a_object}}{AT}[.||?|!]",
    f"{WISH} {STORY} {ABOUT} {{a_object}}[.||?|!]",
    "[story|bedtime story]: {object}",
    f"{STORY} {ABOUT} {{a_object}}[.||!|, please.]",
)
KIND_AND_OBJECT = Grammar(
    f"{DO}{TELL} {STORY} {ABOUT} {{a_kind}}{AND_OBJECT}{AT}[.||?|!]",
    f"{WISH} {STORY} {ABOUT} {{a_kind}}{AND_OBJECT}[.||?|!]",
    "[story|bedtime story]: {kind}, {object}",
    f"{DO}{TELL} {STORY} {ABOUT} [a {{trait}}|a very {{trait}}|the {{trait}}] {{kind}}{AND_OBJECT}[.||!]",
)
KIND_ONLY = Grammar(
    f"{DO}{TELL} {STORY} {ABOUT} {{a_kind}}{AT}[.||?|!]",
    f"{DO}{TELL} {STORY} {ABOUT} [a {{trait}}|the {{trait}}|a very {{trait}}] {{kind}}[.||?|!]",
    f"{WISH} {STORY} {ABOUT} {{a_kind}}[.||?|!]",
    f"{STORY} {ABOUT} {{a_kind}}[.||!|, please.]",
    "[story|bedtime story]: {a_kind}",
)
FREE = Grammar(
    f"{DO}{TELL} {STORY}[.||?|!|, please.| of your own.| about anything.| for tonight.| that you like.| about friendship.| about an animal.| about courage.| with a happy ending.]",
    f"{WISH} {STORY}[.||?|!|, please.]",
    "[story|story time|once upon a time|a story|bedtime|story please|another story|one more story|surprise me with a story|any story][!|.||?|...]",
    f"do you know {STORY}?",
)

HE = "[{hero}|{he}]"
STORY_WORD = "[the story|this story|your story|that story|it|the text|what you told|this adventure|the plot]"
WHO_QUESTIONS = Grammar(
    "[who|which character|which person or animal|who exactly] [is|was] the [hero|main character|star|leading character|protagonist|central figure|main figure|most important character|principal character|leading role][ of| in][ the story| this story| it| your story| all this]?",
    "[whom|who] [is|was] [the story|this story|your story|that story|the text] [mainly |mostly |really |]about?",
    "[who|what being|what creature] [is|was] {hero}?",
    "what [was|is] {hero} like?",
    "[what kind of [creature|character|person|being]|what sort of character] [is|was] {hero}?",
    "[tell me about|describe|say something about|who exactly was|introduce] [{hero}|the hero|the main character|the protagonist][.|?|]",
    f"[name|tell me|give me|identify|say] [the [hero|main character|protagonist|central figure]|who the [hero|main character|protagonist] [is|was]|about whom {STORY_WORD} [is|was]][.||?]",
    "[what is|what was|tell me] the name of the [hero|main character|protagonist][?|.]",
    "what is [the hero|the main character|the protagonist] [called|named]?",
    "[I forgot|remind me|sorry,|again:|and|so] who [is|was] [the hero|the main character|it that you told about|in the centre of it][?|.|]",
    "[hero|main character|protagonist|character][?|:]",
    unseen=("Which character is the story mainly about?", "Who was it about?"),
)
FRIEND_QUESTIONS = Grammar(
    "[who|whom] [did {hero} meet|did the hero meet|was the friend|became the friend of {hero}|is the friend|helped {hero}|was with {hero}|else was there|was the other one|is the other character|came along|was the second character|is the companion]?",
    "[who|what] [is|was] {friend}?",
    "[what is|what was|tell me|give me] the name of [the friend|{hero}'s friend|the other character|{his} friend|the companion][?|.]",
    "[what is|what was] [{hero}'s friend|the other character|the companion|the friend] [called|named]?",
    "what kind of [animal|creature|being] [is|was] [{friend}|the friend]?",
    "[tell me about|describe|say something about|introduce] [{friend}|the friend|the other character|{hero}'s friend][.|?|]",
    "[name|identify|tell me] [the friend|the other character|{hero}'s friend|the second character|the companion][.||?]",
    "with whom did {hero} [talk|speak|go|share it|spend the time|become friends]?",
    "[and|so|again:|remind me] who [was|is] [{friend}|the friend|the other one][?|.|]",
    "did {hero} [have|meet|find] a friend?",
    "[friend|companion|other character][?|:]",
    unseen=("What is the friend of {hero} called?", "Which friend did {hero} have in the story?"),
)
HOME_QUESTIONS = Grammar(
    f"where [did {HE} live|does {{hero}} live|was {{his}} home|was {{his}} house|is the home of {{hero}}|was the house of {{hero}}|did the hero live|is {{hero}} at home|was {{hero}} at home|was the home of the hero|did {{hero}} stay|did {{hero}} have {{his}} house|did the {{kind}} live|lived {{hero}}]?",
    "[tell me|say|do you know|can you tell me|remind me|name the place] where [{hero}'s home was|the house of {hero} stood|{he} lived|the hero lives|{hero} is at home|the {kind} had {his} house][.|?|]",
    "[what|which] [is|was] the [home|address|place|house] of [{hero}|the hero|the {kind}]?",
    "[at which place|near what|in which spot|in which area] did [{hero}|the hero|the {kind}|{he}] live?",
    "[describe|name|tell me] [the home|the place where {hero} lives|{hero}'s home|the hero's home][.|?|]",
    "[home of {hero}|{hero}'s home|home|house of the hero|residence][?|:]",
    "where was {hero} from?",
    "[I forgot|again:|and|so] where [did {hero} live|was {hero} at home|did {he} live][?|.|]",
    unseen=("In what place did {hero} have a home?", "Tell me where {hero} lived."),
)
OBJECT_QUESTIONS = Grammar(
    "[what|which] [thing|object|item|tool|article] [was|is] [in the story|important|needed|used|in it|special|at the centre|the story about|mentioned|of importance|part of the story|so important]?",
    "[what|which] [thing|object|item|tool] [did {hero} have|did {he} have|does {hero} own|did they use|plays a role|played a role|appears|appeared|did {he} carry|occurs|belongs to the story|did I ask for|did it need|was there]?",
    "what was the [thing|object|item|important thing|special thing][ in the story| called| of the story|]?",
    "[name|tell me|give me|identify|say|remember|find] the [thing|item|important object|important thing|special thing|object that was needed|object of {hero}|thing that was important][.||?|, please.]",
    "[what|and what] did {hero} [have with {him}|use|carry|care about|need|hold]?",
    "[thing|object|item|important thing][?|:]",
    "[I forgot|again:|remind me|so] what [the object was|thing it was|was the object|was the thing][?|.|]",
    "around which [thing|object] [does|did] [the story|it] turn?",
    unseen=("Which thing mattered in the story?", "Name the object in the story."),
)
