"""A conversation of two turns. Run: python chat.py [SERVER]."""

import sys

import headrace


def main(server: str) -> None:
    """Asks a question and a follow-up."""
    with headrace.Client(server) as client:
        said = [headrace.Message("user", "What is a KV cache?")]
        first = client.chat(said, max_tokens=64).result()
        print(first.text)
        said += [headrace.Message("assistant", first.text), headrace.Message("user", "Why does it help?")]
        for piece in client.chat(said, max_tokens=64).text():
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
