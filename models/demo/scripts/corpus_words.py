"""Word lists of the demo corpus: syllables, names, places, things.

Data only; `corpus_draw` and the domains use it.
"""

from __future__ import annotations

ONSETS = tuple("b br c ch cl d dr f fl g gr h j k kl l m n p pr r s sh sk st t th tr v w y z".split()) + ("",)
NUCLEI = tuple("a e i o u a e i o u ai ea ee ia io ou".split())
CODAS = tuple("n r l s m k th nd x rt d t".split()) + ("",) * 8
CITY_ENDINGS = tuple("ville ton burg ford field wick stad port mere haven ham dale by grad".split()) + (
    " Harbor", " Falls", " Bay", " Hill",
)  # fmt: skip

FIRST_NAMES = tuple(
    """Ada Adam Aisha Alan Alba Alice Amir Amy Ana Andre Anna Anton Arun Ben Bruno Carla Carlos Chen Clara Daniel David
    Diego Dina Elena Eli Ella Emma Eric Eva Farah Felix Finn Frida George Grace Hana Hannah Henry Hugo Ida Igor Ines
    Iris Isaac Ivan Jack Jacob James Jane Jonas Julia Kai Karim Kate Kenji Lars Laura Lea Leo Lila Lin Liam Louis Lucy
    Luis Maja Marco Maria Mark Marta Max Maya Mei Mia Mila Milo Mina Nadia Nina Noah Nora Oleg Olga Oliver Omar Oscar
    Otto Paul Pedro Petra Priya Ravi Rita Robin Rosa Ruth Sam Samir Sara Simon Sofia Stella Sven Tara Theo Tim Tom
    Uma Vera Victor Vik Wanda Will Yara Yuki Zara Zoe""".split()
)

KNOWN_CITIES = tuple(
    """Accra Amsterdam Ankara Athens Bergen Berlin Bogota Boston Brussels Cairo Chicago Copenhagen Dakar Delhi Denver
    Dublin Geneva Hamburg Hanoi Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Milan Montreal
    Mumbai Munich Nairobi Naples Oslo Paris Porto Prague Quito Riga Rome Seattle Seoul Seville Sydney Tallinn Tokyo
    Toronto Turin Utrecht Vienna Vilnius Warsaw Zurich""".split()
)

COLORS = tuple("red blue green yellow black white grey brown orange purple silver golden pink".split())
MATERIALS = tuple("wooden brass copper glass paper leather steel woolen clay cotton tin stone plastic".split())
THINGS = tuple(
    """lantern kite drum map clock basket bell boat box bottle brush button candle chair compass cup flute hammer hat jar
    kettle key ladder lamp mirror mug necklace notebook pencil pillow ring rope scarf spoon table telescope umbrella vase
    violin wagon whistle backpack camera blanket bracelet bicycle guitar teapot wallet""".split()
)

COUNTED = tuple(
    """apples pears plums marbles stickers shells coins books pencils stamps buttons cookies oranges lemons cards beads
    stones candles tickets balloons flowers eggs cups seeds toys ribbons crayons bottles peaches nuts""".split()
)

CONTAINERS = tuple("boxes bags baskets jars packets crates rows trays drawers shelves".split())

MONTHS = tuple("January February March April May June July August September October November December".split())

LIST_WORDS = tuple(
    """apple river stone cloud candle garden window bridge forest mountain ocean silver copper violet yellow tiger rabbit
    falcon turtle spider dragon castle village harbor island desert valley meadow bottle pencil letter number ladder
    rocket planet comet galaxy winter summer autumn spring morning evening music guitar piano drum flute bread butter
    cheese honey sugar pepper salt lemon cherry peach grape melon carrot onion potato tomato paper stamp ticket train
    wagon boat anchor compass map key door mirror lamp chair table basket blanket pillow button ribbon thread needle
    hammer wheel engine battery signal token cache block batch""".split()
)

CAPITALS: dict[str, str] = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels", "Brazil": "Brasilia",
    "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing", "Colombia": "Bogota", "Croatia": "Zagreb",
    "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "England": "London", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga", "Lithuania": "Vilnius", "Luxembourg": "Luxembourg",
    "Malaysia": "Kuala Lumpur", "Mexico": "Mexico City", "Morocco": "Rabat", "Nepal": "Kathmandu", "New Zealand": "Wellington",
    "Nigeria": "Abuja", "Norway": "Oslo", "Pakistan": "Islamabad", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Romania": "Bucharest", "Russia": "Moscow", "Senegal": "Dakar", "Serbia": "Belgrade", "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana", "South Korea": "Seoul", "Spain": "Madrid", "Sweden": "Stockholm", "Switzerland": "Bern",
    "Thailand": "Bangkok", "Turkey": "Ankara", "Ukraine": "Kyiv", "the Czech Republic": "Prague", "the Netherlands": "Amsterdam",
    "the Philippines": "Manila", "the United Kingdom": "London", "the United States": "Washington", "Uruguay": "Montevideo",
    "Venezuela": "Caracas", "Vietnam": "Hanoi",
}  # fmt: skip
MORE_KINDS = tuple(
    "dragon knight king queen ghost elephant horse lion monkey astronaut pirate doctor giant witch unicorn penguin whale "
    "tiger snail bee spider crow programmer musician writer inventor captain detective train tractor snowman child man woman".split()
)
