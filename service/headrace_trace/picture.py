"""The picture: the page's lanes as a PNG, for where no browser is.

Owns the drawing. Needs matplotlib, which the `bench` extra brings; it is imported by name when a
picture is wanted, so that nothing else needs it. A Trace and its Explanation come in, the bytes of
a PNG go out.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from headrace_trace.explanation import Explanation, Gap, Kind
from headrace_trace.spans import TraceError
from headrace_trace.trace_model import Step, Token, Trace
from headrace_trace.words import LEDGER_WORDS, cause_words, first_token_words, milliseconds, plain, wait_words

_DOTS_PER_INCH = 110
_SIZE = (13.0, 10.4)
_MS = 1e6
_NAMED = 4
# Okabe and Ito's colours, as on the page.
_PHASES = {
    "queue": "#b86a9a",
    "prefill": "#d98a00",
    "decode": "#0072b2",
    "preempted": "#c94f00",
    "engine_restart": "#3b3f45",
}
_KINDS = {
    Kind.PREFILL: "#d98a00",
    Kind.OWN_PREFILL: "#8a5700",
    Kind.PREEMPTION: "#c94f00",
    Kind.ENGINE_RESTART: "#3b3f45",
    Kind.ARRIVAL: "#008f68",
    Kind.READER: "#6f4a9e",
    Kind.SERVICE: "#008f68",
    Kind.QUEUE: "#b86a9a",
    Kind.DEVICE: "#0072b2",
    Kind.HOST_IDLE: "#a08c00",
    Kind.HOST_READ: "#a08c00",
    Kind.OTHER_STEPS: "#9aa3ab",
    Kind.UNKNOWN: "#9aa3ab",
    Kind.USUAL: "#b9c6d2",
}
_KIND_WORDS = {
    Kind.PREFILL: "prefill of others",
    Kind.OWN_PREFILL: "own prefill",
    Kind.ENGINE_RESTART: "engine restart",
    Kind.ARRIVAL: "on its way in",
    Kind.READER: "reader blocked",
    Kind.SERVICE: "service late",
    Kind.DEVICE: "device",
    Kind.HOST_IDLE: "device idle",
    Kind.HOST_READ: "read late",
    Kind.OTHER_STEPS: "other steps",
    Kind.UNKNOWN: "not in the trace",
    Kind.USUAL: "as usual",
}
_STRETCHES = (
    ("waits for its step", "#c9ced4"),
    ("on the device", "#0072b2"),
    ("until read", "#a08c00"),
    ("in the service", "#008f68"),
    ("sent", "#6f4a9e"),
)
# Rows of the picture's part that shows single tokens.
_TOKENS_SHOWN = 24


def check() -> None:
    """Raises TraceError if no picture can be drawn here."""
    if importlib.util.find_spec("matplotlib") is None:
        raise TraceError("a picture needs matplotlib: pip install 'headrace-server[bench]'")


def draw(trace: Trace, explanation: Explanation) -> bytes:
    """Returns the picture of a trace.

    Raises:
        TraceError: matplotlib is missing.
    """
    check()
    # Its default fonts and colours, whatever the settings of the person who runs it.
    figure: Any = importlib.import_module("matplotlib.figure").Figure(
        figsize=_SIZE, layout="constrained", facecolor="#ffffff"
    )
    phases, waits, steps, tokens, words = figure.subplots(5, 1, height_ratios=[0.5, 1.5, 1.6, 3.4, 2.4])
    _phases(phases, trace)
    _waits(waits, explanation)
    _steps(steps, trace)
    end = (trace.end_ns - trace.start_ns) / _MS
    for axes in (phases, waits, steps):
        axes.set_xlim(-0.005 * end, 1.005 * end or 1)
        _plain_frame(axes)
    for axes in (phases, waits):
        axes.tick_params(labelbottom=False)
    steps.set_xlabel("ms since the call", fontsize=8)
    _tokens(tokens, trace, explanation)
    _words(words, explanation)
    figure.suptitle(_title(explanation), fontsize=11, x=0.01, ha="left", parse_math=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return data.getvalue()


def _title(explanation: Explanation) -> str:
    e = explanation
    figures = f"{first_token_words(e)}, ITL p50 {milliseconds(e.itl_p50_ms)}, p99 {milliseconds(e.itl_p99_ms)}"
    return _drawable(f"{e.request_id} on {e.model}: {e.tokens:,} tokens in {milliseconds(e.duration_ms)}; {figures}")


def _phases(axes: Any, trace: Trace) -> None:
    seen = {}
    for phase in trace.phases:
        start, length = (phase.start_ns - trace.start_ns) / _MS, (phase.end_ns - phase.start_ns) / _MS
        seen[phase.name] = axes.barh(0, length, left=start, height=0.9, color=_PHASES[phase.name])
    if seen:
        axes.legend(seen.values(), [LEDGER_WORDS[name] for name in seen], **_LEGEND)
    axes.set_yticks([0], ["request"], fontsize=8)


def _waits(axes: Any, explanation: Explanation) -> None:
    output = min((gap.output for gap in explanation.gaps), default=0)
    gaps = [gap for gap in explanation.gaps if gap.output == output]
    by_kind: dict[Kind, list[Gap]] = {}
    for gap in gaps:
        by_kind.setdefault(gap.cause.kind, []).append(gap)
    for kind, of_kind in by_kind.items():
        boxes = [(gap.at_ms - gap.ms, gap.at_ms, 0.0, gap.ms) for gap in of_kind]
        _boxes(axes, boxes, _KINDS[kind], _KIND_WORDS.get(kind, str(kind)))
    most = max((gap.ms for gap in gaps if not gap.first), default=0.0)
    if most:
        axes.set_ylim(0, 1.15 * most)
    if gaps:
        axes.legend(**_LEGEND)
    axes.set_ylabel("wait per token, ms", fontsize=8)


def _steps(axes: Any, trace: Trace) -> None:
    """Prefill tokens of each step above the line, decodes below it, each to its own scale."""
    most = max((step.prefill_tokens for step in trace.steps.values()), default=0) or 1
    decodes = max((step.decodes for step in trace.steps.values()), default=0) or 1
    under, own, others = [], [], []
    for step in trace.steps_in_order:
        begin, end = (step.start_ns - trace.start_ns) / _MS, (step.end_ns - trace.start_ns) / _MS
        mine = _own_prefill(trace, step)
        under.append((begin, end, -0.6 * step.decodes / decodes, 0.0))
        own.append((begin, end, 0.0, mine / most))
        others.append((begin, end, mine / most, step.prefill_tokens / most))
    _boxes(axes, under, "#0072b2", f"decodes (at most {decodes:,})")
    _boxes(axes, own, "#8a5700", "own prefill tokens")
    _boxes(axes, others, "#d98a00", f"others' prefill tokens (both: at most {most:,})")
    axes.axhline(0, color="#5c6670", linewidth=0.6)
    axes.set_ylim(-0.65, 1.05)
    axes.set_yticks([])
    axes.set_ylabel("steps", fontsize=8)
    if under:
        axes.legend(**_LEGEND)


def _boxes(axes: Any, boxes: Sequence[tuple[float, float, float, float]], colour: str, label: str) -> None:
    """Rectangles as (left, right, bottom, top), as one artist.

    A bar each would take half a minute for ten thousand tokens.
    """
    corners = [
        [(left, bottom), (right, bottom), (right, top), (left, top)]
        for left, right, bottom, top in boxes
        if top > bottom
    ]
    kind = importlib.import_module("matplotlib.collections").PolyCollection
    axes.add_collection(kind(corners, facecolors=colour, linewidths=0, label=label), autolim=False)


def _own_prefill(trace: Trace, step: Step) -> int:
    return sum(prefill.tokens for prefill in step.prefills if prefill.request_id == trace.request_id)


def _tokens(axes: Any, trace: Trace, explanation: Explanation) -> None:
    """The tokens around the longest wait between two, a row each, from planned to sent."""
    slowest = max((gap for gap in explanation.gaps if not gap.first), key=lambda gap: gap.ms, default=None)
    tokens = trace.outputs.get(slowest.output if slowest else 0, ())
    place = next((at for at, token in enumerate(tokens) if slowest and token.index == slowest.index), 0)
    first = max(0, min(place - _TOKENS_SHOWN // 2, len(tokens) - _TOKENS_SHOWN))
    shown = tokens[first : first + _TOKENS_SHOWN]
    for number, (name, colour) in enumerate(_STRETCHES):
        bars = [(token.index, *stretches[number]) for token in shown if (stretches := _way(trace, token))[number]]
        axes.barh(
            [bar[0] for bar in bars],
            [bar[2] for bar in bars],
            left=[bar[1] for bar in bars],
            height=0.72,
            color=colour,
            label=name,
        )
    _plain_frame(axes)
    axes.invert_yaxis()
    axes.set_ylabel("tokens around the longest wait", fontsize=8)
    axes.set_xlabel("ms since the call", fontsize=8)
    if shown:
        axes.set_yticks([token.index for token in shown][:: 2 if len(shown) > 12 else 1])
        axes.legend(**_LEGEND)


def _way(trace: Trace, token: Token) -> list[tuple[float, float] | tuple[()]]:
    """A token's stretches as (start, length) in ms since the call; () where it is not known."""
    step = trace.steps.get(token.step_id) if token.step_id is not None else None
    moments = [
        token.scheduled_ns,
        step.start_ns if step else None,
        step.end_ns if step else None,
        token.sampled_ns,
        token.emitted_ns,
        token.written_ns,
    ]
    return [
        () if begin is None or end is None else ((begin - trace.start_ns) / _MS, max(0.0, (end - begin) / _MS))
        for begin, end in zip(moments, moments[1:], strict=False)
    ]


