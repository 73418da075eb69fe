"""Which records of `bench_engine` are of the engine as it is, and what weights they are of."""

from __future__ import annotations

import re
from typing import Any

# The only setting that such a run may have: it names a kind of weights.
_KIND_OF_WEIGHTS = re.compile(r"--set quantize_activations=\S+")
# Parts of files' names that say that the code was not kept, or something else ran beside it.
_COMPARED = re.compile(
    r"-(before|old|two-steps|no-tiles|no-sums-fast|all-sums-fast|padded|slow-host|all-rows|whole-experts)\b"
)


def is_typical(record: dict[str, Any], file: str) -> bool:
    """Whether a record is of the engine's own settings, whole, and not measured to compare."""
    command = _command(record)
    is_cut = record.get("cut") or record.get("incomplete")
    return "--set" not in _KIND_OF_WEIGHTS.sub("", command) and not is_cut and not _COMPARED.search(file)


def weights_name(record: dict[str, Any]) -> str:
    """The weights of a record, as tables name them."""
    command = _command(record)
    if "--files fp8_blocks" in command:
        return "fp8 in blocks"
    kind: str = record["quant"] or record["dtype"]
    head = f", {record['quant_head']} head" if record.get("quant_head") else ""
    return kind + head + (", fp8 activations" if _KIND_OF_WEIGHTS.search(command) else "")


def _command(record: dict[str, Any]) -> str:
    return str(record.get("command", "")).replace('"', "")
