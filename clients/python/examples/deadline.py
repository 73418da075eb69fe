"""A deadline for a call, and a time limit for a generation. Run: python deadline.py [SERVER]."""

import sys

import headrace


def main(server: str) -> None:
    """Lets both of them pass."""
    with headrace.Client(server) as client:
        try:
            client.generate("Once upon a time", ignore_eos=True, timeout=0.005).result()
        except headrace.DeadlineExceeded as error:
            print(f"the call's deadline passed: {error.message}")
        # With a time limit the answer so far is a result, and its finish reason says why it ended.
        submitted = client.submit("Once upon a time", max_tokens=500, ignore_eos=True, time_limit=0.05)
        completion = client.subscribe(submitted).result()
        print(f"{completion.finish_reason} after {len(completion.token_ids)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
