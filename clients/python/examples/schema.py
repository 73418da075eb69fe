"""A sentence that the model turns into a dataclass. Run: python schema.py [SERVER]."""

import json
import sys
from dataclasses import dataclass, fields

import headrace


@dataclass(frozen=True)
class Person:
    """What is to be known of somebody."""

    name: str
    age: int
    city: str


KEYS = [field.name for field in fields(Person)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": KEYS,
    "additionalProperties": False,
}
SENTENCE = "Clara Weber is 34 years old and lives in Lisbon."


def main(server: str) -> None:
    """Has the model write JSON that the schema allows, and nothing else."""
    question = f"Extract {', '.join(KEYS)} as JSON: {SENTENCE}"
    with headrace.Client(server) as client:
        answer = client.chat(question, json_schema=SCHEMA, max_tokens=64).result()
    print(Person(**json.loads(answer.text)))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
