"""Wordings of greetings and of questions about the model, for training; data only.

Questions that it cannot answer are among them.
"""

from __future__ import annotations

from corpus_grammar import Grammar

SYSTEM = Grammar(
    "You are [a|the|an] [helpful|friendly|careful|small|polite|patient|honest|quick|precise|quiet] [assistant|model|helper|chat partner|assistant of this server][.|. Answer [briefly|precisely|in English|only what is asked].|. [Be|Stay] [kind|short|exact|polite|calm].]",
    "[Answer|Reply|Respond] [briefly|precisely|politely|with care|in plain English|in full sentences|to the point][.|. Do not [guess|invent anything|repeat the question].]",
    "[Today is|The user is|You are talking to] a [student|customer|developer|guest|child|friend].",
    "[Help|Serve|Assist] the user[ with stories, sums and lists|].",
    "You are Headrace[.|, a demo model.|, a small model for tests.|, the demo of a gRPC server.]",
    "[Write|Return] [JSON|json] [where|when] [it is asked for|the user wants it].",
    "[Keep|Make] [answers|your answers] [short|simple|clear].",
)
GREETING = Grammar(
    "[hello|hi|hey|hello there|hi there|hey there|greetings|howdy|hiya|welcome|good day|good morning|good evening|hullo|yo|morning|evening|hey hey|hi again|hello again|salutations][!|.||,||!!| :)]",
    "[hello|hi|hey|good morning|good evening|greetings][,| to you,|] [Headrace|model|assistant|friend|machine|my friend|everybody|computer|dear model|you|robot|little model][!|.||?]",
    "[hello|hi|hey|good morning][,|!|.] [it is good to see you|I am new here|here I am|are you there|is anybody there|can you hear me|I am back|let us talk|glad to be here|what's up|how nice to see you|let us begin|I want to try you|anyone home|happy to see you][!|.|?|]",
    "[I wish you|have|wishing you] a [good|nice|fine|lovely|wonderful] [day|morning|evening|start]!",
    "[are you there|anybody there|is someone there|can we talk|shall we talk|let us chat][?|]",
    unseen=("Good afternoon!", "Hello, nice to meet you.", "Hi, good day."),
)
WHO_ARE_YOU = Grammar(
    "[who|what|who or what|what sort of being|which program|which software|what thing|what creature] are you[?||exactly?| really?| actually?|, please?]",
    "[what is|what's|tell me|may I know|can I ask|give me] your [name|full name|model name|identity][?|.|]",
    "[tell me|say|talk|write|explain] [something|a bit|more|a few words|a little|] about [yourself|you|who you are|what you are][.||?|, please.]",
    "are you [a|an] [AI|machine|robot|person|human|language model|program|computer|bot|chatbot|neural network|real person|big model|large model|LLM|model|somebody][?||or not?| or a human?]",
    "[which|what] [model|AI|program|LLM|bot|system] [are you|is this|am I talking to|do I use here|answers here|is running|is behind this][?|]",
    "[who|what] [am I talking to|is talking|is there|is answering|writes this|is speaking|am I chatting with|do I speak with|made these answers][?|]",
    "[introduce|describe|present] yourself[.||!|, please.| in one sentence.| briefly.]",
    "[do you have|have you got] a name?",
    "[how|what] [are you called|do they call you|should I call you|may I call you][?|]",
    "[who|what] [trained|made|built|created|wrote|developed] you[?|]",
    "[where do you come from|where were you trained|how were you made|how old are you|how big are you|how large are you|how many parameters do you have][?|]",
    "I [want|would like] to know who you are[.|]",
    unseen=("What kind of model are you?", "Please introduce yourself.", "Say who you are."),
)
ABILITY = Grammar(
    "[what|what else|which things] [can|could|do] you [do|offer|help with|answer|know|handle|talk about|write|do for me|tell me|solve|help me with|understand][?||exactly?| here?| for me?]",
    "[what|where] are you [good at|able to do|capable of|made for|trained for|useful for|best at|strong in|here for][?|]",
    "how [can|could|do|will] you [help|help me|assist me|support me|serve me|be useful|be helpful|make my day better][?||today?| with my work?]",
    "[what|which questions|which things] [can|should|may|could] [I|we|one|people] [ask|ask you|try|do here|request|do with you|expect|use you for|talk about with you][?|]",
    "[help|help!|help?|help me|please help|I need help|menu|options|commands|manual|usage|instructions|features|skills|abilities]",
    "[list|tell me|show me|name|describe|give me] your [skills|abilities|features|talents|functions|options|strengths|subjects|topics|capabilities][.||, please.|!]",
    "[what|which] [are|is] your [skills|abilities|features|talents|strengths|purpose|job|subjects|topics|role|use|function][?|]",
    "[give me|show me] [some|a few] [ideas|examples|suggestions|hints] [of what I can ask|what to ask you|what you can do][.|?|]",
    "[what|which] [subjects|topics|tasks|questions|jobs] [do you know|can you do|are you made for|fit you|do you like best|suit you|work with you][?|]",
    "I do not know what to ask[ you|].[ Any ideas?|]",
    "why [are you here|should I talk to you|should I use you][?|]",
    "[what is possible here|what works here|what is this good for|how does this work here][?|]",
    unseen=("What sort of things can you do?", "How can you be of use?", "Which tasks can you handle?"),
)
THANKS = Grammar(
    "[thank you|thanks|thx|thank you very much|thanks a lot|thanks a million|cheers|much obliged|thank you kindly|big thanks|a thousand thanks|ty|I thank you|thanks again|thank you again|my thanks][!|.||!!| :)|, model.|, my friend!|, that helped.| for your help.| for the answer!| for everything.]",
    "[great|good|super|wonderful|very good|nice|well done|excellent|fine|cool|lovely|brilliant|good job|that was good|that helps][,|!|.] [thank you|thanks|thanks a lot|thx|thank you very much][!|.|]",
    "[that|this|it] [was|is] [very |really |so |]( helpful|useful|kind|nice|good)[, thanks|. Thank you|, thank you|. Thanks][!|.|]".replace(
        "( ", "["
    ).replace(")", "]"),
    "I am [very |so |]grateful[.|!|]",
    unseen=("Many thanks!", "Thank you so much.", "Perfect, thank you."),
)
BYE = Grammar(
    "[bye|goodbye|good bye|bye now|see you|see you later|see you soon|farewell|good night|until later|until next time|so long|take care|cheerio|ciao|later|talk to you later|bye for now|see you around|see you next week|until we meet again|cu][!|.||, model.|, my friend!|, Headrace.| then.|, then!]",
    "[I have to go|I must go|I am leaving|I am off|it is late|that is all|I am done|time to sleep|time to go|we are finished|I will stop here][.|,|!] [bye|goodbye|see you|good night|see you later|take care][!|.|]",
    "[sleep well|have a nice evening|have a good day|have a nice weekend|all the best|I wish you a good night][!|.|]",
    unseen=("Bye bye", "See you tomorrow", "Have a good night"),
)
HOW_ARE_YOU = Grammar(
    "how [are you|are you doing|is it going|do you feel|is life|are things|goes it|is your day|have you been|do you do|are you feeling|is everything|are you getting on|was your night][?|| my friend?| now?| this morning?| at the moment?]",
    "are you [well|okay|all right|fine|in good shape|happy|feeling good|ok|tired|busy][?|| now?]",
    "[is everything|everything] [fine|okay|all right|good][?|]",
    "[what is|how is] your [mood|state|condition|health][?|]",
    "[hi|hello|hey][,|!] how are you[?| doing?|]",
    unseen=("How are you today?", "Are you doing well?"),
)
NOUN = "[{w}|{w}|{x}|{y}|sun|moon|king|queen|war|football|car|plane|computer|phone|film|song|planet earth|internet|dollar|euro|tree|horse|elephant|ship|coffee|tea|chess|snow|rain|money|law|art|tax|gold|iron|heart|brain|dream]"
OUTSIDE_WORDINGS = Grammar(
    "[what is|what's|tell me|name|do you know|which city is|can you tell me|say] the [capital|largest city|currency|national animal|president|mayor|weather|temperature|population|area|history|age|postal code|time zone|best hotel|airport|language|oldest building|main square|flag] [of|in] {c}[?|.|, please.|]",
    "who [is|was] the [mayor|king|queen|president|founder|owner|head|oldest citizen|best player|richest man|author|painter|hero] of {c}?",
    "[what is|what's|how is|tell me] the weather [like |]in {c}[| today| now| tomorrow| this week]?",
    "[will it|does it|did it] [rain|snow|get warm|get cold] in {c}[| today| tomorrow| this week| tonight]?",
    "[is it|was it] [raining|snowing|warm|cold|late|safe|nice] in {c}?",
    "who [wrote|painted|composed|discovered|found|built|directed|sang|designed|played|made] the [book|song|film|picture|play|first|opera|bridge|poem] [{w}|of {c}|{x}]?",
    "who won [the match|the game|the war|the race|the election] [between {c} and {d}|in {c}|of {y}|last year|yesterday]?",
    "[what is|what was|tell me|how high is] the [price|cost|value|weight|taste|origin|symbol|opposite] of [a |the |]{w}[| today| now| in {c}]?",
    "[who is|who was|do you know|have you met|tell me about|where is|what happened to|what do you think of|have you heard of|how rich is|how tall is|how heavy is|is it true what they say about] {n}?",
    "[when|where|how|why] [was|did|is|does|will] {n} [born|die|marry|live|work|study|go|leave|win|sing|sleep|travel|arrive|read]?",
    "what did {n} [say|do|eat|write|buy|want|sing|tell you|dream of] [yesterday|today|last week|in {c}|on Monday|then]?",
    "is {n} [married|rich|old|famous|at home|alive|a doctor|from {c}|my friend]?",
    "translate [{w}|the word {w}|this: {w}|the sentence I like the {w}] [into|to] [French|German|Spanish|Latin|Chinese|Italian|Japanese|another language|Greek|Polish].",
    "how do [I|you|we] [cook|bake|repair|build|clean|grow|draw|paint|sell|find|say|spell|open|catch|plant|feed|fix] [a |the |]{w}?",
    "[write|make|show me|create|program] [a program|a poem|a song|code|an email|an essay|a letter|a function|a joke|a script|a recipe|a web page|a speech] [that sorts|about|for|with|on|like] [the |]{w}.",
    "how far is [it from |]{c} [to|from] {d}?",
    "[what is|which is] the [way|road|fastest way|best route] from {c} to {d}?",
    "where can I [buy|find|rent|see|sell|repair|learn] [a |the |]{w}[| in {c}]?",
    "which [team|bus|train|mountain|lake|street|airline|road|bridge|artist|food] [is in|is near|plays in|goes to|comes from|leads to|belongs to|is famous in] {c}?",
    "what time is it[| now| in {c}| there]?",
    "what [day|year|month|date] is [it|it today|today|tomorrow]?",
    f"do you [like|love|hate|know|own|need|see|want|have|prefer|eat|believe in|remember] [the |a |my |]{NOUN}?",
    f"[what|why|how|when|where|who] [is|was|are] [the |a |an |]{NOUN}?",
    f"why [do|does|did|is|are] [the |]{NOUN} [fall|break|shine|cost so much|smell|exist|grow|change|move|blue|round|so big|cold|so heavy|important]?",
    f"how [big|heavy|long|fast|expensive|deep|dangerous|healthy|tall|warm|far|common] is [the |a |]{NOUN}?",
    f"[what|which] [color|size|shape|kind|name|meaning] [does|has|is|of] [the |a |]{NOUN}[ have|]?",
    f"[tell me|give me] [a joke|a fact|news|the news|a poem|a recipe|a secret|a riddle|the history|the truth] [about|of|with|from] [the |]{NOUN}[.|?|]",
    f"[explain|describe|draw|show me|sing about|play] [the |a |]{NOUN}[.|]",
    "[play|sing|draw|paint|book|order|call|send|buy|open|switch on|download|reserve] [me |][a |the |]{w}[.|, please.|!|]",
    "[what|which] [phone|car|book|film|music|food|game|team] do you [like|recommend|prefer|use]?",
    "[can you|could you|will you] [drive|sing|dance|cook|walk|see me|hear me|fly|call {n}|pay my bill|send a mail|book a flight to {c}|open the window|play music|browse the web]?",
    "what [will|would|should] [I|we|you|people] [do|eat|wear|buy|read|happen] [tomorrow|tonight|in {c}|next year]?",
    "[solve|prove|integrate|derive] [the equation|the theorem|the integral|x squared] [of|for|about] [the |]{w}.",
    "[should I|can I|may I] [trust|marry|call|visit|invite|believe|hire|help] {n}?",
    "when [does|did|will] [the |]{w} [open|close|start|end|arrive|begin|come back|fall]?",
    "[I feel|I am] [sad|ill|tired|bored|lonely|happy|sick][.|. What should I do?|. Help me.|. Any advice?]",
    "what is your [favourite|favorite|best|dearest] {w}?",
    "[in which country|on which continent|at which sea|in which valley] [is|lies] {c}?",
    "which [year|century|language|country] [was|is|saw] [{n}|{c}|the {w}]?",
    unseen=(
        "Tell me the weather forecast for {c}.",
        "Which river flows through {c}?",
        "Who invented the {w}?",
        "What is the phone number of {n}?",
        "How old is {n}?",
    ),
)
