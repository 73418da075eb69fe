"""Who may call what: API keys, TLS, and the gate in front of every method.

Imports inside this package go one way:

    interceptor -> key_ring, audit -> caller -> api_keys -> permissions, refusals
    credentials -> interceptor;  key_ring -> audit_log;  keys_command -> api_keys;  certs_command ->
    certificates

Nothing here knows a handler. `interceptor.AuthInterceptor` names the caller before a handler runs,
`calls.call.Call` carries it, and whoever resolves a model's name asks `Caller.check_model`.
Quotas are numbers here; the engine keeps them, because they hold over all service processes.
"""
