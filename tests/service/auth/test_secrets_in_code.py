"""Rules that code must keep where it touches secrets, read off the code itself."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import headrace_credentials
import headrace_service.auth

FOLDER = pathlib.Path(headrace_service.auth.__file__).parent
FILES = [*FOLDER.glob("*.py"), *pathlib.Path(headrace_credentials.__file__).parent.glob("*.py")]
# Words by which names in this package hold a key, a digest of one, or what a caller presented.
_SECRET_WORDS = ("secret", "digest", "sha256", "presented", "token", "password", "authorization")
_COMPARISONS = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "len":
            # Lengths of digests are the same.
            return


def _is_secret(node: ast.AST) -> bool:
    return any(word in name.lower() for name in _names(node) for word in _SECRET_WORDS)


def secret_comparisons(source: str) -> list[int]:
    """Lines that compare a secret other than by hmac.compare_digest, or look it up in a table."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(isinstance(op, _COMPARISONS) for op in node.ops):
            sides = [node.left, *node.comparators]
            if any(_is_secret(side) for side in sides) and not any(
                isinstance(side, ast.Constant) and side.value is None for side in sides
            ):
                found.append(node.lineno)
        elif isinstance(node, ast.Match) and _is_secret(node.subject):
            found.append(node.lineno)
        elif isinstance(node, ast.Subscript) and _is_secret(node.slice):
            found.append(node.lineno)
    return found


def test_no_secret_is_compared_other_than_in_constant_time() -> None:
    found = {path.name: secret_comparisons(path.read_text()) for path in FILES}
    assert found and not any(found.values()), found
    assert "hmac.compare_digest" in (FOLDER / "api_keys.py").read_text()


def test_the_rule_finds_what_it_is_for() -> None:
    for line in (
        "if secret == given: pass",
        "ok = key.sha256 != other",
        "x = presented in table",
        "y = by_digest[digest]",
        "if digest_of(key) == known: pass",
    ):
        assert secret_comparisons(line) == [1], line
    for line in ("ok = hmac.compare_digest(secret, digest)", "if secret is None: pass", "x = name == 'id'"):
        assert secret_comparisons(line) == [], line


def test_no_log_line_takes_a_secret() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_log = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _names_log(node.func.value)
            if is_log:
                assert isinstance(node, ast.Call)
                for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                    assert not _is_secret(argument), f"{path.name}:{node.lineno}"


def _names_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "_log"
