"""Questions that the model answers with a function of ours. Run: python tools.py [SERVER]."""

import json
import sys

import headrace

WEATHER = headrace.Tool(
    "weather",
    "The weather of a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
)
# Invented; a real program would ask a weather service.
REPORTS = {"Oslo": {"sky": "snowy", "temperature": -3}, "Paris": {"sky": "sunny", "temperature": 21}}
MOST_CALLS = 4


def weather(city: str) -> str:
    """What the model gets when it calls the function."""
    return json.dumps(REPORTS.get(city, {"error": f"no report from {city}"}))


def answer(client: headrace.Client, said: list[headrace.Message]) -> str:
    """Has the model answer what was said, with as many calls as it needs."""
    for _ in range(MOST_CALLS):
        output = client.chat(said, tools=[WEATHER], max_tokens=64).result()
        said.append(output.message)
        if not output.tool_calls:
            return output.text
        for call in output.tool_calls:
            print(f"  {call.name}({call.arguments})")
            said.append(headrace.Message("tool", weather(**call.parsed()), tool_call_id=call.id))
    raise RuntimeError(f"no answer after {MOST_CALLS} calls")


def main(server: str) -> None:
    """Asks twice in one conversation."""
    said: list[headrace.Message] = []
    with headrace.Client(server) as client:
        for question in ("What is the weather in Paris?", "And in Oslo?"):
            print(question)
            said.append(headrace.Message("user", question))
            print(answer(client, said))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
