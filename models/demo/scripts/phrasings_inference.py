"""Frames for questions about LLM inference in training.

`{t}` is a topic's name, `{n}` the name without its article.

Also the frames of questions that describe a topic in words of its own answer (`{clue}`), and the
ways to ask for a short answer (`{q}`). The topics belong to `corpus_inference`.
"""

from __future__ import annotations

from corpus_grammar import Grammar

UNSEEN_FRAMES = (
    "Someone mentioned {t} today; what did they mean?",
    "Walk me through {t}.",
    "Teach me about {t}.",
    "I don't get {t}, can you clear it up?",
    "Break down {t} for me.",
    "In plain words, what would {t} be?",
    "Give me the idea behind {t}.",
    "What's the deal with {t}?",
)
UNSEEN_SHORT = ("{q} A single sentence is enough.", "{q} Make it brief.", "Quick answer: {q}")

DO = "[|||please |can you |could you |would you |will you |I want you to |kindly |now |try to |let us see, |I'd like you to |you may ]"
TELL = "[explain|describe|define|clarify|introduce|outline|summarise|summarize|present|illustrate|sketch|characterise|discuss|interpret|cover|unpack|make clear]"
FIELD = "[|||| in LLM inference| in a language model server| in this context| in machine learning| in an inference engine| for language models| in serving| when we talk about models| in AI| on a server| in Headrace| in practice| here| in your field| in your words]"
TO_WHOM = "[|||| to a beginner| to me| like I am five| to a child| to my mother| for a newcomer| in simple terms| simply| in easy words| step by step| as if I knew nothing| in your own words| once more| again| to students| for the team| in a few words| properly| carefully]"
TALK = "[colleague|boss|teacher|friend|book|paper|blog|manual|talk|neighbour|professor|course|customer|document|video|lecture|report|ticket|log line]"
USES = "[talked about|wrote about|used the term|used the word|speaks of|mentions|keeps saying|always says|asked me about|complained about|praised|is about|refers to|is full of]"
CLUELESS = "[I have no idea what that is|What is that|What does that mean|Can you explain it|Please explain|What is it|What does it do|I do not know it|What might that be|Could you tell me more|Explain, please|Any idea|What is behind it|Help me|Do you know it|What was that]"

