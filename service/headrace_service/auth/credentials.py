"""The keys and certificates of one service process, as its configuration names them.

Owns which of them there are, and that all are looked after. The server asks here for its
interceptor and for its ports' certificate.
"""

from __future__ import annotations

from headrace_credentials.server_tls import ServerTls, TlsFiles
from headrace_service.auth import audit_log, reload
from headrace_service.auth.interceptor import AuthInterceptor
from headrace_service.auth.key_ring import KeyRing
from headrace_service.config import ServiceConfig


class Credentials:
    """Keys and certificates, from start to end.

    Args:
        config: names the files.

    Raises:
        CredentialError: a file cannot be used.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self.keys = KeyRing(config.keys_file) if config.keys_file is not None else None
        self.tls: ServerTls | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            files = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)
            self.tls = ServerTls(files, audit_log.logger())

    def interceptor(self, max_metadata_bytes: int) -> AuthInterceptor:
        """Returns the gate in front of the server's methods."""
        return AuthInterceptor(
            self.keys,
            admin=self._config.serves_admin,
            health_needs_key=self._config.health_needs_key,
            max_metadata_bytes=max_metadata_bytes,
        )

    async def watch(self) -> None:
        """Follows the files' changes, for ever."""
        sources = [source for source in (self.keys, self.tls) if source is not None]
        await reload.watch(sources, self._config.credentials_reload_s, self._end_invalid_calls)

    def _end_invalid_calls(self) -> None:
        if self.keys is not None:
            self.keys.end_invalid_calls()
