"""Many generations over one stream, as a gateway reads them. Run: python session.py [SERVER]."""

import sys

import headrace


def main(server: str) -> None:
    """Reads steps of three generations, then each of two by itself."""
    with headrace.Client(server) as client:
        with client.session() as session:
            prompts = ("Once upon a time", "The capital of France is", "2 + 2 =")
            stop = [".", "\n"]
            asked = {session.submit(prompt, max_tokens=24, stop=stop).stream_id: prompt for prompt in prompts}
            session.finish()
            texts = dict.fromkeys(asked, "")
            for step in session.steps():
                # One batch per step of the engine: columns of all new tokens, then events.
                for stream_id, text in zip(step.stream_ids, step.texts, strict=True):
                    texts[stream_id] += text
                for stream_id, event in ((e.stream_id, e.event) for e in step.events):
                    if isinstance(event, headrace.OutputFinished):
                        print(f"{asked[stream_id]!r} -> {texts[stream_id]!r} ({event.reason})")
        with client.session() as session:
            first = session.submit("Once upon a time", max_tokens=200, ignore_eos=True)
            second = session.submit(messages="What is a KV cache?", max_tokens=64)
            print(second.result().text)
            first.cancel()
            print(f"the other one: {first.result().finish_reason}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
