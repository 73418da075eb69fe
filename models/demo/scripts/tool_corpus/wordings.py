"""Names, descriptions and questions of the tools in the corpus; data only.

Of each kind of tool there are names, descriptions and questions for training, composed from
alternatives (`corpus_grammar`), and others that training never sees. `{slot}` is a value that the
question gives and the call passes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from corpus_draw import Draw
from corpus_grammar import Grammar


@dataclass(frozen=True)
class Wordings:
    """Ways to say one thing: a grammar for training, and texts kept back to test with."""

    grammar: Grammar
    unseen: tuple[str, ...]

    def draw(self, draw: Draw) -> str:
        """One wording that the draw's split may use."""
        kept_back = draw.split == "phrasing" and self.unseen
        return draw.choice(self.unseen) if kept_back else self.grammar.wording(draw)


def _wordings(*forms: str, unseen: tuple[str, ...] = ()) -> Wordings:
    return Wordings(Grammar(*forms, unseen=unseen), unseen)


@dataclass(frozen=True)
class ToolWords:
    """What there is to say about one kind of tool."""

    names: Wordings
    descriptions: Wordings
    questions: Wordings


GET = "[get|fetch|read|show|find|lookup|query|check|ask]"
GIVES = "[Gets|Returns|Tells|Shows|Looks up|Gives|Finds|Reads|Says|Get|Look up|Find|Fetch|Fetches|Reports]"
PLEASE = "[|||please |can you |could you |I need you to |I want you to |]"
TELL = "[tell me|show me|find out|look up|say|check|give me|I want to know|I need|I would like to know|do you know|can you tell me|please tell me|could you find out]"
END = "[.||?|, please.]"

