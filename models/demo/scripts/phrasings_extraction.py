"""Wordings of extraction for training: requests, and sentences with and without facts.

A carrier is composed of parts in varying order: how the person is introduced, which verb, which
label, which separator. Facts and answers belong to `corpus_extraction`.
"""

from __future__ import annotations

from corpus_extraction_templates import ASK, BOOKING, CONTACT, EVENT, ORDER, PERSON, PRODUCT
from corpus_grammar import Grammar

JSON = "[JSON|json|a JSON object|JSON format|valid JSON|compact JSON|a JSON record|one JSON object]"
FETCH = "[extract|return|give me|get|pull out|list|collect|read off|write down|pick out|take|copy|show me|output|tell me|report|note|select|look up|fetch|send me|provide|name|produce|state]"
POLITE = "[|||please |can you |could you |would you |I want you to |kindly |your task: |now |you should |let us ]"
THE_KEYS = "[the |these keys: |the fields |the values of |the attributes |the following: |only |all of |]{keys}"
SOURCE = "[|from this|from this text|from the text|in this text|in this message|from the note|from this line|given here|that you find here|of this record|from what I write|from this paragraph|in the words below|mentioned here|from the report]"
LABEL = "[Text|Input|Message|Note|Line|Passage|Document|Content|Data|Email|Report|Paragraph|Source|News|Letter|Statement|Entry|Record|Words|Raw text|Post|Article|Chat|Log|Notice|Memo]"
FIELD_LABEL = "[Fields|Columns|Attributes|Properties|Names|Wanted|Output|Slots|Schema|Needed|Entries|Form|Fields wanted|JSON fields|Return]"
QUOTED = "[{s}|{s}|{s}|\"{s}\"|'{s}'|<<{s}>>|({s})|\n{s}|\n\n{s}]"

ASK_WORDINGS = Grammar(
    f"{POLITE}{FETCH} {THE_KEYS} {SOURCE} [as|in|in the form of|using|formatted as|as a piece of|in the shape of] {JSON}[: |:\n|. |.\n|.\n\n|\n|:\n\n| - ]{QUOTED}",
    f"{{s}}[ |\n|\n\n]{POLITE}{FETCH} {THE_KEYS} {SOURCE} [as|in|using|formatted as] {JSON}[.|!||?|, please.]",
    f"{POLITE}[turn|convert|change|transform|translate|rewrite|bring|put|make] [this|this text|the following|what follows|the text below|this note|the next line] [into|to] {JSON} [with|with the keys|with the fields|that has|having|containing|holding|for] {{keys}}[: |:\n|. |\n|.\n\n]{QUOTED}",
    f"{{s}}[ |\n|\n\n]{POLITE}[turn|convert|change|transform|make] [this|it|that|this text|the text above] [into|to] {JSON} [with|with the keys|that has|having|containing|for] {{keys}}[.||!]",
    f"{{s}}[ |\n|\n\n][What [is|are] {THE_KEYS}|Which {{keys}} [is|are] [given|named|mentioned] here]? [Answer|Reply|Respond] [in|with|as|using] {JSON}[.||!]",
    f"[What [is|are] {THE_KEYS} [here|in this text|in this line|below|in what follows]|Which {{keys}} do you see]? [Answer|Reply|Respond] [in|with|as|using] {JSON}[.|:][ |\n]{QUOTED}",
    f"{LABEL}[: |:\n| - | = ]{QUOTED}[\n|\n\n| ]{FIELD_LABEL}[: | - | = ]{{keys}}[\nJSON:|\nAnswer:|\nResult:||\nAs JSON, please.|\nJSON =|\nOutput:]",
    f"{FIELD_LABEL}[: | - | = ]{{keys}}[\n|\n\n|. | ]{LABEL}[: |:\n| - | = ]{QUOTED}[\nJSON:|\nAnswer:|\nResult:||\nJSON =]",
    f"{POLITE}{FETCH} {THE_KEYS}[ in JSON| as JSON|].[ |\n]{LABEL}[: |:\n| - ]{{s}}[|\nJSON:|\nResult:]",
    f"{POLITE}[read|look at|study|go through|consider|take|see|process|analyse] [this|the text|the following|this line|the note below|this message][:| and][ |\n]{QUOTED}[ |\n|\n\n]{FETCH} {THE_KEYS} [as|in] {JSON}.",
    f"{POLITE}[read|look at|study|go through|consider|process|analyse] [the text|the following|the note below] [and|, then] {FETCH} {THE_KEYS} [as|in] {JSON}[:|.][ |\n]{QUOTED}",
    f"[JSON|json][ with| of| for|:] {THE_KEYS}[, please|]{SOURCE}[: |:\n|. |\n]{QUOTED}",
    f"{{keys}} [as|in|to] [JSON|json][: |:\n|. |\n| please: |, from this: ]{QUOTED}",
    f"{QUOTED}[ -> | => |\n-> |\n=> | >> | : ][JSON|json][: | with | of | (]{{keys}}[|.|?]",
    f"{POLITE}[write|build|create|prepare|make up|form|compose|fill] {JSON} [with|from|of|for|holding] {THE_KEYS}[.|:|, using this:][ |\n]{QUOTED}",
    f"{{s}}[ |\n|\n\n]{POLITE}[write|build|create|prepare|form|compose] {JSON} [with|of|for|holding] {THE_KEYS}[.||!]",
    f"[I am looking for|I want|We need|My program needs|The database wants|I'd like|Our form asks for|Missing:] {THE_KEYS}[, as JSON| as JSON| in JSON|][. |: |.\n|:\n|.\n\n]{QUOTED}",
    f"{POLITE}[fill in|complete|fill out|fill] [the fields|the form|the record|this form|the JSON fields|the columns] {{keys}}[ as JSON| in JSON|][: |. |.\n|\n]{QUOTED}",
    unseen=ASK.unseen,
)

