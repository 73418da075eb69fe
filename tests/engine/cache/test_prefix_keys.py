"""Equal keys mean equal tokens, equal history, equal tenant and salt."""

from __future__ import annotations

from headrace_backend.engine.cache.prefix_keys import PrefixKeys


def test_keys_depend_on_tenant_salt_parent_and_tokens() -> None:
    keys = PrefixKeys()
    root = keys.salt("tenant", b"salt")
    assert root == keys.salt("tenant", b"salt")
    different = {root, keys.salt("tenant", b""), keys.salt("", b"tenantsalt"), keys.salt("tenants", b"alt")}
    assert len(different) == 4
    one = keys.extend(root, b"\1\0\0\0")
    assert one == keys.extend(root, b"\1\0\0\0")
    assert len({one, keys.extend(root, b"\2\0\0\0"), keys.extend(one, b"\1\0\0\0")}) == 3
    assert len(one) == 16


def test_two_engines_never_share_keys() -> None:
    assert PrefixKeys().salt("", b"") != PrefixKeys().salt("", b"")
