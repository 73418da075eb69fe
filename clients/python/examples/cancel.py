"""Two ways to end a generation early. Run: python cancel.py [SERVER]."""

import sys

import headrace


def main(server: str) -> None:
    """Leaves a stream, then ends a submitted generation by its id."""
    with headrace.Client(server) as client:
        # Leaving the block cancels the call, and the server stops computing.
        with client.generate("Count: one, two,", max_tokens=200, ignore_eos=True) as stream:
            for event in stream:
                if isinstance(event, headrace.Delta):
                    print(f"enough after {event.text!r}")
                    break
        # A submitted generation is ended by its id, from anywhere.
        submitted = client.submit("Count: one, two,", max_tokens=200, ignore_eos=True)
        print(f"cancelled: {client.cancel(submitted)}")
        print(f"its readers see: {client.subscribe(submitted).result().finish_reason}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