WHO = "[|||my neighbour |our friend |my cousin |my colleague |our teacher |the doctor |the painter |my uncle |her sister |his brother |old |young |the singer |a farmer named |a woman called |a man called |a student named |somebody called |our guest |the driver |the new cook |a girl named |a boy called |the engineer ]"
WHO_IS = f"{WHO}{{name}}"
LIVES = "[lives|works|stays|studies|teaches|was born|grew up|has a house|has a flat|runs a shop|owns a garden|feels at home|settled|spends the summer|has a job|was seen|was raised|found work|learned to swim|keeps bees|got married|sings|resides] in"
COMES = "[comes from|is from|moved to|went to|returned to|arrived from|left for|travelled to|likes|visited|loves|knows|cannot forget|writes from|calls from|has come to|drove to|was sent to|dreams of|misses|never left]"
CITY = f"[{LIVES}|{LIVES}|{COMES}] {{city}}"
AGED = "[is {age}|is {age} years old|is now {age}|is {age} years of age|turned {age}|turned {age} in May|has just turned {age}|is already {age}|will soon be {age}|was {age} then|became {age}|is only {age}|is about to turn {age}|must be {age}|says that {he} is {age}|is {age} now|has lived {age} years|feels young at {age}]"
AND = "[ and |, and |. {He} |; {he} |. {He} also |, |. Also, {he} |, who | - {he} |\n{He} ]"
SEPARATOR = "[, |; | / | | |\n| - |. |  ]"
IS = "[: |: | = | - | is ]"
N, A, C = (
    "[name|person|who|called|full name|Name|NAME]",
    "[age|years|years old|Age|how old|AGE]",
    "[city|town|place|lives in|City|residence|location|from|CITY]",
)

