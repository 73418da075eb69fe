"""The page: one HTML file with everything in it, which asks no network for anything.

Owns the escaping. Whatever comes from a trace goes through html.escape into the document, or as
JSON without "<", ">" and "&" into a block that is never run; and a content security policy lets
nothing run but the page's own script, by its hash. The script (page/*.js) puts text on the page as
text only. A Trace and its Explanation come in, text goes out.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_trace.explanation import Explanation
from headrace_trace.page_data import page_data
from headrace_trace.trace_model import Trace
from headrace_trace.words import LEDGER_WORDS, cause_words, ending_words, lines_of, milliseconds, plain, wait_words

_FOLDER = importlib.resources.files("headrace_trace") / "page"
_SCRIPTS = ("data.js", "view.js", "lanes.js", "pointer.js", "detail.js", "table.js", "main.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")
# What would end a script block or begin something in it, and what old parsers take for line ends.
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render(trace: Trace, explanation: Explanation) -> str:
    """Returns the HTML page of a trace."""
    style = _read("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_read, _SCRIPTS)) + "\n})();"
    return _filled(
        _read("page.html"),
        {
            "policy": _policy(style, script),
            "style": style,
            "script": script,
            "data": safe_json(page_data(trace, explanation)),
            "title": _text(f"Trace of {trace.request_id}"),
            "request_id": _text(trace.request_id),
            "trace_id": _text(trace.trace_id),
            "facts": _facts(trace, explanation),
            "tiles": _tiles(trace, explanation),
            "ledger": _ledger(explanation),
            "slowest": "".join(_slowest(explanation)),
            "words": _text("\n".join(lines_of(explanation))),
        },
    )


def safe_json(value: Any) -> str:
    """JSON that cannot leave the script block that it stands in."""
    return json.dumps(value, separators=(",", ":")).translate(_UNSAFE)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Returns the template with its places filled in one pass.

    No value can bring a place of its own.
    """
    return _PLACE.sub(lambda match: values[match[1]], template)


def _policy(style: str, script: str) -> str:
    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; base-uri 'none'; form-action "
        "'none'"
    )


def _text(text: str) -> str:
    return html.escape(plain_lines(text))


def plain_lines(text: str) -> str:
    """Text without control characters but line ends."""
    return "\n".join(map(plain, text.split("\n")))


def _facts(trace: Trace, explanation: Explanation) -> str:
    facts = [trace.model, trace.operation, trace.wire and f"by {trace.wire}", trace.engine and f"engine {trace.engine}"]
    facts += [f"ended: {ending_words(explanation)}", trace.kept and f"kept: {trace.kept}"]
    return "".join(f"<li>{_text(fact)}</li>" for fact in facts if fact)


def _tiles(trace: Trace, explanation: Explanation) -> str:
    cached = f", {trace.cached_tokens:,} cached" if trace.cached_tokens else ""
    prompt = "unknown" if trace.prompt_tokens is None else f"{trace.prompt_tokens:,}"
    tiles = (
        _first_token_tile(explanation),
        ("between tokens, median", milliseconds(explanation.itl_p50_ms), ""),
        ("between tokens, p99", milliseconds(explanation.itl_p99_ms), ""),
        ("in all", milliseconds(explanation.duration_ms), ""),
        ("output tokens", f"{explanation.tokens:,}", f"in {len(trace.own_step_ids):,} steps"),
        ("prompt tokens", prompt, cached.removeprefix(", ")),
        ("preemptions", f"{trace.preemptions:,}", ""),
    )
    return "".join(
        f"<div class='tile'><dt>{_text(name)}</dt><dd>{_text(value)}"
        f"{f' <small>{_text(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in tiles
    )


def _first_token_tile(explanation: Explanation) -> tuple[str, str, str]:
    """When the first token left, and beside it by its own name when it had been computed.

    Of an answer in one message only that.
    """
    left, computed = explanation.ttft_ms, explanation.computed_ms
    if left is None and computed is not None:
        return ("first token computed after", milliseconds(computed), "")
    note = f"computed after {milliseconds(computed)}" if computed is not None else ""
    return ("time to first token", milliseconds(left), note)


def _ledger(explanation: Explanation) -> str:
    """The ledger as a bar, and the same as a list."""
    parts = [(name, ms) for name, ms in explanation.ledger_ms.items() if ms > 0]
    whole = sum(ms for _, ms in parts)
    if not whole:
        return "<p>The trace has no ledger.</p>"
    bars, items, at = [], [], 0.0
    for name, ms in parts:
        css = "part-" + (name if name in LEDGER_WORDS else "other")
        share = 100 * ms / whole
        words = _text(f"{LEDGER_WORDS.get(name, name)} {milliseconds(ms)} ({ms / whole:.1%})")
        bars.append(
            f"<rect class='{css}' x='{at:.3f}' y='0' width='{share:.3f}' height='4'><title>{words}</title></rect>"
        )
        items.append(
            f"<li><svg class='swatch' viewBox='0 0 1 1' aria-hidden='true'><rect class='{css}' width='1' "
            f"height='1'/></svg>{words}</li>"
        )
        at += share
    bar = (
        "<svg class='ledger' viewBox='0 0 100 4' preserveAspectRatio='none' role='img' aria-label='Where the time "
        f"went'>{''.join(bars)}</svg>"
    )
    return f"{bar}<ul class='legend'>{''.join(items)}</ul>"


def _slowest(explanation: Explanation) -> Iterator[str]:
    for gap in explanation.slowest():
        yield (
            f"<li><button type='button' class='wait' data-output='{gap.output}' data-token='{gap.index}'>"
            f"<span class='mark kind-{gap.cause.kind}'></span><b>{_text(wait_words(gap, explanation))}</b> "
            f"<span>{_text(cause_words(gap, explanation))}</span></button></li>"
        )
