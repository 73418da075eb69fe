"""A server on the network: TLS, and an API key.

Run: HEADRACE_API_KEY=... python tls_key.py SERVER CA_FILE.
"""

import os
import sys

import headrace


def main(server: str, ca: str) -> None:
    """Proves who both sides are, then asks."""
    # Without ca= the authorities that the system trusts may vouch for the server. For mTLS add
    # certificate= and key=.
    with headrace.Client(server, tls=headrace.Tls(ca=ca), api_key=os.environ["HEADRACE_API_KEY"]) as client:
        print(client.complete("Once upon a time", max_tokens=16).text)
    with headrace.Client(server, tls=headrace.Tls(ca=ca), api_key="not-a-key") as client:
        try:
            client.load()
        except headrace.Unauthenticated as error:
            print(f"refused: {error.code.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