FRAME_WORDINGS = Grammar(
    f"[what|what exactly|so what|and what|but what|tell me what|say what|do you know what|can you tell me what|could you say what|I wonder what|I'd like to know what|I want to know what|explain what|I forgot what|nobody told me what|remind me what|please tell me what] [is {{t}}|is {{t}}|{{t}} is|{{t}} means|does {{t}} mean|{{t}} does]{FIELD}[?|.||?]",
    f"{DO}{TELL} {{t}}{TO_WHOM}{FIELD}[.||?|!]",
    f"{DO}{TELL} the [concept|idea|term|notion|meaning|principle|role|purpose|use|point|word|expression|technique|topic] [of|of|called] {{t}}{FIELD}[.||?]",
    "[meaning|definition|explanation|purpose|role|benefit|point|summary|basics|use|description|overview] of {n}[?||.|, please]",
    "{n}[ meaning| definition| explained| explanation|: what is it?|, what is that?|: meaning?|, please| in simple terms| summary| basics| - explain| for beginners| ELI5|: definition| overview| help| info|, explain it|???|?|?||!|...]",
    "[define|explain|describe|about|info on|meaning:|definition:|topic:|term:|keyword:|glossary:|eli5|help:|wiki] {n}[?||.|, please]",
    f"[how|in which way] does {{t}} [work|function|help|operate|matter|improve things|change things|make a difference]{FIELD}?",
    f"why [do we need|do people use|would I use|does one need|should I care about|do servers use|is there|do engines have|would anybody use|do we have|talk about] {{t}}{FIELD}?",
    f"why is {{t}} [important|useful|good|needed|helpful|relevant|interesting|necessary|so important|a thing]{FIELD}?",
    f"what [is|are] {{t}} [good for|used for|for|about|supposed to be|exactly|really|actually|there for|made for|all about]{FIELD}?",
    "what [is the|are the|is one] [benefit|benefits|advantage|advantages|purpose|point|role|use|function|meaning|idea|gain|sense|job|goal|value|effect|reason] of {t}?",
    f"what does {{t}} [do|mean|bring|give us|change|stand for|achieve|describe|refer to|offer|cost|solve|involve]{FIELD}?",
    f"[my|our|a|this|the] {TALK} {USES} {{t}}[. |, but |; |: ]{CLUELESS}[?|.]",
    f"I [read|heard|saw something|learned|was asked|have to write|have to give a talk|know nothing|want to know more|would like to know more|am reading|was told|need to learn|want to read|have a question] about {{t}}[. {CLUELESS}?|. {CLUELESS}.|.|, help me.|]",
    f"I [do not understand|don't understand|cannot explain|never understood|am confused by|am not sure about|have forgotten|am curious about|need a definition of|need to know|want to understand|am learning|am stuck with|struggle with] {{t}}[. {CLUELESS}?|. {CLUELESS}.|.||, please help.]",
    f"[tell|teach] [me|us] [something|more|a bit|everything|a little|what you know|all] about {{t}}{TO_WHOM}[.||?]",
    "[say|write] [something|a few words|a few sentences|a short text|a paragraph|two sentences|some lines] [about|on] {t}[.||?]",
    "[give|write|show|send|get] me [a|an|your|some|the] [short |good |simple |clear |quick |first |brief |rough |]{w} [of|for|on|to] {t}[.||?|, please.]",
    "[can|could|would] [you|somebody|anyone|someone] [explain|tell me about|describe|say something about|help me understand|help me with|shed light on|introduce me to|enlighten me on|give me details on] {t}[?||, please?]",
    f"[what|how much] do you know about {{t}}{FIELD}?",
    "[do you know|have you heard of|are you familiar with|ever heard of|does the name] {t}[?| tell you anything?|? Explain.|? What is it?]",
    "[when|if] [people|engineers|experts|they|papers|docs] [say|talk about|mention|write] {t}[,| -] what [do they mean|is meant|does that mean|is it|is that about]?",
    "[question|help|term|word|note] [about|on|regarding|concerning] {t}[: what is it?|.|: please explain.|?|]",
    "[is there|do you have] [a|an] [simple|short|good|easy|clear] [explanation|definition|description|summary] [of|for] {t}?",
    "[what|how] [should|must|can|do] [I|one|we|a beginner] [know|understand|learn|say|think|remember] about {t}?",
    f"{{t}}[, | - |: |? |. ]{CLUELESS}[?|.]",
    "[what kind of thing|what sort of thing] is {t}?",
    "[the word|the term|the name|the expression|the phrase] [\"{n}\"|'{n}'|{n}] [means|stands for|describes|refers to][ what|...|][?|]",
    "complete the sentence: {t} [is|means] ...",
    "[how would|how do] you [explain|define|describe|put|sum up] {t}[ to me| to a friend|]?",
    "[what happens|what goes on] [in|with|during] {t}?",
    "[an|one] example [sentence|text] [on|about] {t}[, please|]",
    unseen=UNSEEN_FRAMES,
)
NOUNS = tuple(
    "definition explanation description summary introduction overview idea notion answer account picture hint lesson".split()
)
SHORT_WORDINGS = Grammar(
    "{q} [answer|reply|explain|say it|respond|tell me] [in|with|using] [one|a single|just one|only one|one short] [sentence|line|phrase][.||!|, please.]",
    "{q} [keep it short|keep it brief|be brief|be short|be concise|short answer|briefly|in short|in brief|one sentence|one line|only one sentence|just one line|few words|in a nutshell|no details|not too long|only the essence|I have little time|a line will do|shortly][.||!|, please.]",
    "[briefly|in one sentence|in a single line|in one line|short|in short|in brief|in a nutshell|in few words|concisely|short answer please|short version|one-liner|one sentence only|tl;dr|to be brief|one line, please|just shortly][:|,|: | -] {q}",
    "[give me|I want|I need|write|just] [a short answer|a one-liner|one sentence|one line|a brief answer|the short version|only one sentence][:|.|,] {q}",
    "{q} [(one sentence)|(short)|(briefly)|[short]|- short|in one sentence|in one line|, in short|tl;dr]",
    unseen=UNSEEN_SHORT,
)
CLUE_WORDINGS = Grammar(
    "[what|which thing|which term|which idea|which concept|which technique|which part] {clue}?",
    "[what|which thing] is it that {clue}?",
    "[what do you call|what is the name of|name|tell me the name of|what is the word for|what do we call|how do you call|say what it is:|what is the term for] [something|the thing|that] [that|which] {clue}[?|.]",
    "[I am looking for|I search for|there is|I forgot the name of|it is] something that {clue}. [What is it|Which one|What do you call it|Its name|What am I thinking of|Explain it]?",
    "it {clue}. [What is it|What am I talking about|Which term is it|What is that called|Name it and explain it]?",
    "[who or what|which of your topics|which mechanism|which method|which word] {clue}?",
    "[guess|riddle|quiz][:|! |, ] [it|what|this] {clue}[?|.]",
    "[why|how] is there [something|a thing|a method] that {clue}?",
    "what {clue}",
)
SPAN_WORDINGS = Grammar(
    "{clue}?",
    "{clue}",
    '[I read|It says|The manual says|The text says|My notes say|Somewhere I saw|Explain|What is meant by|What is this about|Which topic is this|Tell me more|What does this describe|I do not understand|Comment on|Tell me about][:| ] "[|...]{clue}[|...]"[?|.|]',
    '[what|which term|which topic|which idea] [has to do with|goes with|is connected with|belongs to|comes to mind for|do you think of for] "{clue}"?',
    "[what about|how about|and|something about|question on|question about|I wonder about|can you explain|explain|tell me about|more on|why|how] {clue}[?|.|]",
    "[what|which idea] [explains|is behind|is about|deals with] [this:|] {clue}?",
)
