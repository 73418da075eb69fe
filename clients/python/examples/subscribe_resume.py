"""A generation that outlives its reader: read some tokens, leave, come back for the rest.

Run: python subscribe_resume.py [SERVER].
"""

import sys

import headrace


def main(server: str) -> None:
    """Submits one generation and reads it in two sittings."""
    with headrace.Client(server) as client:
        submitted = client.submit("Once upon a time", max_tokens=48, temperature=0, ignore_eos=True)
        print(f"request {submitted.request_id}")
        first, seen = "", 0
        with client.subscribe(submitted) as stream:
            for event in stream:
                if isinstance(event, headrace.Delta):
                    first, seen = first + event.text, event.first_token_index + len(event.token_ids)
                    if seen >= 10:
                        break
        rest = client.subscribe(submitted, from_token=seen).result()
        whole = client.subscribe(submitted).result()
        print(f"{first!r} + {rest.text!r}")
        assert first + rest.text == whole.text


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
