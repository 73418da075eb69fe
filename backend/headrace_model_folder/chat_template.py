"""The chat template's text and the special tokens it may mention.

Read here, rendered elsewhere (in a killable helper process).
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from headrace_model_folder.bounded_files import MIB, exists_inside, read_json_object, read_text
from headrace_model_folder.errors import InvalidModelFolder

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_LIMIT = MIB
_TOKENIZER_CONFIG_LIMIT = 16 * MIB
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTemplate:
    """What rendering a conversation needs from the folder."""

    # Jinja source; None if the model has no template.
    source: str | None
    # Variables of the template such as bos_token: its text. Tokens that the model lacks are left
    # out.
    special_tokens: dict[str, str]


def read_chat_template(folder: pathlib.Path) -> ChatTemplate:
    """Reads chat_template.jinja, else `chat_template` of tokenizer_config.json.

    That is a text, or a list whose "default" entry counts.

    Raises:
        InvalidModelFolder: a file that can't be read, a template that is not text or larger than 1
            MiB, or half of a surrogate pair in it or in a special token, which JSON can spell and
            no tokenizer takes.
    """
    config: dict[str, Any] = {}
    if exists_inside(folder, TOKENIZER_CONFIG_FILE):
        config = read_json_object(folder, TOKENIZER_CONFIG_FILE, _TOKENIZER_CONFIG_LIMIT)
    if exists_inside(folder, TEMPLATE_FILE):
        source: str | None = read_text(folder, TEMPLATE_FILE, TEMPLATE_LIMIT)
    else:
        source = _template_of_config(config.get("chat_template"))
    tokens = {name: _token_text(config.get(name)) for name in _TOKEN_NAMES}
    special_tokens = {name: text for name, text in tokens.items() if text is not None}
    for name, text in {"chat_template": source or "", **special_tokens}.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            rule = "has half of a surrogate pair, which is no character"
            raise InvalidModelFolder(f"{TOKENIZER_CONFIG_FILE}: {name} {rule}") from None
    return ChatTemplate(source, special_tokens)


def _template_of_config(value: object) -> str | None:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise InvalidModelFolder(
            f"{TOKENIZER_CONFIG_FILE}: chat_template must be a string or a list of named templates"
        )
    if value is not None and len(value) > TEMPLATE_LIMIT:
        raise InvalidModelFolder(
            f"{TOKENIZER_CONFIG_FILE}: chat_template has {len(value)} characters, at most {TEMPLATE_LIMIT} are read"
        )
    return value


def _token_text(value: object) -> str | None:
    """A special token is written as its text, or as an object with its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
