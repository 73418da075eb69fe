"""Wordings of bare calculations and comparisons for training; data only.

The values come from `corpus_arithmetic`.
"""

from __future__ import annotations

from corpus_arithmetic_templates import ADD, LARGER, MUL, SUB
from corpus_grammar import Grammar

ASKED = (
    "[what is|what's|whats|how much is|how much are|tell me|say|give me|show me|I want to know|do you know|calculate|compute|"
    "solve|find|work out|figure out|determine|do|answer|please compute|please calculate|help me with|can you do|can you solve|"
    "could you calculate|would you compute|let us do|try|next:|now|and|the sum is|the task is|exercise:]"
)
NAMED = "[what is|what's|tell me|find|compute|calculate|give me|name|work out|I want to know|I am looking for|I'd like to have|please find|can you find|do you know|show me|write down]"
POLITE = "[|||please |can you |could you |would you |will you |you should |I want you to |I'd like you to |let us |now |kindly |try to |please go and ]"
GET = "[what do I get|what do you get|what do we have|how much is it|how much is that|what is the result|what is the answer|what comes out|where do I end up|what will it be|what is it then]"
WHO = "[I|you|we|one|somebody|they]"
MARK = "[?|.||?]"

ADD_WORDINGS = Grammar(
    f"{ASKED} {{a}}[ + |+| + | plus | and | added to | increased by | and then plus ]{{b}}{MARK}",
    "{a}[ + |+| plus | + ]{b}[ =| = ?|=|=?|?| is| equals| makes| is what?| equals what?| is how much?| makes how much?||, please.| - what is it?|, how much is it?|: result?]",
    f"{POLITE}[add|sum|sum up|add up|add together|combine|put together|total|count together] {{a}} [and|with|plus] {{b}}[.||, please.| for me.| now.]",
    f"{POLITE}[add {{b}} to|increase|raise|count on from|go up from|step up from] {{a}} [by|with] {{b}}.",
    f"{POLITE}add {{b}} to {{a}}[.|| for me.| and tell me the result.]",
    f"{POLITE}add[:|] {{a}}, {{b}}[.|]",
    f"{NAMED} [the|their|a] [sum|total|result|value|answer|outcome][ of| of adding| for| if you add| when adding| when you add| that you get from][:|] {{a}} [and|plus|to|with|+] {{b}}{MARK}",
    f"[what|how much|which number] [do I get|do you get|do we get|is it|comes out|results|will I have|shall I write] [if|when|once|after] {WHO} [add|put together|sum|join|combine] {{a}} [and|with] {{b}}{MARK}",
    f"[if|when|suppose|say|imagine] {WHO} [add|put|count|throw] {{b}} [to|on top of] {{a}}, {GET}?",
    f"[start|begin|we start|I start] [with|at|from] {{a}} and [add|go up by|count up by|then add|put on] {{b}}[.|,|:] {GET}?",
    "[what|which number|which one|what number] is {b} [more|greater|larger|higher|bigger] than {a}?",
    "{a} and {b} [together|in total|in all|altogether|summed up|added up|make how much?|is what in total?|makes]",
    "[the |][sum|addition|total|plus task][:| of|,] {a}[ and |, | + | plus ]{b}[?|.|]",
    f"[the numbers are|here are two numbers:|take|I have two numbers,|look at|given are] {{a}} and {{b}}. [what is their sum?|add them.|sum them up.|how much are they together?|add both.|{POLITE}add them up.|what is the total?]",
    f"{{a}}, and {{b}} [on top|more|in addition|added|extra][.|:|,] {GET}?",
    "my [list|bill|notebook] says {a} and {b}. [what is the sum|how much is it together|what do both make|how much in all]?",
    unseen=ADD.unseen,
)
SUB_WORDINGS = Grammar(
    f"{ASKED} {{a}}[ - |-| - | minus | less | without | reduced by | decreased by | take away | and then minus ]{{b}}{MARK}",
    "{a}[ - |-| minus | - ]{b}[ =| = ?|=|=?|?| is| equals| makes| is what?| equals what?| is how much?| leaves how much?||, please.| - what is it?|, how much is it?|: result?]",
    f"{POLITE}[subtract|take|take away|remove|deduct|pull|draw|cut] {{b}} from {{a}}[.||, please.| for me.| now.| and tell me the result.]",
    f"{POLITE}[take|cut|strike] {{b}} [off|away from|out of] {{a}}[.|]",
    f"{POLITE}[decrease|reduce|lower|shorten|diminish] {{a}} by {{b}}[.||, please.| for me.]",
    f"{NAMED} the [difference|gap|distance|result|answer][ between| between the numbers| of| for][:|] {{a}} [and|minus|less] {{b}}{MARK}",
    f"[what|how much|which number] [is left|is left over|stays|do I keep|do I get|do you get|comes out|is there still|will be left] [if|when|once|after] {WHO} [take|take away|remove|subtract|deduct] {{b}} from {{a}}{MARK}",
    "[what|how much] [is left|is left over|stays|is there] of {a} [if|when|once|as soon as] {b} [is|are] [taken away|gone|subtracted|removed|lost|cut off|used up]?",
    f"[if|when|suppose|say|imagine] {WHO} [take|subtract|remove|cut] {{b}} [from|off|out of] {{a}}, {GET}?",
    f"[start|begin|we start|I start] [with|at|from] {{a}} and [take away|go down by|count down by|then remove|subtract] {{b}}[.|,|:] {GET}?",
    "[what|which number|which one|what number] is {b} [less|smaller|lower|fewer] than {a}?",
    f"from {{a}} {POLITE}[take|subtract|remove|deduct] {{b}}.",
    "how much [more is {a}|bigger is {a}|larger is {a}|greater is {a}|higher is {a}] than {b}?",
    "how much [smaller|less|lower] is {b} than {a}?",
    "what [must I add|do I have to add|is missing|is needed] [to|from] {b} to [get|reach|make|have] {a}?",
    "[the |][difference|subtraction|minus task][:| of|,] {a}[ and |, | - | minus ]{b}[?|.|]",
    f"[I had|we had|there was|somebody had|take] {{a}} and {{b}} [is|are|was|were] [gone|lost|taken|removed|used|subtracted]. {GET}?",
    "[take the number|the number is|I have] {a}. [make it {b} smaller|now {b} less|lower it by {b}|remove {b} and tell me what stays|subtract {b}].",
    f"{{a}}, and {{b}} [less|off|taken away|removed][.|:|,] {GET}?",
    unseen=SUB.unseen,
)
MUL_WORDINGS = Grammar(
    f"{ASKED} {{a}}[ * | × | x |*| times | multiplied by ]{{b}}{MARK}",
    "{a}[ * | × | x |*|x| times ]{b}[ =| = ?|=|=?|?| is| equals| makes| is what?| equals what?| is how much?| makes how much?||, please.| - what is it?|, how much is it?|: result?]",
    f"{POLITE}[multiply|take] {{a}} [by|with|times] {{b}}[.||, please.| for me.| now.| and tell me the result.]",
    f"{POLITE}multiply[:|] {{a}}[, | and ]{{b}}[.||, please.| for me.]",
    f"{NAMED} the [product|result|value|answer|multiple][ of| for| of multiplying| when you multiply][:|] {{a}} [and|times|by|*|×] {{b}}{MARK}",
    f"[what|how much|which number] [do I get|do you get|do we get|comes out|results|is it] [if|when|once|after] {WHO} multiply {{a}} [by|with|and] {{b}}{MARK}",
    f"[if|when|suppose|say|imagine] {WHO} [multiply|take] {{a}} [by|times] {{b}}, {GET}?",
    "[how much are|what are|count] {a} [groups|lots|sets|rows|piles|bundles|bags|packs] of {b}[ things| pieces| each|]?",
    "[the |][product|multiplication|times task][:| of|,] {a}[ and |, | * | times | x ]{b}[?|.|]",
    f"[the numbers are|here are two numbers:|I have two numbers,|given are] {{a}} and {{b}}. [what is their product?|multiply them.|{POLITE}multiply both.|what do they make, multiplied?]",
    f"{{a}} [rows|times the same]: {{b}} in each[.|,|:] {GET}?",
    "{b} [taken|repeated|added up|counted] {a} times [is|makes|gives][ what?| how much?|]",
    unseen=MUL.unseen,
)
BIG, HIGHER = "[larger|bigger|greater|higher|more]", "[larger|bigger|greater|higher]"
LARGER_WORDINGS = Grammar(
    f"[which|what|which one|which number|which of these|which of the two|which of the numbers|who] is {BIG}[,|:| -|] {{a}} or {{b}}?",
    f"{{a}} or {{b}}[,|:|?| -] [which is|what is|which one is|tell me which is|the] {BIG}[?|.| number?| one?]",
    f"{POLITE}compare [{{a}} and|{{a}} with|{{a}} to|the numbers {{a}} and|these: {{a}},] {{b}}[.|]",
    f"{NAMED} the {HIGHER} [number |one |value |]of {{a}} and {{b}}[.|]",
    f"[between|from|among|given|of|of the numbers] {{a}} and {{b}}, [which|what|which one|which value] is [the|] {HIGHER}[ number| one| value|]?",
    f"which [of {{a}} and {{b}}|one of {{a}} and {{b}}|of the two, {{a}} or {{b}},] is [the |]{HIGHER}[ number| one|]?",
    f"is {{a}} {HIGHER} than {{b}}?",
    f"is {{a}} {BIG} than {{b}} or [not|is it the other way round|the other way round]?",
    f"[I have|we have|here are|take] {{a}} and {{b}}. which [number |one |value |]is {BIG}?",
    f"{POLITE}[tell me|say|choose|take|find|select] the {HIGHER} [one|number|value][:|,| of| from] {{a}} [or|and] {{b}}.",
    "max[imum|]( {a}, {b} )",
    "[the |]maximum of {a} and {b}[?|.|]",
    unseen=LARGER.unseen,
)
LOW = "[smaller|less|lower]"
SMALLER_WORDINGS = Grammar(
    f"[which|what|which one|which number|which of these|which of the two] is {LOW}[,|:| -|] {{a}} or {{b}}?",
    f"{{a}} or {{b}}[,|:|?| -] [which is|what is|which one is|tell me which is|the] {LOW}[?|.| number?| one?]",
    f"{NAMED} the [smaller|lower] [number |one |value |]of {{a}} and {{b}}[.|]",
    "is {a} [smaller|lower|less] than {b}?",
    f"{POLITE}[tell me|say|choose|take|find|select] the [smaller|lower] [one|number|value][:|,| of| from] {{a}} [or|and] {{b}}.",
)
