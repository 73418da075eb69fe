"""An explanation in words: the header and the slowest waits with their causes.

Owns the wording. What is said was decided in causes.py. An Explanation comes in, text without
control characters goes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from headrace_trace.explanation import Cause, Explanation, Gap, Kind
from headrace_trace.trace_model import Prefill

# Names in a trace come from callers: they must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_NAMED = 3
# A step that uses less than this share of bandwidth and of FLOP/s is held up by something else.
_FAR = 0.2
_WHERE = {
    "queue": "while it waited in the queue",
    "prefill": "while its prompt was computed",
    "decode": "while it decoded",
    "preempted": "while it was preempted",
    "engine_restart": "while the engine was restarted",
    "delivery": "on the way to its reader",
}
LEDGER_WORDS = {
    "queued": "queue",
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "preempted": "preempted",
    "engine_restart": "engine restart",
    "detokenize_and_send": "detokenize and send",
    "blocked_on_reader": "blocked on reader",
}


def lines_of(explanation: Explanation) -> list[str]:
    """Returns the lines of the whole explanation."""
    return [*_header(explanation), "", *_slowest(explanation)]


def cause_words(gap: Gap, explanation: Explanation) -> str:
    """Returns in words why one wait took what it took."""
    words = [_one(cause, gap, explanation) for cause in gap.causes]
    text = words[0] if len(words) == 1 else f"{words[0]}; also {'; '.join(words[1:])}"
    return plain(text)


def wait_words(gap: Gap, explanation: Explanation) -> str:
    """Which wait it is and how long it took."""
    alike = explanation.alike(gap)
    output = f" of output {gap.output}" if gap.output or alike else ""
    output += f" (and of {alike} more)" if alike else ""
    if gap.first:
        return f"first token{output}: {milliseconds(gap.ms)} after the call"
    beyond = f" ({milliseconds(gap.excess_ms)} beyond the usual)" if gap.excess_ms > 0 else ""
    return f"token {gap.index}{output}: {milliseconds(gap.ms)} after the one before{beyond}"


def first_token_words(explanation: Explanation) -> str:
    """Returns in words when the first token left, and when it had been computed."""
    left, computed = explanation.ttft_ms, explanation.computed_ms
    if left is None and computed is not None:
        return f"first token computed after {milliseconds(computed)}"
    return f"TTFT {milliseconds(left)}" + (
        f" (computed after {milliseconds(computed)})" if computed is not None else ""
    )


def ending_words(explanation: Explanation) -> str:
    """Returns in words what the caller got, why, and where the request was then."""
    e = explanation.ending
    why = ", ".join(dict.fromkeys((*e.reasons, *([e.error_type] if e.error_type not in ("", e.status) else []))))
    text = f"{e.status or 'unknown'}" + (f" ({why})" if why else "")
    if not e.failed and e.where == "delivery" and e.status in ("", "OK"):
        return text
    tokens = f"after {explanation.tokens:,} tokens" if explanation.tokens else "before its first token"
    where = f" {_WHERE.get(e.where, f'in {e.where}')}," if e.where else ""
    return f"{text}{where} {tokens}, {milliseconds(explanation.duration_ms)} after its arrival"


def plain(text: str) -> str:
    """Text without characters that steer a terminal."""
    return _CONTROL.sub("\ufffd", text)


def _header(explanation: Explanation) -> Iterator[str]:
    e = explanation
    yield plain(f"request {e.request_id} on {e.model or 'an unnamed model'}")
    yield f"trace   {e.trace_id}"
    figures = [f"{e.tokens:,} tokens in {milliseconds(e.duration_ms)}", first_token_words(e)]
    figures += [f"ITL p50 {milliseconds(e.itl_p50_ms)}, p99 {milliseconds(e.itl_p99_ms)}"]
    if e.usual_steps:
        figures.append(f"a step of decodes only takes {milliseconds(e.usual_step_ms)} (median of {e.usual_steps:,})")
    yield "; ".join(figures)
    yield plain(f"ended   {ending_words(e)}")
    if e.draft_tokens:
        yield f"drafts  {_draft_words(e)}"
    if e.left_out_tokens:
        yield (
            f"{e.left_out_tokens:,} more tokens are not in the trace: they were more than it may hold "
            "(trace_max_array_tokens)"
        )
    whole = sum(e.ledger_ms.values()) or 1.0
    parts = [
        f"{LEDGER_WORDS.get(part, part)} {milliseconds(ms)} ({ms / whole:.0%})"
        for part, ms in sorted(e.ledger_ms.items(), key=lambda item: -item[1])
        if ms > 0
    ]
    if parts:
        yield plain("time    " + ", ".join(parts))


def _draft_words(e: Explanation) -> str:
    """Returns in words what speculation brought."""
    share = e.accepted_tokens / e.draft_tokens
    saved = f"saved its outputs {e.accepted_tokens:,} steps of one token" if e.accepted_tokens else "saved no step"
    return f"{e.accepted_tokens:,} of {e.draft_tokens:,} drafted tokens accepted ({share:.0%}): speculation {saved}"


def _slowest(explanation: Explanation) -> Iterator[str]:
    slowest = explanation.slowest()
    if not slowest:
        yield "The trace has no times of tokens: it was recorded with trace_detail=off, or nothing was generated."
        return
    yield f"The {len(slowest)} longest waits:"
    for place, gap in enumerate(slowest, 1):
        yield f"{place:3}. {wait_words(gap, explanation)}"
        yield f"     {cause_words(gap, explanation)}"


def _one(cause: Cause, gap: Gap, explanation: Explanation) -> str:
    return _WORDS[cause.kind](cause, gap, explanation)


def _prefill(cause: Cause, gap: Gap, explanation: Explanation) -> str:
    who = _requests(cause.prefills) or "another request"
    took = "shared the steps" if gap.first else "took the step"
    if len(cause.step_ids) != 1 or gap.first:
        return f"prefill of {who} {took}, {_steps(cause)}: {milliseconds(cause.excess_ms)}"
    return f"prefill of {who} took the step, {_steps(cause)}: {_against(cause, explanation)}"


def _own_prefill(cause: Cause, gap: Gap, explanation: Explanation) -> str:
    tokens = sum(prefill.tokens for prefill in cause.prefills)
    count = f" ({tokens:,} tokens)" if tokens else ""
    return f"its own prefill{count} in {_steps(cause)}: {milliseconds(cause.excess_ms)}{_bound(cause)}"


def _device(cause: Cause, gap: Gap, explanation: Explanation) -> str:
    if gap.first:
        return f"the step itself, {_steps(cause)}: {milliseconds(cause.excess_ms)}{_bound(cause)}"
    compiled = ", something was compiled or captured during it" if cause.late_work else ""
    return (
        f"the device: {_steps(cause)} was long by itself, its batch was like its neighbours': "
        f"{_against(cause, explanation)}{compiled}{_bound(cause)}"
    )


def _preemption(cause: Cause, gap: Gap, explanation: Explanation) -> str:
    again = f", then computed again what it had lost in {_steps(cause)}" if cause.step_ids else ""
    return f"it was preempted for others{again}: {milliseconds(cause.excess_ms)}"


def _engine_restart(cause: Cause, gap: Gap, explanation: Explanation) -> str:
    again = f", and its tokens were computed again in {_steps(cause)}" if cause.step_ids else ""
    return f"the engine was restarted{again}: {milliseconds(cause.excess_ms)}"


def _usual(cause: Cause, gap: Gap, explanation: Explanation) -> str:
    step = f": {_steps(cause)} took {milliseconds(cause.step_ms)}{_bound(cause)}" if cause.step_ids else ""
    return f"nothing unusual{step}"


_WORDS: dict[Kind, Callable[[Cause, Gap, Explanation], str]] = {
    Kind.PREFILL: _prefill,
    Kind.OWN_PREFILL: _own_prefill,
    Kind.PREEMPTION: _preemption,
    Kind.ENGINE_RESTART: _engine_restart,
    Kind.DEVICE: _device,
    Kind.USUAL: _usual,
    Kind.ARRIVAL: lambda cause, gap, _: (
        f"until it was in the engine's queue (text to tokens, and the way): {milliseconds(cause.excess_ms)}"
    ),
    Kind.READER: lambda cause, gap, _: (
        f"the reader blocked: the message was made, but taken {milliseconds(cause.excess_ms)} late"
    ),
    Kind.SERVICE: lambda cause, gap, _: (
        f"the service was late: the token had been read from the device {milliseconds(cause.excess_ms)} before its "
        "message was made"
    ),
    Kind.QUEUE: lambda cause, gap, _: f"it waited in the queue: {milliseconds(cause.excess_ms)}",
    Kind.HOST_IDLE: lambda cause, gap, _: (
        f"the host: the device had nothing to do for {milliseconds(cause.excess_ms)} before "
        f"{_steps(cause) or 'the step'}"
    ),
    Kind.HOST_READ: lambda cause, gap, _: (
        f"the host: the step had ended on the device {milliseconds(cause.excess_ms)} before its tokens were read"
    ),
    Kind.OTHER_STEPS: lambda cause, gap, _: (
        f"steps that it was not in{f' ({_steps(cause)})' if cause.step_ids else ', which the trace lacks,'} came "
        f"before: {milliseconds(cause.excess_ms)}"
    ),
    Kind.UNKNOWN: lambda cause, gap, _: (
        f"{milliseconds(cause.excess_ms)} that this trace cannot explain: step {gap.step_id or '(unknown)'} is not in "
        "it"
    ),
}


def _against(cause: Cause, explanation: Explanation) -> str:
    return (
        f"{milliseconds(cause.step_ms)} against the usual {milliseconds(explanation.usual_step_ms)}, "
        f"{milliseconds(cause.excess_ms)} more"
    )


def _bound(cause: Cause) -> str:
    """Memory- or compute-bound, with the shares of the ceilings."""
    if cause.bound is None:
        return ""
    shares = [
        f"{share:.0%} of {name}"
        for share, name in ((cause.bandwidth_share, "bandwidth"), (cause.flops_share, "FLOP/s"))
        if share is not None
    ]
    known = [share for share in (cause.bandwidth_share, cause.flops_share) if share is not None]
    if known and max(known) < _FAR:
        return f" ({cause.bound}-bound by its work, but far from both ceilings: {', '.join(shares)})"
    return f" ({cause.bound}-bound{': ' if shares else ''}{', '.join(shares)})"


def _requests(prefills: tuple[Prefill, ...]) -> str:
    named = [f"{prefill.request_id} ({prefill.tokens:,} tokens)" for prefill in prefills[:_NAMED]]
    more = f" and {len(prefills) - _NAMED} more" if len(prefills) > _NAMED else ""
    return f"request{'s' if len(prefills) > 1 else ''} {', '.join(named)}{more}" if named else ""


def _steps(cause: Cause) -> str:
    ids = cause.step_ids
    if not ids:
        return ""
    if len(ids) == 1:
        return f"step {ids[0]}"
    return f"{len(ids)} steps, {ids[0]} to {ids[-1]}"


def milliseconds(ms: float | None) -> str:
    """Returns a duration as text with its unit."""
    if ms is None:
        return "unknown"
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    digits = 0 if ms >= 1000 else 1 if ms >= 100 else 2
    return f"{ms:,.{digits}f} ms"