PERSON_WORDINGS = Grammar(
    f"{WHO_IS} {AGED}{AND}{CITY}[.|.|!|]",
    f"{WHO_IS} {CITY}{AND}{AGED}[.|.|!|]",
    f"{WHO_IS}[, {{age}},|, aged {{age}},|, age {{age}},| ({{age}})|, {{age}} years old,|, a {{age}}-year-old,|, now {{age}},| - {{age}} -|, who {AGED},] {CITY}[.|.|!|]",
    f"{WHO_IS} [from|of|in|out of|over in] {{city}} {AGED}[.|.|!|]",
    f"{WHO_IS}[, from {{city}},| ({{city}})|, a citizen of {{city}},|, born in {{city}},|, living in {{city}},|, who {CITY},] {AGED}[.|.|!|]",
    f"[In|From|Near|Around|Here in|All over] {{city}} [lives|works|there is|there lives|I met|we saw|they know|everybody likes|comes|you will find] {WHO_IS}[, {{age}}|, who {AGED}|, aged {{age}}| ({{age}})|, {{age}} years old|. {{He}} {AGED}].",
    f"[At|At the age of|With|Aged|When {{he}} was|Since] {{age}}[,| years,|] {WHO_IS} {CITY}[.|.|!|]",
    "[I am|My name is|I'm|Hello, I am|Call me|They call me|Hi! My name is|You may call me] {name}[, | and |. |; ][I am {age}|I'm {age} years old|my age is {age}|I turned {age}][, | and |. |; ][I live in|I come from|I'm from|my city is|I work in|I write from] {city}.",
    "[I am|I'm] {age}[ years old|][, | and |. ][my name is|I am|people call me] {name}[, | and |. ][I live in|I come from|I'm from|you find me in] {city}.",
    f"{N}{IS}{{name}}{SEPARATOR}{A}{IS}{{age}}{SEPARATOR}{C}{IS}{{city}}[|.]",
    f"{A}{IS}{{age}}{SEPARATOR}{N}{IS}{{name}}{SEPARATOR}{C}{IS}{{city}}[|.]",
    f"{C}{IS}{{city}}{SEPARATOR}{N}{IS}{{name}}{SEPARATOR}{A}{IS}{{age}}[|.]",
    f"{N}{IS}{{name}}{SEPARATOR}{C}{IS}{{city}}{SEPARATOR}{A}{IS}{{age}}[|.]",
    "{name}[, |; | / |\n| - | | (]{age}[, |; | / |\n| - | |, ]{city}[.|]",
    f"[Have you met|Do you know|Did you see|Say hello to|Let me introduce|Meet|Here is|Look, there is|Please welcome|We welcome] {WHO_IS}[?|.|,|!] {{He}} {AGED}{AND}{CITY}.",
    f"[Have you met|Do you know|Meet|Here is|Please welcome|We welcome] {WHO_IS} [from|of] {{city}}[?|.|,|!] {{He}} {AGED}.",
    f"{{city}} [is home to|is proud of|has a new citizen:|misses|welcomes|is the city of|sends us|knows] {WHO_IS}[, {{age}}|, who {AGED}|, aged {{age}}| ({{age}})].",
    f"[Last week|On Monday|Today|Once|Some time ago|In the news:|They say that|I heard that|It is said that|The letter says that] {WHO_IS} {CITY}{AND}{AGED}.",
    f"The [oldest|youngest|new|tallest|best] [teacher|doctor|player|cook|member|baker] in {{city}}, {{name}}, {AGED}.",
    f"{{age}} [years old|candles on the cake|years young|today|birthdays so far]: {WHO_IS} {CITY}.",
    unseen=PERSON.unseen,
)

