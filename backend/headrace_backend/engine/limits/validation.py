"""Checks every field of a request again, before the engine believes any of it.

Owns what only the engine receives: identities, limits of a tenant, tokens that an earlier attempt
emitted. What the caller asked for is checked by the rules that services check it by
(`headrace_request.rules`); this is the same gate for whatever else reaches the socket. Does not
look at the engine's state (`admission`). Violations name fields as the public API does, since the
message goes to its caller.
"""

from __future__ import annotations

import re

from headrace_backend.engine.errors import RequestRefused, Violation
from headrace_backend.engine.events import LogprobColumns
from headrace_backend.engine.request import EngineRequest, ModelLimits, TenantLimits
from headrace_request import limits, rules
from headrace_request.rule_kinds import Bounds, TokenIds

_REQUEST_ID = re.compile(limits.REQUEST_ID_PATTERN)
_PROMPT = "spec.token_ids"
_EMITTED = TokenIds()


class RequestValidator:
    """The rules for one model and configuration."""

    def __init__(self, model: ModelLimits, max_outputs: int, has_text: bool) -> None:
        """Makes the rules for a model.

        `has_text` says that the bytes of its tokens are known, so that stop strings can be matched.
        """
        # Whether drafts may be asked for is for services to say: what another engine took goes on
        # here, where the number is only a limit.
        self._bounds = Bounds(
            model.vocab_size, model.max_model_len, max_outputs, frozenset(model.eos_token_ids), limits.MAX_DRAFTS
        )
        self._has_text = has_text

    def check(self, request: EngineRequest) -> None:
        """Accepts a request.

        Raises:
            RequestRefused: INVALID_ARGUMENT with every rule broken.
        """
        violations = _Violations()
        self._check_identity(request, violations)
        violations.found += rules.check_prompt(request.asked, self._bounds, _PROMPT)
        violations.found += rules.check(request.asked, self._bounds)
        violations.require(
            self._has_text or not request.asked.stop.strings,
            "spec.stop.strings",
            "can't be used: the text of the model's tokens is not known",
        )
        self._check_emitted(request, violations)
        self._check_logprobs(request, violations)
        self._check_earlier(request, violations)
        self._check_limits(request.limits, violations)
        if violations.found:
            raise RequestRefused.invalid(violations.found)

    def check_limits(self, tenant_limits: TenantLimits) -> None:
        """Accepts limits that come without a request.

        Raises:
            RequestRefused: INVALID_ARGUMENT with every rule broken.
        """
        violations = _Violations()
        self._check_limits(tenant_limits, violations)
        if violations.found:
            raise RequestRefused.invalid(violations.found)

    def _check_limits(self, tenant_limits: TenantLimits, violations: _Violations) -> None:
        for name in ("requests_per_minute", "concurrent_streams", "tokens_per_minute"):
            violations.require(
                getattr(tenant_limits, name) >= 0, f"limits.{name}", "must be 0 (no limit), or the number allowed"
            )
        violations.require(
            0 <= tenant_limits.kv_cache_share <= 1,
            "limits.kv_cache_share",
            "must be 0 (no limit), or a share above 0 and at most 1",
        )

    def _check_identity(self, request: EngineRequest, violations: _Violations) -> None:
        require = violations.require
        require(_REQUEST_ID.fullmatch(request.request_id) is not None, "request_id", "must be 1 to 64 of [A-Za-z0-9_-]")
        require(
            len(request.tenant.encode()) <= limits.MAX_TENANT_BYTES,
            "tenant",
            f"must be at most {limits.MAX_TENANT_BYTES} bytes",
        )
        require(
            len(request.idempotency_key.encode()) <= limits.MAX_IDEMPOTENCY_KEY_BYTES,
            "idempotency_key",
            f"must be at most {limits.MAX_IDEMPOTENCY_KEY_BYTES} bytes",
        )
        require(request.service_ns >= 0, "service_ns", "must not be negative")

    def _check_emitted(self, request: EngineRequest, violations: _Violations) -> None:
        emitted = request.emitted
        if not emitted:
            return
        require = violations.require
        ended = {end.output_index for end in request.ends}
        require(
            len(ended) < len(emitted) or request.detached,
            "emitted",
            "must have an output that did not end, unless the request is detached",
        )
        require(len(emitted) == request.asked.n, "emitted", "must have one entry per output, or none")
        require(
            request.asked.num_prompt_logprobs < 0 or _reported(request) == max(1, len(request.prompt_ids)),
            "emitted",
            "can't be continued without all log probabilities of the prompt, which come before all tokens",
        )
        most = request.asked.stop.max_tokens
        # An output that was chosen is emitted whole before its end.
        require(
            all(len(tokens) < most + (index in ended or request.asked.selects) for index, tokens in enumerate(emitted)),
            "emitted",
            "must be shorter than max_tokens, or as long where the output ended",
        )
        for tokens in emitted:
            violations.found += _EMITTED.broken("emitted", tokens.tobytes(), self._bounds)

    def _check_logprobs(self, request: EngineRequest, violations: _Violations) -> None:
        """Checks the log probabilities that an earlier attempt reported."""
        require, asked = violations.require, request.asked
        most = min(asked.num_logprobs, self._bounds.vocabulary_size)
        for index, columns in enumerate(request.emitted_logprobs):
            if columns is not None:
                field, count = f"emitted[{index}].logprobs", len(request.emitted[index])
                require(len(columns) == count, field, f"must have {count} entries, one for each token")
                self._check_columns(columns, most, field, violations)
        if not request.prompt_logprobs:
            return
        field = "prompt_logprobs"
        require(request.detached and asked.num_prompt_logprobs >= 0, field, "must be asked for by a detached request")
        starts = [part.first_token_index for part in request.prompt_logprobs]
        ends = [1, *(part.end for part in request.prompt_logprobs)]
        require(starts == ends[:-1], field, "must have parts in order and without gaps, from position 1 on")
        require(ends[-1] <= len(request.prompt_ids), field, "must end where the prompt ends, or before")
        for part in request.prompt_logprobs:
            most = min(asked.num_prompt_logprobs, self._bounds.vocabulary_size)
            self._check_columns(part.columns, most, field, violations)

    def _check_columns(self, columns: LogprobColumns, most: int, field: str, violations: _Violations) -> None:
        """Checks that each token has at most so many top entries, of tokens that the model has."""
        asked_for = max(columns.top_counts, default=0) <= most and most >= 0
        violations.require(asked_for, field, "must have as many top entries as the request asks for, or fewer")
        known = max(columns.top_token_ids, default=0) < self._bounds.vocabulary_size
        violations.require(known, field, f"must have top entries of tokens below {self._bounds.vocabulary_size}")

    def _check_earlier(self, request: EngineRequest, violations: _Violations) -> None:
        if request.earlier is None:
            return
        done = request.earlier.done
        violations.require(
            request.detached and bool(request.emitted), "earlier", "must not be set unless detached and emitted are"
        )
        parts_ns = done.prefill_ns + done.decode_ns + done.preempted_ns + done.engine_restart_ns
        violations.require(
            request.has_ended or (parts_ns <= request.service_ns and done.ttft_ns <= request.service_ns),
            "earlier",
            "must have parts that add up to service_ns at most",
        )


def _reported(request: EngineRequest) -> int:
    """Returns the position up to which an earlier attempt reported the prompt."""
    return request.prompt_logprobs[-1].end if request.prompt_logprobs else 1


class _Violations:
    """Broken rules in the order found.

    A comparison with NaN is false, so a rule stated as what must hold refuses NaN too.
    """

    def __init__(self) -> None:
        """None yet."""
        self.found: list[Violation] = []

    def add(self, field: str, rule: str) -> None:
        """Adds a broken rule."""
        self.found.append(Violation(field, rule))

    def require(self, holds: bool, field: str, rule: str) -> None:
        """Adds the rule as broken unless it holds."""
        if not holds:
            self.add(field, rule)
