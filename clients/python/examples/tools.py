"""A question that the model answers with a function. Run: python tools.py [SERVER]."""

import sys

import headrace

WEATHER = headrace.Tool(
    "weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


def weather(city: str) -> str:
    """What the model gets when it asks."""
    return f"Sunny in {city}."


def main(server: str) -> None:
    """Has the model call the function, and answer with what that returned."""
    said = [headrace.Message("user", "What is the weather in Paris?")]
    choice = "required"
    with headrace.Client(server) as client:
        while True:
            stream = client.chat(said, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=64)
            answer = stream.result()
            said.append(answer.message)
            if not answer.tool_calls:
                print(answer.text)
                return
            for call in answer.tool_calls:
                print(f"{call.name}({call.parsed()})")
                said.append(headrace.Message("tool", weather(**call.parsed()), tool_call_id=call.id))
            choice = "none"


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