BUYS = "[bought|ordered|buys|orders|wants|gets|got|needs|takes|picked|asked for|will get|received|chose|is buying|purchased|requested|paid for|has ordered|would like|reserved|collected|signed for|carried off]"
GOODS = "[{quantity} {item}s|{quantity} {item}s|{quantity} pieces of {item}s|{quantity} new {item}s]"
MONEY = "[{price} dollars|{price} dollars|${price}|{price} USD|a sum of {price} dollars|a price of {price} dollars]"
ORDER_WORDINGS = Grammar(
    f"{WHO_IS} {BUYS} {GOODS} [for|at|at a price of|, price|and pays|and paid|, which costs|, total|worth|and owes us|; the bill is|. The price is|. {{He}} pays|. That is|. It costs] {MONEY}[.|.|!| in all.]",
    f"[For|At|With] {MONEY}[,|] {WHO_IS} {BUYS} {GOODS}[.|!]",
    f"[We|They|I|The shop|Our store|The market] [sold|sent|gave|delivered|shipped|handed|promised|mailed] {GOODS} to {WHO_IS} [for|at] {MONEY}.",
    f"[We|They|I|The shop|Our store] [sold|sent|gave|delivered|shipped|handed] {WHO_IS} {GOODS} [for|at] {MONEY}.",
    f"{GOODS} [were|are|have been] [sold|sent|given|delivered|shipped|reserved|packed] [to|for] {WHO_IS}[, price| for| at|, who paid|. {{He}} paid|; bill:|, who owes] {MONEY}.",
    f"[Order|Invoice|Bill|Receipt|Sale|Purchase|Delivery|Request][: |# |, | - ]{GOODS}{SEPARATOR}{MONEY}{SEPARATOR}[for |to |by |customer |buyer |]{{name}}[.|]",
    f"[Order|Invoice|Bill|Receipt|Sale|Purchase|Delivery|Request] [of|for|from|by] {{name}}[: |, | - |\n]{GOODS}{SEPARATOR}{MONEY}[.|]",
    f"{WHO_IS} [paid|pays|spent|gave us|owes|offered|has to pay|transferred] {MONEY} for {GOODS}[.|!|, and left.]",
    f"{N}{IS}{{name}}{SEPARATOR}[quantity|pieces|count|number|Quantity]{IS}{{quantity}}{SEPARATOR}[item|goods|thing|Item]{IS}{{item}}s{SEPARATOR}[price|total|sum|cost|Price]{IS}{MONEY}",
    f"[price|total|sum|cost|Price]{IS}{MONEY}{SEPARATOR}{GOODS}{SEPARATOR}{N}{IS}{{name}}",
    f"[Please|Kindly|Do not forget to|Tomorrow we must|Can you] [send|ship|bring|deliver|pack|hand over] {GOODS} [to|for] {WHO_IS}[, price| for|; the price is|. The total is|. {{He}} pays|, who pays] {MONEY}.",
    f"{MONEY} [was paid by|came from|is the bill of|is due from|is what we got from|were sent by] {WHO_IS} for {GOODS}.",
    f"[Hello|Hi|Dear shop|Good day], [I am|my name is|this is] {{name}}[. I| and I] [need|want|order|would like|ordered] {GOODS} [for|at] {MONEY}.",
    f"The [bill|receipt|cart|basket|parcel|list] of {{name}} [shows|lists|contains|has] {GOODS}[ and| for|, total|; price] {MONEY}.",
    f"{GOODS}[, |; | - | / ]{{name}}[, |; | - | / ]{MONEY}[.|]",
    unseen=ORDER.unseen,
)