WEATHER = ToolWords(
    _wordings(
        f"[{GET}_|{GET}_|current_|city_|]weather[||_info|_report|_data]",
        f"[{GET}_|]forecast",
        "[weather|forecast]_[of|in|for][_city|_place]",
        unseen=("weather_now", "outside_conditions", "local_weather"),
    ),
    _wordings(
        f"{GIVES} the [current |present |]weather [of|in|for|at] a [city|place|town][.|]",
        "[The |Current |]weather [of|in|for] [a city|a place|a town|any city][.|]",
        f"{GIVES} [temperature and sky|the temperature|how warm it is|the forecast] [in|of|for] a [city|place|town][.|]",
        "Weather[.| service.| data.]",
        unseen=(
            "Describes the weather anywhere.",
            "Knows whether it rains in a place.",
            "Weather conditions by location.",
        ),
    ),
    _wordings(
        f"[what is|what's|how is|{TELL}] the weather [like |]in {{city}}[?||.| now?| today?]",
        "[what is|what's|how is] the weather [like |]in {city} {day}[?|]",
        "[will it|does it|is it going to] [rain|snow|get warm|get cold|be sunny] in {city} {day}[?|]",
        "[is it|was it] [raining|snowing|warm|cold|sunny|cloudy|windy|nice] in {city}[?|| now?| today?]",
        "[how warm|how cold|how hot] is it in {city}[?|| now?| today?]",
        f"{TELL} the [temperature|forecast|weather] [in|for|of] {{city}}{END}",
        "weather [in|for|of] {city}[?|.|, please.|]",
        "[I am|we are|I'm] [going|driving|flying|travelling] to {city} {day}[.|:|,] [how|what] is the weather [there|like there|]?",
        "[do I need|should I take|must I take] [an umbrella|a coat|a scarf|my boots] in {city}[?|| today?]",
        "[what is|tell me] the weather in {city}, in {unit}[?|.|, please.]",
        "{city}[:|,] [how is the weather|what is the weather|weather][?|]",
        unseen=(
            "What is it like outside in {city}?",
            "Give me the weather report for {city}.",
            "What will the weather be in {city} {day}?",
            "Does {city} have rain?",
        ),
    ),
)
TIME = ToolWords(
    _wordings(
        f"[{GET}_|current_|local_|]time[||_in_city|_of_city|_in]", "[world_|city_|]clock", "what_time",
        unseen=("time_now", "clock_of_place", "local_hour"),
    ),
    _wordings(
        f"{GIVES} the [current |local |]time [in|of|for|at] a [city|place|town][.|]",
        "[The |Current |Local |]time [in|of] [a city|a place|any city][.|]", "[A world clock|World clock][.|]",
        unseen=("Knows how late it is anywhere.", "The hour at a location."),
    ),
    _wordings(
        "what time is it in {city}[?|| now?| at the moment?]",
        "[what is|what's|tell me|do you know|can you tell me] the [time|local time|exact time] in {city}[?|| now?]",
        "how late is it in {city}[?|| now?]", f"{TELL} the time [in|of] {{city}}{END}", "time in {city}[?||, please.]",
        "[is it|is it already] [late|early|morning|evening|night|noon] in {city}[?|| now?]",
        "{city}[:|,] what time is it[?|| there?]",
        unseen=("Which hour do they have in {city}?", "What does the clock say in {city}?"),
    ),
)  # fmt: skip
CALCULATOR = ToolWords(
    _wordings(
        "[calculator|calculate|calc|compute|evaluate|eval_expression|do_math|arithmetic|math]", "[calculate|compute|evaluate]_[expression|sum|formula]",
        unseen=("solve_sum", "math_engine", "number_cruncher"),
    ),
    _wordings(
        "[Calculates|Evaluates|Computes|Works out|Solves] [an expression|a formula|an arithmetic expression|a sum|sums|a calculation][.|]",
        "[A calculator|Calculator][.| for sums.| for numbers.]", "[Does|For] arithmetic[.|]",
        unseen=("Gives the value of a term.", "Reckons with large numbers."),
    ),
    _wordings(
        "[what is|what's|calculate|compute|work out|how much is|evaluate|solve|find|please calculate|can you calculate|tell me] {expression}[?|.||, please.]",
        "[I need|give me|tell me|I want] the [result|value|answer] of {expression}[.||, please.]",
        "{expression}[?||=| =| = ?]", "[use|take] the [calculator|tool][:| for] {expression}[.|]",
        unseen=("What does {expression} come to?", "How much do I get for {expression}?"),
    ),
)  # fmt: skip
SUM = ToolWords(
    _wordings(
        "[add|plus|sum|add_numbers|sum_numbers|add_two|addition|sum_of_two]",
        unseen=("total_of", "join_numbers"),
    ),
    _wordings(
        "[Adds|Sums up|Sums] [two numbers|two integers|numbers][.|]", "[The |]sum of two [numbers|integers][.|]",
        unseen=("Puts two numbers together.", "Returns a total."),
    ),
    _wordings(
        "[add|sum|please add|can you add|sum up] {a} [and|to|plus] {b}[.||, please.|?]", "[what is|how much is|calculate|compute] {a} [+|plus|and] {b}[?||.]",
        "[what is|tell me|give me|I need] the sum of {a} and {b}[?|.|]", "{a} [+|plus] {b}[?||=| =]",
        unseen=("What do {a} and {b} make?", "Total of {a} and {b}, please."),
    ),
)  # fmt: skip
PRICE = ToolWords(
    _wordings(
        f"[{GET}_|]price[||_of|_of_item|_lookup|_info]", f"[{GET}_|]cost", "[product|item|shop]_price",
        unseen=("price_tag", "what_it_costs", "quote_item"),
    ),
    _wordings(
        f"{GIVES} the [price|cost|current price] of [a product|an item|an article|a thing][.|]", "[The |]price of [a product|an item|things][.|]",
        "[Prices|Price list] of [a shop|our shop|the shop][.|]", f"{GIVES} what [a product|an item] costs[.|]",
        unseen=("How expensive something is.", "Quotes a product."),
    ),
    _wordings(
        "[what is|what's|tell me|how high is|do you know] the [price|cost|current price] of [a|the|one] {item}[?|.||, please.| today?]",
        "how much [is|costs|does it cost to buy] [a|the|one] {item}[?|| today?]", "what does [a|the|one] {item} cost[?||, please?]",
        f"{TELL} the price of [the|a] {{item}}{END}", "[how expensive|how cheap] is [the|a] {item}[?|]", "price of [the |a |]{item}[?||, please.]",
        "I want to buy [a|the] {item}[.|:] [how much is it|what is the price|what does it cost]?",
        unseen=("What would I pay for a {item}?", "Is the {item} expensive?"),
    ),
)  # fmt: skip
TIMER = ToolWords(
    _wordings(
        "[set|start|new|create|add|begin]_[timer|alarm|countdown|a_timer]", "[timer|countdown|alarm]", "remind[_in|_me_in|_after]",
        unseen=("kitchen_clock", "ring_after", "timer_for"),
    ),
    _wordings(
        "[Sets|Starts|Begins|Set|Start] a [timer|countdown|alarm][.|| in minutes.| of some minutes.]", "[A timer|Timer|Countdown][.| in minutes.]",
        "[Rings|Reminds the user] after [some|a number of] minutes[.|]",
        unseen=("Waits a while and rings.", "An egg timer."),
    ),
    _wordings(
        f"{PLEASE}[set|start|begin|make|run|create] a [timer|countdown|alarm] [for|of|to|over] {{minutes}} minutes[.||, please.|!]",
        "[timer|countdown|alarm][:| for| of] {minutes} minutes[.|||, please.]", "[wake|remind|call|alert|ring] me [in|after] {minutes} minutes[.||, please.|!]",
        "{minutes} minutes[, please.| on the timer.| timer.|, start!]",
        "[set|start] a timer [for|of] {minutes} minutes [called|named|with the label|for the] {label}[.|]", "[remind|tell] me of the {label} in {minutes} minutes[.|]",
        unseen=("Let me know when {minutes} minutes are over.", "Count down {minutes} minutes."),
    ),
)  # fmt: skip
TRANSLATE = ToolWords(
    _wordings(
        "[translate|translation|translator|translate_word|translate_text|dictionary|get_translation|lookup_translation]",
        unseen=("word_in_language", "interpreter"),
    ),
    _wordings(
        "[Translates|Translate] [a word|a text|words|text] [into|to] [a|another|any] language[.|]", "[A dictionary|Dictionary|Translator][.| for many languages.]",
        f"{GIVES} the translation of a word[.|]",
        unseen=("Says things in foreign tongues.", "Turns words into another language."),
    ),
    _wordings(
        f"{PLEASE}translate [the word |]{{word}} [into|to] {{language}}[.||, please.|?]", "[what is|what's] [the word |]{word} in {language}[?|]",
        "how do [I|you|we|they] say {word} in {language}[?|]", "[what is|tell me] the {language} [word|translation] [for|of] {word}[?|.|]",
        "{word} in {language}[?|, please.|]", "[I need|give me] {word} in {language}[.|]",
        unseen=("What do people who speak {language} call {word}?", "Which {language} word means {word}?"),
    ),
)  # fmt: skip
CALENDAR = ToolWords(
    _wordings(
        "[add|create|new|make|plan|book|schedule]_[event|appointment|meeting|calendar_entry|entry]", "[calendar|calendar_add|add_to_calendar|schedule]",
        unseen=("put_in_diary", "plan_date", "note_appointment"),
    ),
    _wordings(
        "[Adds|Puts|Writes|Creates] [an event|an appointment|an entry|a meeting] [to|into|in] the calendar[.|]", "[Plans|Schedules] [an event|a meeting|an appointment][.|]",
        "[New|A new] calendar entry[.|]",
        unseen=("Keeps the diary.", "Remembers what is on which day."),
    ),
    _wordings(
        f"{PLEASE}[add|put|write|enter|note] [a|the] {{title}} [in|into|to] [my|the|our] calendar [on|for] {{date}}[.||, please.]",
        f"{PLEASE}[plan|schedule|book|create|make|add] [a|the] {{title}} [on|for] {{date}}[.||, please.]",
        f"{PLEASE}[plan|schedule|book|create|add|put in] [a|the] {{title}} [on|for] {{date}} at {{time}}[.||, please.]",
        "[there is|I have|we have] a {title} on {date}[ at {time}|][, put it in the calendar.|, add it.|, please note it.|. Put it into my calendar.]",
        "calendar: {title}, {date}[, {time}|][.|]", "{title} on {date} at {time}[: add it to the calendar.|, please schedule it.]",
        unseen=("Reserve {date} for the {title}.", "The {title} is on {date}, keep that in my diary."),
    ),
)  # fmt: skip
STOCK = ToolWords(
    _wordings(
        f"[{GET}_|]stock[||_of|_level|_count]", "[inventory|check_inventory|stock_lookup|count_items|items_left|availability]",
        unseen=("warehouse_count", "how_many_left"),
    ),
    _wordings(
        f"{GIVES} how many of [an item|a product|a thing] are [left|in stock|there][.|]", "[The |]stock of [an item|a product][.|]", "[Inventory|Stock] of the [shop|store|warehouse][.|]",
        unseen=("Counts what is on the shelf.", "Tells what the store still has."),
    ),
    _wordings(
        "[how many|how much] of the {item} [are|is] [left|in stock|there][?|| now?]", "[do we have|is there|have we got|do you have|is] [a|the|any] {item} in stock[?|]",
        "[what is|tell me|check|look up] the stock of [the |]{item}[?|.|]", "[is|are] the {item} [available|sold out|still there][?|]", "[check|see] if the {item} is [in stock|available|there][.|]",
        "stock of {item}[?||, please.]",
        unseen=("Can I still get the {item}?", "Count the {item} in the store."),
    ),
)  # fmt: skip
DISTANCE = ToolWords(
    _wordings(
        f"[{GET}_|]distance[||_between|_between_cities|_km]", "[route|route_length|how_far|travel_distance|road_distance]",
        unseen=("miles_between", "way_length"),
    ),
    _wordings(
        f"{GIVES} the distance [between|of] two [cities|places|towns][.|| in km.]", "[The |]distance [between two cities|from one place to another][.|]", f"{GIVES} how far it is from one [city|place] to another[.|]",
        unseen=("Measures the way between towns.", "How long a trip is."),
    ),
    _wordings(
        "how far is it from {origin} to {destination}[?|]", "how far is {destination} from {origin}[?|]", "[what is|tell me|look up|find] the distance [from|between] {origin} [to|and] {destination}[?|.|]",
        "[how long|how many km] is the [way|road|trip|route] from {origin} to {destination}[?|]", "[distance|route|way] from {origin} to {destination}[?|.|]",
        "[I drive|we go|I travel|we fly] from {origin} to {destination}[.|:] how far is [it|that]?",
        unseen=("How many kilometers lie between {origin} and {destination}?", "From {origin}, how far do I have to go to {destination}?"),
    ),
)  # fmt: skip
CONVERT = ToolWords(
    _wordings(
        "[convert|exchange|change]_[currency|money]", "[currency_converter|convert|exchange_rate|exchange|money_converter]",
        unseen=("swap_money", "currency_calc"),
    ),
    _wordings(
        "[Converts|Changes|Exchanges] [money|an amount|an amount of money] [from one currency to another|into another currency|between currencies][.|]", "[Exchange rates|Currency converter][.|]",
        unseen=("What money is worth abroad.", "Bank for foreign money."),
    ),
    _wordings(
        f"{PLEASE}[convert|change|exchange] {{amount}} {{source}} [to|into|in] {{target}}[.||, please.|?]", "how much is {amount} {source} in {target}[?|]",
        "[what is|what are] {amount} {source} [in|worth in] {target}[?|]", "{amount} {source} [in|to|into] {target}[?||, please.]", "how many {target} [are|is|do I get for] {amount} {source}[?|]",
        unseen=("What do I get in {target} for {amount} {source}?", "Turn {amount} {source} into {target}."),
    ),
)  # fmt: skip
MESSAGE = ToolWords(
    _wordings(
        "[send|write|post]_[message|mail|email|text|sms|a_message]", "[message|send|notify|text_person|mail]",
        unseen=("tell_person", "drop_line"),
    ),
    _wordings(
        "[Sends|Writes|Send|Write] [a message|an email|a text|a mail] to [somebody|a person|someone|a contact][.|]", "[Messages|Email|Texting][.|]",
        unseen=("Lets somebody know something.", "A postman."),
    ),
    _wordings(
        f"{PLEASE}[send|write] [a message|an email|a mail|a text] to {{name}}[:| that says| saying|, text:] {{text}}[.|]", f"{PLEASE}[tell|write|text|message|mail] {{name}}[:| that] {{text}}[.|]",
        "[send|write] {name} [a message|the text|the words|a mail][:] {text}[.|]", "[message|mail|text] to {name}: {text}[.|]",
        unseen=("Let {name} know: {text}", "{name} should read this: {text}"),
    ),
)  # fmt: skip
CONTACT = ToolWords(
    _wordings(
        f"[{GET}_|]contact[||_info|_details]", f"[{GET}_|]phone[_number|]", "[phone_book|address_book|contacts|find_person|lookup_person]",
        unseen=("reach_person", "who_is_where"),
    ),
    _wordings(
        f"{GIVES} the [phone number|number|contact|telephone number] of [a person|somebody|a contact][.|]", "[The phone book|Phone book|Address book|Contacts][.|]",
        unseen=("How to reach people.", "Knows numbers of friends."),
    ),
    _wordings(
        "[what is|what's|tell me|look up|find|do you have|I need|give me] the [phone number|number|telephone number|contact] of {name}[?|.||, please.]", "how [can|do|could] I [reach|call|contact] {name}[?|]",
        "[which|what] number does {name} have[?|]", "[number|phone|contact] of {name}[?||, please.]", "I [want|need|have] to [call|reach|phone] {name}[.|: what is the number?]",
        unseen=(
            "Under which number is {name} at home?", "Look {name} up in the phone book.",
            "What is the phone number of {name}?",
        ),
    ),
)  # fmt: skip
LIGHT = ToolWords(
    _wordings(
        "[set|switch|turn|control]_[light|lights|lamp|the_light]", "[light|lights|light_switch|lamp|switch]",
        unseen=("room_lamp", "bulb_control"),
    ),
    _wordings(
        "[Switches|Turns|Sets|Controls] [the light|the lights|a lamp|lights] [of|in] a room[.|| on or off.]", "[Lights|Light switch|Smart lights][.| of the house.]",
        unseen=("Makes a room bright or dark.", "Commands the bulbs."),
    ),
    _wordings(
        f"{PLEASE}[turn|switch|put] {{state}} the [light|lights|lamp] in the {{room}}[.||, please.|!]", f"{PLEASE}[turn|switch|put] the [light|lights|lamp] in the {{room}} {{state}}[.||, please.|!]",
        "[light|lights] {state} in the {room}[.||, please.|!]", "{room}[:|,] [light|lights] {state}[.||!|, please.]", "{room} [light|lights] {state}[.||!|, please.]",
        unseen=("I want the lamp of the {room} {state}.", "The {room} needs its light {state}."),
    ),
)  # fmt: skip
STATUS = ToolWords(
    _wordings(
        f"[{GET}_|track_|]flight[_status||_info]", f"[{GET}_|]train[_status|_info]", "[flight_tracker|track_flight|departures]",
        unseen=("plane_news", "is_it_late"),
    ),
    _wordings(
        f"{GIVES} the [status|state] of a [flight|train|plane][.|]", f"{GIVES} whether a [flight|train|plane] is [late|on time|delayed][.|]", "[Flight|Train] [status|information|tracker][.|]",
        unseen=("Is a plane punctual?", "News of departures."),
    ),
    _wordings(
        "[what is|what's|tell me|check|look up] the status of [flight|train|] {number}[?|.|]", "[is|will] [flight|train] {number} [on time|late|delayed|be late|be on time][?|]", "[when does|does] [flight|train] {number} [leave|arrive|depart][?|]",
        "[flight|train] {number}[?|, please.|: status?|: is it late?]", "[where is|how late is] [flight|train] {number}[?|]",
        unseen=("Do I have to wait for {number}?", "Any news of {number}?"),
    ),
)  # fmt: skip
ORDER = ToolWords(
    _wordings(
        f"[{GET}_|track_|]order[_status||_info]", "[track_order|track_parcel|parcel_status|where_is_order|order_lookup|get_parcel]",
        unseen=("shipment_state", "find_package"),
    ),
    _wordings(
        f"{GIVES} the [status|state] of an order[.|]", f"{GIVES} where an order [is|stands][.|]", "[Tracks|Track] [an order|a parcel|orders][.|]",
        unseen=("What became of a shipment.", "Follows packages."),
    ),
    _wordings(
        "[what is|what's|tell me|check|look up] the status of [order|my order|the order] {id}[?|.|]", "where is [order|my order|our order|the parcel|the order] {id}[?|| now?]", "[track|check|find|look up] [order|my order|the parcel] {id}[.||, please.]",
        "[has|was] [order|my order|the order] {id} [been sent|arrived|shipped|left][?|]", "order {id}[?|, please.|: where is it?]",
        unseen=("When will I get {id}?", "What happened to {id}?"),
    ),
)  # fmt: skip
HOTEL = ToolWords(
    _wordings(
        "[book|reserve|find]_[room|hotel|hotel_room|a_room|stay]", "[hotel|hotel_booking|booking|reservation|room_booking]",
        unseen=("bed_for_nights", "sleep_in_city"),
    ),
    _wordings(
        "[Books|Reserves|Finds] a [room|hotel|hotel room] in a [city|town|place][.|]", "[Hotel rooms|Hotels|Hotel bookings|Booking of rooms][.|]",
        unseen=("Arranges a bed for travellers.", "Where to stay the night."),
    ),
    _wordings(
        f"{PLEASE}[book|reserve|find|get] [a room|a hotel|a hotel room|me a room] in {{city}} for {{nights}} nights[.||, please.]", "[I need|we need|I want|I would like] [a room|a hotel] in {city} for {nights} nights[.|]",
        "[I am|we are] in {city} for {nights} nights[.|:] [book a hotel|find a room|we need a room|I need a room].", "{nights} nights in {city}[, please book it.|: book a room.|, I need a hotel.]",
        "[room|hotel] in {city}, {nights} nights[.|, please.|]",
        unseen=("Where can I sleep in {city} for {nights} nights? Book it.", "I will stay {nights} nights in {city}, arrange a room."),
    ),
)  # fmt: skip
NOTE = ToolWords(
    _wordings(
        "[add|write|save|new|make|take]_[note|task|todo|memo|a_note|item]", "[note|notes|todo|todo_add|remember|shopping_list]",
        unseen=("keep_in_mind", "jot_down"),
    ),
    _wordings(
        "[Adds|Writes down|Saves|Makes] [a note|a task|a todo|an item][.|]", "[Notes|A notebook|List of tasks|The shopping list|Todo list][.|]",
        unseen=("Does not forget.", "Paper and pencil."),
    ),
    _wordings(
        f"{PLEASE}[add|make|write|save|take] a [note|task|todo|memo][:| that says] {{text}}[.|]", f"{PLEASE}[note|remember|write down|save][:| this:] {{text}}[.|]", "[put|add] {text} [on|to] [my|the] [list|notes|todo list|shopping list][.||, please.]",
        "[note|todo|task][:] {text}[.|]",
        unseen=("Do not let me forget: {text}", "For my list: {text}"),
    ),
)  # fmt: skip

