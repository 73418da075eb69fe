"""A whole answer, then a streamed one. Run: python generate.py [SERVER]."""

import sys

import headrace


def main(server: str) -> None:
    """Completes one prompt twice."""
    with headrace.Client(server) as client:
        completion = client.complete("Once upon a time", max_tokens=32, temperature=0)
        print(f"{completion.text!r} ({completion.finish_reason}, {completion.usage.output_tokens} tokens)")
        for piece in client.generate("Once upon a time", max_tokens=32, temperature=0.8, seed=1).text():
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