TAKES = "[takes place|happens|is held|starts|will be|is planned|begins|opens|will take place|will be held|is going to be|returns|is announced|was moved]"
AT = "[{t} in {city} on {date}|{t} on {date} in {city}|{t} in {city}, {date}]"
THE_EVENT = "[the|our|the yearly|this year's|the next|the famous|the big|the summer|the small|a free|one more] {event}"
EVENT_WORDINGS = Grammar(
    f"{THE_EVENT} {TAKES} [in|near|at] {{city}}[ on|,| -| from|; date:|. The date is] {{date}}[.|.|!|]",
    f"{THE_EVENT} {TAKES} [on|from|,] {{date}}[ in|,| at|; city:|. The city is] {{city}}[.|.|!|]",
    f"[On|From|Starting|Save the date:] {{date}}[,|] [there is|we have|they hold|you can see|we open|I go to|everybody goes to|don't miss|you should visit] {THE_EVENT} in {{city}}[.|!]",
    f"[In|At|Near] {{city}}[,|] {THE_EVENT} {TAKES} [on|,|from] {{date}}[.|!]",
    f"{{city}} [will host|hosts|plans|prepares|has|organises|invites you to|gets ready for|is waiting for|announces|holds] {THE_EVENT} [on|, date|this time on|from] {{date}}[.|!]",
    f"[We|Friends|All of us|They|The students|Let us] [meet|go|travel|come|come together] [to {{city}}|in {{city}}] [on|,] {{date}} for {THE_EVENT}.",
    f"[Come|Welcome|Invitation|You are invited|Tickets|Join us|Please come|Posters call you] [to|for] {THE_EVENT}[, | - | on ]{{date}}[, | - | in ]{{city}}[.|!]",
    f"{THE_EVENT} [in|of|at] {{city}} [is on|is set for|was moved to|will be on|is planned for|begins on|ends on|falls on|has a new date:|starts] {{date}}[.|!]",
    "[event|what|Event|occasion|title][: | = | - ]{event}[, |; |\n| / | ][city|where|place|City|town|location][: | = | - ]{city}[, |; |\n| / | ][date|when|day|Date][: | = | - ]{date}",
    "[date|when|day|Date][: | = | - ]{date}[, |; |\n| / | ][event|what|Event|occasion|title][: | = | - ]{event}[, |; |\n| / | ][city|where|place|City|town][: | = | - ]{city}",
    "[city|where|place|City][: | = | - ]{city}[, |; |\n| / | ][date|when|day|Date][: | = | - ]{date}[, |; |\n| / | ][event|what|Event|occasion][: | = | - ]{event}",
    "{event}[, |; | / | - |: |\n]{city}[, |; | / | - |\n]{date}[.|]",
    "{date}[, |; | / | - |: |\n]{event}[, |; | / | - | in |\n]{city}[.|]",
    "{date}[, |; | / | - |: |\n]{city}[, |; | / | - |\n]{event}[.|]",
    f"[Are you free|Do you have time|Will you be there|Who comes along] on {{date}}? {THE_EVENT} {TAKES} in {{city}}.",
    f"[I look forward to|Everybody talks about|I bought a ticket for|Nothing beats|She sings at|He speaks at|We work for] {THE_EVENT} [in|at] {{city}}[, which is on| on|. It is on|, and it is on] {{date}}.",
    f"[After long talks|After all|This time|Again|At last][,|] {{city}} was [named|picked|voted] for {THE_EVENT} [on|of|, date] {{date}}.",
    unseen=EVENT.unseen,
)

COSTS = "[costs|is|sells for|is sold for|is yours for|is priced at|is on sale for|was sold for|now costs|is offered at|cost me|would cost|is worth|was only|comes at]"
PRODUCT_WORDINGS = Grammar(
    f"[The|This|That|Our|My|One|Her] {{color}} {{item}} {COSTS} {MONEY}[.|!| today.| only.]",
    f"[We sell|I sell|They offer|You can buy|I bought|She got|He found|They have|Look at|I want|We ordered|Shops sell] [the|this|our|one] {{color}} {{item}} [for|at|, price|; it costs|. It costs|. The price is] {MONEY}[.|!]",
    f"[For|At|With only] {MONEY}[,|] [you get|we sell|I bought|you can have|she found|they give you|one can buy] [the|this|our|one] {{color}} {{item}}[.|!]",
    f"{MONEY} [buys|for|is the price of|is enough for|is too much for|gets you|is what we ask for|was paid for] [the|this|our|one] {{color}} {{item}}[.|!]",
    f"[The|This|Our] {{item}} is {{color}}[ and|,|. It|;] {COSTS} {MONEY}[.|!]",
    f"[The|This|Our] {{item}} {COSTS} {MONEY}[ and is|, color:|. It is|; it is|, and its color is|. The color is|, painted] {{color}}[.|!]",
    f"[The|This|Our] {{item}}[, color {{color}},| in {{color}}|, which is {{color}},| (color: {{color}})|, all {{color}},| painted {{color}}] {COSTS} {MONEY}[.|!]",
    f"[item|product|thing|article|Item|name of the thing]{IS}{{item}}{SEPARATOR}[color|paint|Color|look]{IS}{{color}}{SEPARATOR}[price|cost|dollars|Price]{IS}{{price}}[| dollars]",
    f"[color|paint|Color]{IS}{{color}}{SEPARATOR}[price|cost|Price]{IS}{{price}}[| dollars]{SEPARATOR}[item|product|thing|article|Item]{IS}{{item}}",
    "{item}[, |; | / | - ]{color}[, |; | / | - ]{price} dollars",
    "{color} {item}[, |; | / | - |: |\n]{price} dollars",
    f"[Sale|New|Offer|Today|Special|On the shelf][: |! | - ]{{item}}[, | in | - ]{{color}}[, | - | for ]{MONEY}[.|!]",
    f"[What a|Such a|Do you like the|Is the] {{color}} {{item}}[!|?] [It|This one] {COSTS} {MONEY}.",
    f"[Everything {{color}} is cheap:|The best thing we have is {{color}}:] the {{item}} {COSTS} {MONEY}.",
    unseen=PRODUCT.unseen,
)

