"""What a request must be whose outputs are chosen from more sequences than it returns.

Owns the rules of beam search and of the best n of several outputs, and what both cannot be combined
with. They concern several fields at once, so they are no rows of `rules`' table.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace_request import limits
from headrace_request.beam_search import BeamSearch
from headrace_request.request import Request
from headrace_request.rule_kinds import TOKEN_BYTES, Bounds, Range, Violation
from headrace_request.sampling import Sampling

NO_SAMPLING: Final = Sampling(temperature=0.0)
"""The sampling of a request with beams: nothing is drawn, and no logits are changed."""

_LENGTH_PENALTY: Final = Range(-limits.MAX_LENGTH_PENALTY, limits.MAX_LENGTH_PENALTY)
# In words that are no field: callers of each wire have their own.
_WITH_BEAMS: Final = "with beam search"
# Fields of `Sampling` that go by other names in headrace.v1; those of one name are one rule.
_NAMES: Final = {
    "logit_bias_ids": "spec.sampling.logit_bias",
    "logit_bias_values": "spec.sampling.logit_bias",
    "bad_words": "spec.stop.bad_words",
}


def check_selection(request: Request, bounds: Bounds) -> list[Violation]:
    """Returns every rule that a request's `best_of` and `beam_search` break; none without them."""
    found: list[Violation] = []
    if request.beam_search is not None:
        found += _check_beams(request, request.beam_search, bounds)
    if request.best_of and request.beam_search is not None:
        found.append(Violation("spec.best_of", f"must not be set {_WITH_BEAMS}, whose n best outputs are returned"))
    elif request.best_of:
        most = min(limits.MAX_BEST_OF, bounds.max_outputs)
        if not request.n <= request.best_of <= most:
            found.append(Violation("spec.best_of", f"must be at least n, {request.n}, and at most {most}"))
    return found


def _check_beams(request: Request, beams: BeamSearch, bounds: Bounds) -> list[Violation]:
    found: list[Violation] = []
    most = min(limits.MAX_BEAM_WIDTH, bounds.max_outputs)
    if not 1 <= beams.width <= most:
        found.append(Violation("spec.beam_search.width", f"must be at least 1 and at most {most}"))
    elif request.n > beams.width:
        found.append(Violation("spec.n", f"must be at most the width of the beam search, {beams.width}"))
    found += _LENGTH_PENALTY.broken("spec.beam_search.length_penalty", beams.length_penalty, bounds)
    found += _check_sampling(request.sampling)
    if request.structured_output is not None:
        found.append(Violation("spec.structured_output", f"must not be set {_WITH_BEAMS}"))
    if request.reasoning is not None and request.reasoning.max_tokens is not None:
        # A spent budget forces tokens, which no hypothesis is searched with.
        found.append(Violation("spec.max_reasoning_tokens", f"must not be set {_WITH_BEAMS}"))
    num_stops = len(request.stop.token_ids) // TOKEN_BYTES
    if num_stops > limits.MAX_BEAM_STOP_TOKENS:
        rule = f"must be at most {limits.MAX_BEAM_STOP_TOKENS} {_WITH_BEAMS}, the model's own among them"
        found.append(Violation("spec.stop.token_ids", f"{rule}; there are {num_stops}"))
    return found


def _check_sampling(sampling: Sampling) -> list[Violation]:
    """Returns a violation for each field that draws, or changes what is likely."""
    given, neutral = msgspec.structs.asdict(sampling), msgspec.structs.asdict(NO_SAMPLING)
    names = [_NAMES.get(name, f"spec.sampling.{name}") for name in given if given[name] != neutral[name]]
    return [Violation(name, _sampling_rule(name)) for name in dict.fromkeys(names)]


def _sampling_rule(name: str) -> str:
    if name == "spec.sampling.temperature":
        return f"must be 0, or unset, {_WITH_BEAMS}, which draws nothing"
    return f"must not be set {_WITH_BEAMS}"
