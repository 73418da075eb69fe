"""Files of keys and certificates, for all processes that listen or connect.

Owns how such a file is read and judged (`files`, `pem`), the certificate of a listener with its
changes (`server_tls`), and what a client shows (`client_tls`, `shared_secret`). Imports nothing of
ours; `files` needs the standard library only.
"""
