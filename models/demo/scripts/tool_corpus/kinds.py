"""The kinds of tools in the corpus: parameters, values that questions give, and results.

Owns values, schemas and the sentence that answers with a result. A kind's words belong to
`wordings`; how many tools a conversation has, and which of them it uses, to `conversations`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from corpus_arithmetic import allowed_pair
from corpus_draw import Draw
from corpus_grammar import odd_word
from corpus_records import MAKERS
from corpus_words import COLORS, LIST_WORDS, MATERIALS, MONTHS, THINGS

from tool_corpus import wordings
from tool_corpus.wordings import ToolWords

Values = dict[str, Any]
# A result as the tool returns it, and the sentence that answers with it.
Reply = tuple[str, str]
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kind of tools.

    Attributes:
        keys: What tools call it, in training.
        unseen: What they call it where phrasings are kept back.
        description: What a schema may say of it.
    """

    slot: str
    keys: tuple[str, ...]
    unseen: tuple[str, ...]
    schema: Schema
    description: str


@dataclass(frozen=True)
class Kind:
    """A kind of tools.

    Attributes:
        group: Kinds of one group do not stand side by side, because a question fits both.
        values: Draws a value for every slot that a question may have.
        reply: Draws a result for the values that were given, with its answer; None where calls
            alone are scored.
        is_far: Whether no question of smalltalk could be meant for it.
        one: The slot that a follow-up question exchanges, where there is one; "" for none.
    """

    group: str
    words: ToolWords
    parameters: tuple[Parameter, ...]
    values: Callable[[Draw], Values]
    reply: Callable[[Draw, Values], Reply] | None
    is_far: bool = False
    one: str = ""


def as_json(**fields: Any) -> str:
    """A result that is a JSON object."""
    return json.dumps(fields, ensure_ascii=False)


