"""Several streams at once with asyncio; each prints how it ended.

Run: python stream_async.py [SERVER].
"""

import asyncio
import sys

import headrace


async def ask(client: headrace.AsyncClient, prompt: str) -> None:
    """Reads one stream event by event."""
    async with client.generate(prompt, max_tokens=24, stop=[".", "\n"]) as stream:
        text = ""
        async for event in stream:
            match event:
                case headrace.Delta():
                    text += event.text
                case headrace.OutputFinished():
                    print(f"{prompt!r} -> {text!r} ({event.reason})")
                case headrace.Done():
                    print(f"{prompt!r}: first token after {event.ledger.ttft_ns / 1e6:.1f} ms")


async def main(server: str) -> None:
    """Asks three questions at the same time."""
    async with headrace.AsyncClient(server) as client:
        prompts = ("Once upon a time", "The capital of France is", "2 + 2 =")
        await asyncio.gather(*(ask(client, prompt) for prompt in prompts))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
