"""Files of keys and certificates, for all processes that listen or connect.

Owns how such a file is read and judged (`files`, `pem`), the certificate of a listener with its changes (`server_tls`), and what a client shows
(`client_tls`). Imports nothing of ours.
"""

from headrace_credentials.client_tls import ClientTlsFiles, channel_credentials
from headrace_credentials.files import CredentialError
from headrace_credentials.server_tls import ServerTls, TlsFiles

__all__ = ["ClientTlsFiles", "CredentialError", "ServerTls", "TlsFiles", "channel_credentials"]