# Kinds that training never sees, of which nothing is known but what the request shows.
SONG = ToolWords(
    _wordings("play_[song|track]"),
    _wordings("Plays a song."),
    _wordings(
        "[play|please play] [the song |]{title}[.|]", "[play|please play] {title} by {artist}[.|]",
        unseen=("I want to hear {title}.", "Play {title} by {artist}, please."),
    ),
)  # fmt: skip
HOURS = ToolWords(
    _wordings("opening_[hours|times]"),
    _wordings("Tells when a shop is open."),
    _wordings(
        "when [is|does] {shop} [open|close] on {day}?", "when does {shop} open?",
        unseen=("What are the opening hours of {shop}?", "Is {shop} open on {day}?"),
    ),
)  # fmt: skip
POSTAGE = ToolWords(
    _wordings("[postage|shipping_cost]"),
    _wordings("Computes the postage of a parcel."),
    _wordings(
        "what is the postage for {weight} grams to {country}?", "how much is a parcel of {weight} grams to {country}?",
        unseen=("What does it cost to send {weight} grams to {country}?", "Postage to {country} for {weight} grams, please."),
    ),
)  # fmt: skip
TABLE = ToolWords(
    _wordings("[reserve|book]_table"),
    _wordings("Reserves a table in a restaurant."),
    _wordings(
        "[reserve|book] a table for {guests} at {restaurant}[.|]", "[a|I need a] table for {guests} at {restaurant} at {time}[.|, please.]",
        unseen=("We are {guests} and want to eat at {restaurant} at {time}.", "Get me a table at {restaurant} for {guests}."),
    ),
)  # fmt: skip

FOLLOW_UP = _wordings(
    "[and|and what about|what about|how about|and for|the same for|now] {value}[?||, please.|.]",
    "[and|okay, and|thanks, and|good, and|fine, and] {value}[?|]",
    "[now the same|do the same|once more|again] for {value}[.||, please.]",
    unseen=("I also wonder about {value}.", "Next, {value}."),
)
