"""The first hand-written requests and carrier sentences of extraction; data only.

Some of them training never sees.
"""

from __future__ import annotations

from corpus_draw import Phrasings

ASK = Phrasings(
    train=(
        "Extract the {keys} as JSON: {s}", "Extract {keys} from this sentence as JSON.\n{s}", "{s}\nExtract {keys} as JSON.",
        "Return a JSON object with the keys {keys}.\n{s}", "{s}\nReturn JSON with the keys {keys}.",
        "Read the text and give me {keys} as JSON.\nText: {s}", "Turn this into JSON with {keys}: {s}",
        "Text: {s}\nFields: {keys}\nJSON:", "Convert to JSON ({keys}): {s}", "Please extract {keys} in JSON format: {s}",
        "Fill in the fields {keys} as JSON. {s}", "From the text below, extract {keys} as JSON.\n\n{s}",
        "JSON with {keys}, please: {s}", "Give me the {keys} in this sentence as a JSON object: {s}",
        "What are the {keys} here? Answer in JSON. {s}", "{s} Give me the {keys} as JSON.",
    ),
    unseen=(
        "I need the {keys} from the following as a JSON object: {s}", "Parse this sentence into JSON, keys {keys}: {s}",
        "{s}\n\nPut the {keys} of this text into JSON.", "Find the {keys} and answer with JSON only.\n{s}",
        "Make a JSON object out of this. Keys: {keys}. Sentence: {s}",
    ),
)  # fmt: skip
PERSON = Phrasings(
    train=(
        "{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}.",
        "My neighbour {name} from {city} is {age} years old.", "{name} moved to {city} at the age of {age}.",
        "At {age}, {name} still lives in {city}.", "In {city} we met {name}, who is {age}.",
        "I am {name}, I am {age} and I come from {city}.", "{city} is the home of {name}, aged {age}.",
        "A {age}-year-old named {name} lives in {city}.", "The doctor in {city} is called {name} and is {age} years old.",
        "Hello, my name is {name}. I live in {city} and I am {age} years old.", "{name} ({age}) works in {city}.",
        "{name} turned {age} last week in {city}.", "Our teacher {name} was born in {city} and is now {age}.",
    ),
    unseen=(
        "People in {city} know {name}, a baker of {age} years.", "{name} has lived in {city} for years and is {age} today.",
        "Yesterday {name} celebrated a birthday in {city}: {age} years.", "This is {name}. Age: {age}. Home: {city}.",
    ),
)  # fmt: skip
ORDER = Phrasings(
    train=(
        "{name} bought {quantity} {item}s for {price} dollars.", "{name} ordered {quantity} {item}s at {price} dollars each.",
        "We sold {quantity} {item}s to {name} for {price} dollars.", "For {price} dollars {name} got {quantity} {item}s.",
        "{name} wants {quantity} {item}s and pays {price} dollars.", "Order: {quantity} {item}s, {price} dollars, for {name}.",
        "Please send {quantity} {item}s to {name}; the price is {price} dollars.", "{name} paid {price} dollars for {quantity} {item}s.",
        "{quantity} {item}s were delivered to {name}, who paid {price} dollars.",
        "The invoice for {name} says {quantity} {item}s and {price} dollars.",
    ),
    unseen=(
        "{name} came to the shop, took {quantity} {item}s and left {price} dollars.",
        "A box with {quantity} {item}s worth {price} dollars goes to {name}.",
        "{price} dollars is what {name} spent on {quantity} {item}s.",
    ),
)  # fmt: skip
EVENT = Phrasings(
    train=(
        "The {event} takes place in {city} on {date}.", "On {date} there is a {event} in {city}.",
        "{city} will host a {event} on {date}.", "We meet on {date} in {city} for the {event}.",
        "The {event} in {city} was moved to {date}.", "Come to the {event} on {date} in {city}!",
        "Tickets for the {event} in {city} on {date} are sold out.", "Please note: {event}, {city}, {date}.",
        "The next {event} starts on {date} in {city}.",
    ),
    unseen=(
        "Mark your calendar: {date}, {event}, in {city}.", "Nobody in {city} wants to miss the {event} on {date}.",
        "They planned a {event} for {date}, and {city} was chosen as the place.",
    ),
)  # fmt: skip
PRODUCT = Phrasings(
    train=(
        "The {color} {item} costs {price} dollars.", "We sell a {color} {item} for {price} dollars.",
        "For {price} dollars you get a {color} {item}.", "A {color} {item} is {price} dollars today.",
        "She paid {price} dollars for the {color} {item}.", "Our newest {item} is {color} and costs {price} dollars.",
        "The price of the {item} is {price} dollars and its color is {color}.", "This {item} comes in {color} for {price} dollars.",
    ),
    unseen=(
        "Only {price} dollars for this {color} {item}!", "The {item} in the window, a {color} one, goes for {price} dollars.",
    ),
)  # fmt: skip
BOOKING = Phrasings(
    train=(
        "{name} booked a room in {city} for {nights} nights from {date}.", "A room in {city} on {date} for {name}, {nights} nights.",
        "{name} arrives in {city} on {date} and stays {nights} nights.", "Please reserve {nights} nights in {city} for {name} from {date}.",
        "On {date} {name} travels to {city} and stays for {nights} nights.", "{name} will spend {nights} nights in {city}, starting {date}.",
        "We confirm {nights} nights in {city} for {name}, arrival {date}.",
    ),
    unseen=(
        "Starting on {date}, {name} sleeps {nights} nights in {city}.", "{city} expects {name} on {date}; the stay is {nights} nights.",
    ),
)  # fmt: skip
CONTACT = Phrasings(
    train=(
        "You can reach {name} at {phone} or {email}.", "{name}: phone {phone}, email {email}.",
        "Call {name} at {phone} or write to {email}.", "The number of {name} is {phone} and the email is {email}.",
        "Contact {name} by email ({email}) or phone ({phone}).", "Write to {email} or dial {phone} and ask for {name}.",
    ),
    unseen=("If you need {name}, dial {phone} or mail {email}.", "{name} answers at {email} and at {phone}."),
)  # fmt: skip
