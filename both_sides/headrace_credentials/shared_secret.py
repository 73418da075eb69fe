"""The shared secret that one process of a server shows another one over HOST:PORT."""

from __future__ import annotations

import pathlib

from headrace_credentials import files as credential_files


def bearer_metadata(token_file: pathlib.Path | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call that shows the secret in a file; none without a file.

    Raises:
        CredentialError: The file cannot be used.
    """
    if token_file is None:
        return ()
    secret = credential_files.read(token_file, private=True).strip()
    return (("authorization", f"Bearer {secret.decode(errors='replace')}"),)