def _words(axes: Any, explanation: Explanation) -> None:
    axes.axis("off")
    lines = _ledger_line(explanation)
    for gap in explanation.slowest(_NAMED):
        lines += textwrap.wrap(
            f"{wait_words(gap, explanation)}: {cause_words(gap, explanation)}", 175, subsequent_indent="    "
        )
    # Names come from callers: no dollar sign is a formula.
    axes.text(
        0,
        1,
        _drawable("\n".join(lines)),
        va="top",
        fontsize=8,
        linespacing=1.5,
        family="monospace",
        parse_math=False,
        transform=axes.transAxes,
    )


def _ledger_line(explanation: Explanation) -> list[str]:
    parts: Sequence[tuple[str, float]] = sorted(explanation.ledger_ms.items(), key=lambda item: -item[1])
    words = [f"{LEDGER_WORDS.get(name, name)} {milliseconds(ms)}" for name, ms in parts if ms > 0]
    return [f"where the time went: {', '.join(words)}", "the longest waits:"] if words else ["the longest waits:"]


def _drawable(text: str) -> str:
    """Text whose every character is in the font that matplotlib brings."""
    return "\n".join("".join(c if c.isascii() else "?" for c in plain(line)) for line in text.split("\n"))


def _plain_frame(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, length=2)
    axes.grid(axis="x", color="#dde1e5", linewidth=0.6)
    axes.set_axisbelow(True)


_LEGEND: dict[str, Any] = {
    "fontsize": 7,
    "loc": "lower right",
    "bbox_to_anchor": (1.0, 0.99),
    "ncols": 8,
    "frameon": False,
    "borderaxespad": 0.0,
    "handlelength": 1.0,
}
