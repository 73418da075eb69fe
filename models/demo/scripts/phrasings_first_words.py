"""What people type into a model that they meet for the first time, for training; data only.

Tests of the line, nods, keyboard noise, other languages, counting, capitals, sums that are too
hard, and subjects that the model knows nothing of.
"""

from __future__ import annotations

from corpus_grammar import Grammar

TEST = Grammar(
    "[test|testing|test test|this is a test|a test|just a test|test message|testing, testing|ping|check|is this on|does this work|does it work|are you working|say something|hello test|test 1 2 3|one two three test|try|demo|start|go|run|are you alive|are you ready|can you read this|is it running|it works|first message|let me try something|anything|something][.|!|?||...]",
    "[say|write|print|answer|reply|tell me] [this is a test|something|anything|a word|a sentence|any text][.|!||, please.]",
)
HELLO_WORLD = Grammar("[hello world|hello, world|print hello world|say hello world|write hello world][.|!||]")
NOD = Grammar(
    "[ok|okay|yes|no|good|nice|cool|fine|I see|sure|right|got it|understood|aha|hm|hmm|wow|lol|great|interesting|yeah|yep|nope|alright|so|well|perfect|haha|true|maybe|not really|of course|exactly|no way|really|ah|oh|amazing|impressive|not bad|awesome|very nice|not good|bad|wrong|that is wrong|correct|k|y|n][.|!||?|...]",
    "[oh|ah|well|hm|okay|yes|no][,|] [nice|good|I see|right|sure|that is good|fine|very good|interesting|that works][.|!||]",
)
LANGUAGE = Grammar(
    "[do you|can you|could you] [speak|understand|know|talk|write|answer in|read] [German|French|Spanish|Italian|Chinese|Japanese|Russian|Polish|Dutch|Hindi|Turkish|another language|other languages|Latin|Korean|Arabic|Portuguese][?||, please?]",
    "[which|what|how many] languages [do you speak|do you know|can you speak|can you write][?|]",
    "[answer|speak|write|say it] in [German|French|Spanish|Italian|Chinese|Japanese|Dutch][, please||][.|]",
    "[Guten Tag|Bonjour|Hola|Ciao|Hallo|Wie geht es dir|Was ist das|Wer bist du|Comment ça va|Qui es-tu|Cómo estás|Buongiorno|Was kannst du|Parlez-vous français|Sprechen Sie Deutsch|Was ist ein Token|Salut|Danke|Merci|Gracias][?|!||.]",
)
COUNT_TO = Grammar(
    "[count|please count|can you count|count up|count for me|now count|could you count] [to|up to|from 1 to|from one to] {n}[.||?|, please.]",
    "[list|write|give me|say|name|show me] the [numbers|first numbers|integers] [from 1 to|1 to|up to] {n}[.||, please.]",
    "[the numbers |numbers |count ]1 to {n}[.||]",
)
COUNT_DOWN = Grammar(
    "[count down|count backwards|please count down] [from] {n}[ to 1| to one||][.||, please.]",
    "count from {n} [down ]to 1[.|]".replace("[down ]", "[down |]"),
)
CAPITAL = Grammar(
    "[what is|what's|tell me|name|do you know|say|give me|can you tell me] the capital [city |]of {k}[?|.||, please.]",
    "[the capital|capital|capital city] of {k}[ is|?|: ||is what?]",
    "[which|what] [city|town] is the capital of {k}[?|]",
    "{k}[: capital?|'s capital?|, capital|: what is its capital?]",
    "what is {k}'s capital[?| city?|]",
)
TOO_HARD = Grammar(
    "[what is|what's|how much is|calculate|compute|tell me|work out||] {a} [+|-|*|/|plus|minus|times|divided by] {b}[?||=|.]",
    "[what is|how much is|calculate|] {p}% of {s}[?|.|]",
    "[what is|calculate|compute|] the [square root|cube root|logarithm|sine|cosine|factorial|square|tangent] of {s}[?|.|]",
    "[what is|how much is|calculate|] {s} [squared|to the power of {p}|percent of {p}|factorial|mod {p}|/ {p}|divided by {p}][?|.|]",
    "[divide|share] {s} [by|among] {p}[.|?|]",
    "[is|are] {s} [prime|a prime|a prime number|even|odd][?|]",
    "[what is|calculate|how much is|] {s} + {p} * {p}[?|]",
)
WORK_ON_TEXT = Grammar(
    "[summarize|summarise|rewrite|correct|translate|improve|proofread|shorten|paraphrase|classify|explain|check|finish|complete] [this|this text|the following|this sentence|my text|this paragraph][:|.| -] {s}",
    "[what is the|is this the right|find the] [mood|grammar|topic|language|meaning|mistake|error|spelling] [of|in] [this|the sentence][:|] {s}[?|]",
    "{s} [Is this correct|What does this mean|Who said this|Is that true|Correct this|Rewrite it|Translate it][?|.]",
)
TERMS = tuple(
    """quantum physics|black holes|photosynthesis|climate change|democracy|the blockchain|evolution|gravity|relativity
    |the theory of relativity|the French Revolution|World War II|the Second World War|Shakespeare|Python|Java|Rust|Linux|Kubernetes
    |GPT-4|ChatGPT|Claude|Gemini|bitcoin|Einstein|Albert Einstein|Newton|Napoleon|Julius Caesar|Mozart|Beethoven|Picasso
    |the Roman Empire|ancient Egypt|the Eiffel Tower|the Great Wall|Mount Everest|the Amazon|the Nile|the Pacific|Mars|Jupiter|the Moon
    |the solar system|the Milky Way|DNA|a virus|a vaccine|penicillin|the heart|the brain|the liver|a neuron|an atom|an electron|a molecule
    |oxygen|hydrogen|gold|iron|electricity|magnetism|light|sound|energy|entropy|thermodynamics|chemistry|biology|physics|mathematics|algebra
    |calculus|a derivative|an integral|the Pythagorean theorem|pi|infinity|a prime number|probability|statistics|philosophy|Plato|Aristotle|Kant
    |ethics|religion|Buddhism|capitalism|inflation|the stock market|a bank|money|taxes|insurance|a mortgage|marketing|a startup|the internet
    |a computer|a database|SQL|JavaScript|HTML|C++|a compiler|an operating system|a browser|wifi|Bluetooth|a smartphone|the iPhone|Google|Microsoft|Apple|Amazon
    |Facebook|Netflix|Wikipedia|Tesla|Elon Musk|the president|the pope|the queen|the UN|NATO|the European Union|America|Germany|China|India|Europe|Africa
    |football|basketball|chess|tennis|the Olympics|yoga|meditation|sleep|dreams|love|happiness|friendship|the meaning of life|life|death|God|time
    |music|jazz|rock music|a guitar|a piano|a symphony|painting|poetry|a haiku|a sonnet|a novel|Harry Potter|Star Wars|cinema|theatre
    |pizza|pasta|bread|cheese|wine|beer|coffee|tea|chocolate|a banana|an apple pie|cooking|a recipe|dinner|breakfast
    |dogs|cats|elephants|dinosaurs|whales|bees|spiders|a tiger|a volcano|an earthquake|a hurricane|the weather|rain|snow|the sky|the ocean|a rainbow
    |a car|an electric car|a train|a plane|a rocket|NASA|space travel|robots|artificial intelligence|machine consciousness|self-driving cars|a drone
    |a contract|the law|human rights|a passport|a visa|history|geography|economics|psychology|sociology|medicine|a headache|the flu|cancer|vitamin C
    |3D printing|nuclear power|solar power|a battery|oil|plastic|recycling|global warming|the ozone layer|a black hole|dark matter|string theory|the Big Bang"""
    .replace("\n", "").replace("    ", "").split("|")
)  # fmt: skip
TERM_REQUESTS = Grammar(
    "[write|make|tell me|give me|compose|create|show me] [a poem|a song|a joke|a haiku|an essay|a tweet|a fact|a fun fact|a quote|a speech|a riddle|a rap|a limerick|a blog post|a report|some code|a recipe|an email|a letter|a quiz] [about|on|with|for] {t}[.||!|, please.]",
    "[write|make|tell me|give me|compose|create|sing|show me] [a poem|a song|a joke|a haiku|an essay|a fact|a fun fact|a quote|a riddle|a rap|a limerick|a love letter|a recipe|some code|a letter|a sonnet|news|the news|a secret|something funny][.||!|, please.]",
    "[write|show me|give me|create|implement] [a|some|me a|the] [Python|Java|C++|Rust|JavaScript|SQL|bash|Go] [code|program|function|script|class|query|hello world|example][| that sorts a list| for {t}| to add two numbers| for a web server| for me][.||!|, please.]",
    "[write|show me|implement|code] [fizzbuzz|quicksort|bubble sort|fibonacci|a binary search|a web page|a regex|a sorting algorithm|a calculator|a todo app][ in Python| in Java||][.||]",
    "[who|what|where|when|why|how] [is|was|are|were|did|does] [the best|the first|the largest|the fastest|the oldest|the tallest|the most famous|the richest|the longest] [animal|country|city|river|mountain|person|book|film|song|ocean|building|planet|car|king|language|team][| in the world| of all| ever| in Europe| on earth][?|]",
    "[plan|recommend|suggest|find|book|list|name] [a trip|a hotel|a film|a book|three cities|five animals|three colors|ten countries|a restaurant|a name for my dog|a present|three books|some music|a hobby|five fruits|the planets|the months|the days of the week][| for me| to {t}| about {t}| in {c}][.||?]",
    "[who|what] are you [made of|afraid of|thinking|dreaming of|wearing|feeling|looking at][?|]",
    "[what do you think|what is your opinion|do you have an opinion|how do you feel] [about|of|on] {t}[?|]",
    "[compare|what is the difference between] {t} and {u}[?|.|]",
    "[is|are] {t} [good|bad|dangerous|healthy|real|important|better than {u}][?|]",
)
NOISE = tuple(
    "asdf qwerty qwertz asdfgh asdfasdf dfgdfg sdf jkl hjkl fghj lkj zxcv xxx aaa abc abcd bla blabla blah foo bar foobar baz xyz hahaha uhm eh ? ?? ! !!! ... . .. , - 1 2 42 123 0 :) ;) <3 # * @ a b x".split()
)