NIGHTS = "[{nights} nights|{nights} nights|a stay of {nights} nights|{nights} nights in all]"
BOOKING_WORDINGS = Grammar(
    f"{WHO_IS} [booked|books|reserved|wants|needs|asked for|has|takes|orders|paid for] [a room|a bed|a flat|a hotel|a cabin] in {{city}}[ for|,| -|:] {NIGHTS}[ from|, from|, arrival|, starting|; first day:| beginning| as of|. {{He}} arrives on] {{date}}.",
    f"{WHO_IS} [arrives|will arrive|comes|lands|checks in|gets] [in|to] {{city}} on {{date}}[ and stays| for| and leaves after|, for|. {{He}} stays|; length:|, staying|. The stay is] {NIGHTS}.",
    f"[On|From|As of|Beginning on|From the day of] {{date}}[,|] {WHO_IS} [travels to|stays in|is in|lives in|rests in|has a room in|is a guest in|rents a room in] {{city}} for {NIGHTS}.",
    f"[Please|Kindly|We must|Can you|I want to|Do not forget to] [book|reserve|keep|hold|confirm|note|prepare] {NIGHTS} in {{city}} for {WHO_IS}[ from|, from|, arrival|, starting|, first night] {{date}}.",
    f"{NIGHTS} in {{city}}[ for|:|,|, guest:| are booked for| were paid by] {WHO_IS}[ from|, from|, arrival|, starting|, first night|; date:] {{date}}.",
    f"[guest|name|Guest|Name|traveller]{IS}{{name}}{SEPARATOR}[city|place|where|City]{IS}{{city}}{SEPARATOR}[nights|stay|Nights]{IS}{{nights}}{SEPARATOR}[date|arrival|from|Date]{IS}{{date}}",
    f"[date|arrival|from|Date]{IS}{{date}}{SEPARATOR}[nights|stay|Nights]{IS}{{nights}}{SEPARATOR}[city|place|where|City]{IS}{{city}}{SEPARATOR}[guest|name|Guest|Name]{IS}{{name}}",
    f"[The hotel|Our house|The inn|A hostel] in {{city}} [has a room for|keeps a bed for|is ready for|confirms the stay of|welcomes|waits for] {WHO_IS}[ on| from|, date|, arrival|; first day] {{date}}[,| for| -|: ] {NIGHTS}.",
    f"{{name}}[, |; | / | - ]{{city}}[, |; | / | - ]{NIGHTS}[, |; | / | - ]{{date}}[.|]",
    f"[Hello|Hi|Dear hotel|Good day], [I am|my name is|this is] {{name}}[. I| and I] [need|want|would like|book|reserve] a room in {{city}} [from|on] {{date}} for {NIGHTS}.",
    f"The [trip|holiday|journey|visit|tour] of {{name}} to {{city}} [begins on|is on|starts on|was moved to|is planned for] {{date}} and [lasts|takes|has] {NIGHTS}.",
    f"[Holiday plan|Travel note|Trip|Booking|Reservation|Confirmed][: | - |, ]{{name}}[, | - ]{{date}}[, | - | to ]{{city}}[, | - | for ]{NIGHTS}.",
    f"[How nice|Good news|At last][:|!] {{city}} [will see|gets|has] {WHO_IS} for {NIGHTS}[, from| from|, starting] {{date}}.",
    unseen=BOOKING.unseen,
)

