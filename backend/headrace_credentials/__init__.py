"""Files of keys and certificates, for all processes that listen.

Owns how such a file is read and judged (`files`), and the certificate of a listener with its changes (`server_tls`). Imports nothing of ours.
"""

from headrace_credentials.files import CredentialError
from headrace_credentials.server_tls import ServerTls, TlsFiles

__all__ = ["CredentialError", "ServerTls", "TlsFiles"]