SKIES = tuple(
    "sunny cloudy rainy windy foggy snowy stormy clear grey dry wet misty hazy icy warm mild cold hot humid".split()
)
DAYS = tuple("tomorrow Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
UNITS = ("celsius", "fahrenheit")
LANGUAGES = tuple(
    "French German Spanish Italian Latin Greek Polish Dutch Danish Finnish Turkish Japanese Chinese Korean Hindi "
    "Russian Swedish Norwegian Portuguese Arabic Czech Hungarian Welsh Irish".split()
)
CURRENCIES = tuple("EUR USD GBP JPY CHF SEK NOK DKK PLN CAD AUD INR CNY BRL KRW MXN".split())
ROOMS = tuple(
    "kitchen bathroom bedroom hall garage cellar attic office library garden nursery pantry workshop lounge study "
    "hallway studio laundry balcony lobby".split()
)
ERRANDS = tuple("tea bread eggs pasta soup cake rice meeting break laundry call coffee walk pizza nap".split())
MEETINGS = tuple(
    "dentist meeting concert lunch dinner interview party picnic lecture match rehearsal workshop visit exam wedding "
    "haircut call review training breakfast".split()
)
STATUSES = tuple("on time|late|delayed|cancelled|boarding|gone|landed|20 minutes late|an hour late|early".split("|"))
STEPS = tuple("packed|on its way|sent|paid|lost|delivered|at the customs|in the truck|ready|not paid yet".split("|"))
FAULTS = tuple(
    "not found|no connection|timeout|try again later|not allowed|the service is closed|unknown value|too many requests|"
    "nobody answers|bad key".split("|")
)
TODOS = tuple("buy sell fix paint call clean bring return wash find carry feed water open send move".split())


def _thing(draw: Draw) -> str:
    thing = draw.choice(THINGS)
    return f"{draw.choice(MATERIALS + COLORS)} {thing}" if draw.chance(0.7) else thing


def _amount(draw: Draw) -> int | float:
    whole = draw.number(1, 900)
    return whole if draw.chance(0.6) else whole + draw.choice((0.25, 0.5, 0.75, 0.95, 0.99, 0.2))


def _clock(draw: Draw) -> str:
    return f"{draw.number(0, 23)}:{draw.number(0, 59):02d}"


def _date(draw: Draw) -> str:
    day, month = draw.number(1, 28), draw.number(1, 12)
    return draw.choice((f"{day} {MONTHS[month - 1]}", f"{MONTHS[month - 1]} {day}", f"2027-{month:02d}-{day:02d}"))


def _todo(draw: Draw) -> str:
    return f"{draw.choice(TODOS)} the {_thing(draw)}"


OPERATIONS = {"+": "add", "-": "sub", "*": "mul", "/": "div"}


def _operands(draw: Draw, operation: str) -> tuple[int, int]:
    """Two numbers; training gets no pair that is held out to ask the model itself."""
    while True:
        a, b = (draw.number(2, draw.choice((99, 999, 9999))) for _ in range(2))
        if draw.split != "train" or allowed_pair(draw, OPERATIONS[operation], a, b):
            return a, b


def _expression(draw: Draw) -> str:
    operation = draw.choice(tuple(OPERATIONS))
    a, b = _operands(draw, operation)
    more = f" {draw.choice('+-')} {draw.number(2, 999)}" if draw.chance(0.2) else ""
    return f"{a} {operation} {b}{more}"


def _value_of(expression: str) -> int | float:
    """What the expression comes to, quotients in hundredths."""
    a, operation, b, *more = expression.split(" ")
    first, second = int(a), int(b)
    whole = {"+": first + second, "-": first - second, "*": first * second}
    value = whole[operation] if operation in whole else round(first / second, 2)
    if more:
        value += int(more[1]) if more[0] == "+" else -int(more[1])
    return value if isinstance(value, int) else round(value, 2)


def _any_result(draw: Draw, value: object, key: str, **more: Any) -> str:
    """A result that says one value: bare, or as a JSON object, perhaps with what was asked."""
    if draw.chance(0.35):
        return str(value)
    fields = {draw.choice((key, "result", "value")): value}
    if draw.chance(0.3):
        fields = {**more, **fields} if draw.chance(0.5) else {**fields, **more}
    return as_json(**fields)


def _done(draw: Draw) -> str:
    """A result that says no more than that something was done."""
    status = draw.choice(("ok", "done", "OK", "success", "saved"))
    return draw.choice(
        (status, as_json(status=status), as_json(ok=True), as_json(status=status, id=draw.number(1, 999)))
    )


def _weather_reply(draw: Draw, given: Values) -> Reply:
    sky, degrees = draw.choice(SKIES), draw.number(-15, 40)
    where = f"in {given['city']}" + (f" {given['day']}" if "day" in given else "")
    if draw.chance(0.2):
        return _any_result(draw, sky, "sky", city=given["city"]), f"The weather {where} is {sky}."
    if draw.chance(0.15):
        return _any_result(draw, degrees, "temperature"), f"The weather {where} is {degrees} degrees."
    if draw.chance(0.25):
        return f"{sky}, {degrees} degrees", f"The weather {where} is {sky}, at {degrees} degrees."
    names = (
        draw.choice(("sky", "conditions", "weather", "description")),
        draw.choice(("temperature", "degrees", "temp")),
    )
    fields: Values = {names[0]: sky, names[1]: degrees}
    if draw.chance(0.5):
        fields = {names[1]: degrees, names[0]: sky}
    if draw.chance(0.3):
        fields = {"city": given["city"], **fields}
    if draw.chance(0.2):
        fields["wind"] = draw.number(0, 90)
    return as_json(**fields), f"The weather {where} is {sky}, at {degrees} degrees."


def _time_reply(draw: Draw, given: Values) -> Reply:
    time = _clock(draw)
    return _any_result(draw, time, "time", city=given["city"]), f"It is {time} in {given['city']}."


def _calculator_reply(draw: Draw, given: Values) -> Reply:
    value = _value_of(given["expression"])
    return _any_result(draw, value, "result"), f"{given['expression']} = {value}"


def _sum_reply(draw: Draw, given: Values) -> Reply:
    total = given["a"] + given["b"]
    return _any_result(draw, total, "sum"), f"{given['a']} + {given['b']} = {total}"


def _price_reply(draw: Draw, given: Values) -> Reply:
    price = _amount(draw)
    said = f"The price of the {given['item']} is {price}"
    if draw.chance(0.4):
        currency = draw.choice((*CURRENCIES, "dollars", "euros"))
        result = as_json(price=price, currency=currency) if draw.chance(0.6) else f"{price} {currency}"
        return result, f"{said} {currency}."
    return _any_result(draw, price, "price", item=given["item"]), f"{said}."


def _timer_reply(draw: Draw, given: Values) -> Reply:
    return _done(draw), f"The timer is set to {given['minutes']} minutes."


def _translate_reply(draw: Draw, given: Values) -> Reply:
    word = odd_word(draw)
    return _any_result(draw, word, "translation"), f"{given['word']} in {given['language']} is {word}."


def _calendar_reply(draw: Draw, given: Values) -> Reply:
    at = f" at {given['time']}" if "time" in given else ""
    return _done(draw), f"The {given['title']} on {given['date']}{at} is in the calendar."


def _stock_reply(draw: Draw, given: Values) -> Reply:
    count = draw.number(0, 300)
    return _any_result(draw, count, "stock", item=given["item"]), f"There are {count} of the {given['item']} in stock."


def _distance_reply(draw: Draw, given: Values) -> Reply:
    km = draw.number(3, 9000)
    return _any_result(draw, km, "km"), f"From {given['origin']} to {given['destination']} it is {km} km."


def _convert_reply(draw: Draw, given: Values) -> Reply:
    value = _amount(draw)
    said = f"{given['amount']} {given['source']} is {value} {given['target']}."
    return _any_result(draw, value, "amount", currency=given["target"]), said


def _message_reply(draw: Draw, given: Values) -> Reply:
    return _done(draw), f"The message to {given['name']} was sent."


def _contact_reply(draw: Draw, given: Values) -> Reply:
    phone = f"{draw.number(100, 999)}-{draw.number(1000, 9999)}"
    return _any_result(draw, phone, "phone", name=given["name"]), f"The number of {given['name']} is {phone}."


def _light_reply(draw: Draw, given: Values) -> Reply:
    return _done(draw), f"The light in the {given['room']} is {given['state']}."


def _status_reply(draw: Draw, given: Values) -> Reply:
    status = draw.choice(STATUSES)
    return _any_result(draw, status, "status", number=given["number"]), f"{given['number']} is {status}."


def _order_reply(draw: Draw, given: Values) -> Reply:
    status = draw.choice(STEPS)
    return _any_result(draw, status, "status", id=given["id"]), f"Order {given['id']} is {status}."


def _hotel_reply(draw: Draw, given: Values) -> Reply:
    return _done(draw), f"A room in {given['city']} is booked for {given['nights']} nights."


def _note_reply(draw: Draw, given: Values) -> Reply:
    return _done(draw), f"Noted: {given['text']}."


def _parameter(slot: str, keys: str, unseen: str, schema: Schema, description: str) -> Parameter:
    return Parameter(slot, tuple(keys.split()), tuple(unseen.split()), schema, description)


CITY = _parameter("city", "city city location place town", "where city_name", TEXT, "Name of the city")
DAY = _parameter("day", "day date when", "on_day", TEXT, "Day that is asked about")
ITEM = _parameter("item", "item product name article", "thing goods", TEXT, "What to look up")
NAME = _parameter("name", "name person contact to", "who", TEXT, "Name of the person")
MESSAGE_TEXT = _parameter("text", "text message content body", "words", TEXT, "What to write")

TRAINED = (
    Kind(
        "weather", wordings.WEATHER,
        (CITY, DAY, _parameter("unit", "unit units", "scale", {"type": "string", "enum": list(UNITS)}, "Unit of degrees")),
        lambda draw: {"city": draw.city(), "day": draw.choice(DAYS), "unit": draw.choice(UNITS)}, _weather_reply, one="city",
    ),
    Kind("time", wordings.TIME, (CITY,), lambda draw: {"city": draw.city()}, _time_reply, one="city"),
    Kind(
        "sum", wordings.CALCULATOR,
        (_parameter("expression", "expression formula input term", "sum text", TEXT, "What to calculate"),),
        lambda draw: {"expression": _expression(draw)}, _calculator_reply, one="expression",
    ),
    Kind(
        "sum", wordings.SUM,
        (
            _parameter("a", "a x first left", "one", WHOLE, "First number"),
            _parameter("b", "b y second right", "two", WHOLE, "Second number"),
        ),
        lambda draw: dict(zip("ab", _operands(draw, "+"), strict=True)), _sum_reply,
    ),
    Kind("price", wordings.PRICE, (ITEM,), lambda draw: {"item": _thing(draw)}, _price_reply, one="item"),
    Kind(
        "timer", wordings.TIMER,
        (
            _parameter("minutes", "minutes duration time length", "min", WHOLE, "How long, in minutes"),
            _parameter("label", "label name text", "what_for", TEXT, "What it is for"),
        ),
        lambda draw: {"minutes": draw.number(2, 240), "label": draw.choice(ERRANDS)}, _timer_reply, is_far=True,
    ),
    Kind(
        "translate", wordings.TRANSLATE,
        (
            _parameter("word", "word text phrase input", "what", TEXT, "What to translate"),
            _parameter("language", "language target to target_language", "into", TEXT, "Language of the answer"),
        ),
        lambda draw: {"word": draw.choice(LIST_WORDS + THINGS), "language": draw.choice(LANGUAGES)}, _translate_reply,
    ),
    Kind(
        "calendar", wordings.CALENDAR,
        (
            _parameter("title", "title event name subject", "what", TEXT, "What it is"),
            _parameter("date", "date day when", "on", TEXT, "Day of the event"),
            _parameter("time", "time hour start", "clock", TEXT, "When it begins"),
        ),
        lambda draw: {"title": draw.choice(MEETINGS), "date": _date(draw), "time": _clock(draw)}, _calendar_reply, is_far=True,
    ),
    Kind("price", wordings.STOCK, (ITEM,), lambda draw: {"item": _thing(draw)}, _stock_reply, one="item"),
    Kind(
        "distance", wordings.DISTANCE,
        (
            _parameter("origin", "origin from start source", "a", TEXT, "Where it begins"),
            _parameter("destination", "destination to end target", "b", TEXT, "Where it ends"),
        ),
        lambda draw: {"origin": draw.city(), "destination": draw.city()}, _distance_reply,
    ),
    Kind(
        "convert", wordings.CONVERT,
        (
            _parameter("amount", "amount value sum money", "how_much", NUMBER, "How much money"),
            _parameter("source", "from source from_currency base", "old", TEXT, "Currency that one has"),
            _parameter("target", "to target to_currency quote", "new", TEXT, "Currency that one wants"),
        ),
        lambda draw: dict(zip(("amount", "source", "target"), (_amount(draw), *draw.random.sample(CURRENCIES, 2)), strict=True)),
        _convert_reply, is_far=True,
    ),
    Kind(
        "message", wordings.MESSAGE, (NAME, MESSAGE_TEXT),
        lambda draw: {"name": draw.full_name(), "text": _todo(draw)}, _message_reply,
    ),
    Kind("contact", wordings.CONTACT, (NAME,), lambda draw: {"name": draw.full_name()}, _contact_reply, one="name"),
    Kind(
        "light", wordings.LIGHT,
        (
            _parameter("room", "room place where location", "area", TEXT, "Which room"),
            _parameter("state", "state value mode switch", "set_to", {"type": "string", "enum": ["on", "off"]}, "What to do"),
        ),
        lambda draw: {"room": draw.choice(ROOMS), "state": draw.choice(("on", "off"))}, _light_reply,
    ),
    Kind(
        "status", wordings.STATUS, (_parameter("number", "number id code flight", "which", TEXT, "Number of the ride"),),
        lambda draw: {"number": MAKERS["flight"](draw)}, _status_reply, is_far=True, one="number",
    ),
    Kind(
        "order", wordings.ORDER, (_parameter("id", "id order_id number order", "ref", TEXT, "Number of the order"),),
        lambda draw: {"id": draw.choice((MAKERS["id"](draw), str(draw.number(100, 99999))))}, _order_reply, is_far=True, one="id",
    ),
    Kind(
        "hotel", wordings.HOTEL, (CITY, _parameter("nights", "nights days duration stay", "how_long", WHOLE, "How many nights")),
        lambda draw: {"city": draw.city(), "nights": draw.number(2, 30)}, _hotel_reply,
    ),
    Kind("note", wordings.NOTE, (MESSAGE_TEXT,), lambda draw: {"text": _todo(draw)}, _note_reply, is_far=True),
)  # fmt: skip


KEPT_BACK = (
    Kind(
        "song", wordings.SONG,
        (
            _parameter("title", "title", "", TEXT, "Title of the song"),
            _parameter("artist", "artist", "", TEXT, "Who sings it"),
        ),
        lambda draw: {"title": f"{draw.invented_name()} {draw.invented_name()}", "artist": draw.full_name()}, None,
    ),
    Kind(
        "hours", wordings.HOURS,
        (_parameter("shop", "shop", "", TEXT, "Name of the shop"), _parameter("day", "day", "", TEXT, "Day of the week")),
        lambda draw: {"shop": draw.invented_name(), "day": draw.choice(DAYS[1:])}, None,
    ),
    Kind(
        "postage", wordings.POSTAGE,
        (
            _parameter("weight", "weight", "", WHOLE, "Weight in grams"),
            _parameter("country", "country", "", TEXT, "Where it goes"),
        ),
        lambda draw: {"weight": draw.number(20, 9000), "country": draw.invented_name()}, None,
    ),
    Kind(
        "table", wordings.TABLE,
        (
            _parameter("restaurant", "restaurant", "", TEXT, "Name of the restaurant"),
            _parameter("guests", "guests", "", WHOLE, "How many people"),
            _parameter("time", "time", "", TEXT, "When they come"),
        ),
        lambda draw: {"restaurant": draw.invented_name(), "guests": draw.number(2, 20), "time": _clock(draw)}, None,
    ),
)  # fmt: skip
