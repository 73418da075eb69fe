"""The first hand-written templates of calculations and word problems.

Some of them training never sees.

Data only. The evaluation draws from them; training uses the seen ones beside the grammars of
`phrasings_arithmetic` and `phrasings_problems`.
"""

from __future__ import annotations

from corpus_draw import Phrasings

ADD = Phrasings(
    train=(
        "What is {a} + {b}?", "{a} + {b} =", "{a}+{b}", "What is {a} plus {b}?", "Add {a} and {b}.",
        "How much is {a} + {b}?", "Calculate {a} + {b}.", "Compute {a} plus {b}.", "{a} plus {b}?",
        "What is the sum of {a} and {b}?", "Please add {b} to {a}.", "What do you get if you add {a} and {b}?",
        "Work out {a} + {b}", "Solve {a} + {b} = ?", "{a}+{b}=?", "Can you add {a} and {b} for me?",
        "Tell me the sum of {a} and {b}.", "what's {a} + {b}", "Find {a} + {b}.", "If I add {a} and {b}, what do I get?",
    ),
    unseen=(
        "I need the total of {a} and {b}.", "What does {a} + {b} come to?", "Give me the result of {a} plus {b}.",
        "What number is {a} plus {b}?", "Evaluate {a} + {b}", "Could you work out the sum {a} + {b}?",
    ),
)  # fmt: skip
SUB = Phrasings(
    train=(
        "What is {a} - {b}?", "{a} - {b} =", "{a}-{b}", "What is {a} minus {b}?", "Subtract {b} from {a}.",
        "How much is {a} - {b}?", "Calculate {a} - {b}.", "Compute {a} minus {b}.", "{a} minus {b}?",
        "What is the difference between {a} and {b}?", "Take {b} away from {a}.", "Solve {a} - {b} = ?", "{a}-{b}=?",
        "What is left if you take {b} from {a}?", "Work out {a} - {b}", "Can you subtract {b} from {a}?",
        "what's {a} - {b}", "Find {a} - {b}.", "Please compute {a} - {b}", "If I take {b} from {a}, what do I get?",
    ),
    unseen=(
        "What does {a} - {b} come to?", "Give me the result of {a} minus {b}.", "What number is {a} minus {b}?",
        "Evaluate {a} - {b}", "Could you work out {a} - {b}?", "How much remains of {a} after removing {b}?",
    ),
)  # fmt: skip
MUL = Phrasings(
    train=(
        "What is {a} × {b}?", "What is {a} * {b}?", "{a} * {b} =", "{a} x {b}", "What is {a} times {b}?",
        "Multiply {a} by {b}.", "How much is {a} times {b}?", "Calculate {a} * {b}.", "Compute {a} × {b}.",
        "What is the product of {a} and {b}?", "{a} times {b}?", "Multiply {a} and {b}.", "Work out {a} × {b}",
        "Can you multiply {a} by {b}?", "{a}*{b}", "{a}*{b}=?", "what's {a} * {b}", "Find {a} × {b}.",
    ),
    unseen=(
        "What does {a} times {b} come to?", "Give me the result of {a} * {b}.", "What number is {a} times {b}?",
        "Evaluate {a} × {b}", "Could you work out the product {a} × {b}?",
    ),
)  # fmt: skip
LARGER = Phrasings(
    train=(
        "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is larger, {a} or {b}?",
        "{a} or {b}, which is larger?", "Which is greater, {a} or {b}?", "Compare {a} and {b}.",
        "Tell me the larger of {a} and {b}.", "Which of {a} and {b} is the larger number?",
    ),
    unseen=("Is {a} or {b} the bigger one?", "Out of {a} and {b}, which number is higher?", "Pick the larger: {a}, {b}."),
)  # fmt: skip
GAIN = Phrasings(
    train=(
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "{name} has {a} {things}. A friend gives {name} {b} more {things}. How many {things} are there now?",
        "{name} finds {a} {things} in the morning and {b} {things} in the evening. How many {things} does {name} find?",
        "{name} buys {a} {things} and then {b} more {things}. How many {things} does {name} have?",
        "There are {a} {things} on the table. {name} adds {b} {things}. How many {things} are on the table?",
        "{name} had {a} {things}, then collected {b} {things}. How many {things} does {name} have in total?",
        "{name} owns {a} {things} and receives {b} {things} as a present. How many {things} is that?",
    ),
    unseen=(
        "At first {name} holds {a} {things}. Later {b} {things} are added. What is the new number of {things}?",
        "{name} packed {a} {things} on Monday and {b} {things} on Tuesday. How many {things} were packed?",
        "With {a} {things} in a bag and {b} more in a box, how many {things} does {name} own?",
    ),
)  # fmt: skip
LOSE = Phrasings(
    train=(
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "{name} has {a} {things}. {name} loses {b} {things}. How many {things} does {name} still have?",
        "{name} had {a} {things} and sold {b} of them. How many {things} remain?",
        "There are {a} {things} in a box. {name} takes {b} {things} out. How many {things} are still in the box?",
        "{name} baked or bought {a} {things} and used {b}. How many {things} are left?",
        "From {a} {things}, {name} gives {b} {things} to a friend. How many {things} does {name} keep?",
        "{name} starts with {a} {things} and breaks {b} of them. How many {things} are left over?",
    ),
    unseen=(
        "After handing out {b} of {a} {things}, how many {things} does {name} have?",
        "{name} carried {a} {things} home, but {b} fell on the way. How many {things} arrived?",
        "Out of {a} {things}, {b} were eaten by {name}. How many {things} remain?",
    ),
)  # fmt: skip
GROUPS = Phrasings(
    train=(
        "{name} has {a} {boxes} with {b} {things} each. How many {things} does {name} have?",
        "{name} fills {a} {boxes}. Each holds {b} {things}. How many {things} are there?",
        "There are {a} {boxes} and {b} {things} in each of them. How many {things} does {name} count?",
        "{name} buys {a} {boxes} of {b} {things}. How many {things} is that in total?",
        "Each of {name}'s {a} {boxes} contains {b} {things}. How many {things} are there altogether?",
    ),
    unseen=(
        "{name} puts {b} {things} into each of {a} {boxes}. What is the total number of {things}?",
        "If {a} {boxes} hold {b} {things} apiece, how many {things} does {name} own?",
    ),
)  # fmt: skip
