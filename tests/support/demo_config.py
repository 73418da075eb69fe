"""The demo model's configuration with other values in its config.json."""

from __future__ import annotations

import json

from tests.support.running_server import DEMO

from headrace_model_folder import ModelConfig
from headrace_model_folder.config import parse_config

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def demo_config(**changes: object) -> ModelConfig:
    """Vocabularies may be smaller than the demo's, so the configuration names no tokens."""
    values = json.loads((DEMO / "config.json").read_text())

    return parse_config({**values, **_NO_TOKENS, **changes})