CALL = "[call|phone|ring|text|dial|try|use|the number is|telephone]"
WRITE = "[write to|email|mail to|send a note to|use the address|send it to|the address is]"
CONTACT_WORDINGS = Grammar(
    f"[You can reach|Reach|Contact|Ask|Find|You get|People reach|Please contact|Talk to] {WHO_IS} [at|by|via|under|on|with] {{phone}} [or|and|or else|, or also] [at |by mail at |via |]{{email}}.",
    f"[You can reach|Reach|Contact|Ask|Find|You get|People reach|Please contact|Talk to] {WHO_IS} [at|by|via|under] {{email}} [or|and|or else] [at |by phone at |via |]{{phone}}.",
    f"[To reach|For|To speak with|To find|If you look for|For news from] {WHO_IS}[,|:] {CALL} {{phone}} or {WRITE} {{email}}[.|!]",
    f"[To reach|For|To speak with|To find|If you look for] {WHO_IS}[,|:] {WRITE} {{email}} or {CALL} {{phone}}[.|!]",
    f"{CALL} {{phone}}[ or|,|;] {WRITE} {{email}}[ and ask for|, it belongs to|; the person is|, that is|. You will speak with|, attention] {WHO_IS}.",
    f"{WRITE} {{email}}[ or|,|;] {CALL} {{phone}}[, it belongs to|; the person is|, that is|. You will speak with|, attention] {WHO_IS}.",
    f"[The |Our |]{N}{IS}{{name}}{SEPARATOR}[phone|tel|telephone|number|Phone|call]{IS}{{phone}}{SEPARATOR}[email|mail|address|e-mail|Email]{IS}{{email}}",
    f"[email|mail|address|Email]{IS}{{email}}{SEPARATOR}[phone|tel|number|Phone]{IS}{{phone}}{SEPARATOR}{N}{IS}{{name}}",
    f"[phone|tel|number|Phone]{IS}{{phone}}{SEPARATOR}{N}{IS}{{name}}{SEPARATOR}[email|mail|Email]{IS}{{email}}",
    "{name}[, |; | / | - |\n| (]{phone}[, |; | / | - |\n]{email}[.|]",
    "{name}[, |; | / | - |\n| (]{email}[, |; | / | - |\n]{phone}[.|]",
    f"{WHO_IS} [has|uses|has got|gave us|left|listens to] the [number|phone number|telephone number] {{phone}} and the [email|address|email address] {{email}}.",
    f"{WHO_IS} [has|uses|gave us|left] the [email|address|email address] {{email}}[ and|,| with] the [number|phone number] {{phone}}.",
    f"The [email|address|mail address] [of|for] {WHO_IS} is {{email}}[, the phone is| and the number is|; phone:|. The number is|, the telephone] {{phone}}.",
    "My name is {name}[, | and |. ][my number is|you can call|my phone is] {phone}[, | and |. ][my email is|my address is|I read mail at] {email}.",
    f"[New|Changed|Old|Corrected] [number|contact|entry] for {WHO_IS}: {{phone}}[, | and |; ]{{email}}.",
    "{email} and {phone} [belong to|are for|lead to|both reach] {name}.",
    unseen=CONTACT.unseen,
)

NEUTRAL = Grammar(
    "The [weather|sky|morning|evening|day] was [fine|grey|quiet|warm|cold|long|bright|wet][ again| that day| as always|].",
    "[Everybody|Nobody|Somebody|The whole team] [was happy|laughed|was tired|waited|knew it|had time|agreed].",
    "[Please|Do not] [keep|lose|forget|copy|print] this [note|letter|message|page].",
    "[More|Further] [details|news|notes] [will follow|come later|are below|are in the letter].",
    "[Thank you|Thanks] [for your help|for everything|in advance|for reading].",
    "[We|They] [talked|waited|walked|sang|laughed] for [a while|hours|a long time].",
    "[This|That|It] [is|was] [good|important|old|great|strange|small] news.",
    "[The rest|All of this|Nothing of this] is [a secret|not important|well known|still open].",
    "[Best|Kind|Warm] [wishes|regards]!",
    "[By the way|As you know|As always|In short], [all is well|we are fine|nothing has changed|time is short].",
    "[The train|The bus|The mail|The boat] was [late|early|on time|full].",
    "[I hope|We hope] [all is well|you are fine|this helps].",
)
