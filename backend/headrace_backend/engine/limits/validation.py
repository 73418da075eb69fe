"""Checks every field of a request again, before the engine believes any of it.

Owns rules and limits of the request alone. Does not look at the engine's state (`admission`). The
services validate first; this is the same gate for whatever else reaches the socket. Violations name
fields as the public API does, since the message goes to its caller.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable

import numpy as np

from headrace_backend.engine.errors import RequestRefused, Violation
from headrace_backend.engine.request import (
    EngineRequest,
    ModelLimits,
    SamplingSpec,
    StopSpec,
    TenantLimits,
    TokenIds,
)
from headrace_request import limits

# As the wire has them: 0.01 itself is allowed.
_MIN_TEMPERATURE = float(np.float32(limits.MIN_TEMPERATURE))
_MIN_REPETITION_PENALTY = float(np.float32(limits.MIN_REPETITION_PENALTY))

_REQUEST_ID = re.compile(limits.REQUEST_ID_PATTERN)


class RequestValidator:
    """The rules for one model and configuration."""

    def __init__(self, model: ModelLimits, max_outputs: int, has_text: bool) -> None:
        """Rules for a model; `has_text`: the bytes of its tokens are known, so that stop strings
        can be matched.
        """
        self._model = model
        self._max_outputs = max_outputs
        self._has_text = has_text

    def check(self, request: EngineRequest) -> None:
        """Accepts a request.

        Raises:
            RequestRefused: INVALID_ARGUMENT with every rule broken.
        """
        violations = _Violations()
        self._check_identity(request, violations)
        self._check_prompt(request, violations)
        self._check_sampling(request.sampling, violations)
        self._check_stop(request.stop, len(request.prompt_ids), violations)
        self._check_emitted(request, violations)
        self._check_limits(request.limits, violations)
        violations.require(1 <= request.n <= self._max_outputs, "spec.n", f"must be 1 to {self._max_outputs}")
        violations.require(
            -1 <= request.num_logprobs <= limits.MAX_LOGPROBS, "spec.logprobs", f"must be 0 to {limits.MAX_LOGPROBS}"
        )
        violations.require(
            -1 <= request.num_prompt_logprobs <= limits.MAX_LOGPROBS,
            "spec.prompt_logprobs",
            f"must be 0 to {limits.MAX_LOGPROBS}",
        )
        violations.require(
            abs(request.priority) <= limits.MAX_PRIORITY,
            "spec.priority",
            f"must be -{limits.MAX_PRIORITY} to {limits.MAX_PRIORITY}",
        )
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
            len(request.cache_salt) <= limits.MAX_CACHE_SALT_BYTES,
            "spec.cache_salt",
            f"must be at most {limits.MAX_CACHE_SALT_BYTES} bytes",
        )
        require(
            len(request.idempotency_key.encode()) <= limits.MAX_IDEMPOTENCY_KEY_BYTES,
            "idempotency_key",
            f"must be at most {limits.MAX_IDEMPOTENCY_KEY_BYTES} bytes",
        )
        require(request.service_ns >= 0, "service_ns", "must not be negative")

    def _check_prompt(self, request: EngineRequest, violations: _Violations) -> None:
        length, limit = len(request.prompt_ids), self._model.max_model_len
        field = "spec.token_ids"
        if length == 0:
            violations.add(field, "must not be empty")
        elif length >= limit:
            violations.add(field, f"has {length} tokens; with one token of output at most {limit} fit the context")
        else:
            self._check_ids(request.prompt_ids, field, violations)

    def _check_ids(self, ids: TokenIds, field: str, violations: _Violations) -> None:
        """As unsigned numbers, so that one comparison finds negative ids too."""
        vocab_size = self._model.vocab_size
        if ids.dtype != np.int32 or ids.ndim != 1:
            violations.add(field, "must be one column of 32-bit token ids")
        elif ids.size and int(ids.view(np.uint32).max()) >= vocab_size:
            violations.add(field, f"ids must be below the vocabulary size, {vocab_size}")

    def _check_sampling(self, sampling: SamplingSpec, violations: _Violations) -> None:
        require, vocab_size = violations.require, self._model.vocab_size
        temperature = sampling.temperature
        require(
            temperature == 0 or _MIN_TEMPERATURE <= temperature <= limits.MAX_TEMPERATURE,
            "spec.sampling.temperature",
            f"must be 0 (greedy), or {_MIN_TEMPERATURE:g} to {limits.MAX_TEMPERATURE:g}",
        )
        require(0 < sampling.top_p <= 1, "spec.sampling.top_p", "must be above 0, and at most 1")
        require(
            -1 <= sampling.top_k <= vocab_size,
            "spec.sampling.top_k",
            f"must be -1 to the vocabulary size, {vocab_size}",
        )
        require(0 <= sampling.min_p <= 1, "spec.sampling.min_p", "must be 0 to 1")
        require(
            _MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= limits.MAX_REPETITION_PENALTY,
            "spec.sampling.repetition_penalty",
            f"must be {_MIN_REPETITION_PENALTY:g} to {limits.MAX_REPETITION_PENALTY:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(sampling, name)
            require(
                abs(value) <= limits.MAX_PENALTY,
                f"spec.sampling.{name}",
                f"must be -{limits.MAX_PENALTY:g} to {limits.MAX_PENALTY:g}",
            )
        require(0 <= sampling.seed < 2**64, "spec.sampling.seed", "must be 0 to 2^64 - 1")
        self._check_logit_bias(sampling, violations)
        self._check_bad_words(sampling.bad_words, violations)

    def _check_logit_bias(self, sampling: SamplingSpec, violations: _Violations) -> None:
        field = "spec.sampling.logit_bias"
        if len(sampling.logit_bias_ids) % 4 or len(sampling.logit_bias_ids) != len(sampling.logit_bias_values):
            violations.add(field, "ids and values must be columns of the same length")
            return
        ids, values = array("I", sampling.logit_bias_ids), array("f", sampling.logit_bias_values)
        violations.require(
            len(ids) <= limits.MAX_LOGIT_BIAS, field, f"must have at most {limits.MAX_LOGIT_BIAS} entries"
        )
        violations.require(len(set(ids)) == len(ids), field, "must not name an id twice")
        violations.require(
            max(ids, default=0) < self._model.vocab_size,
            field,
            f"ids must be below the vocabulary size, {self._model.vocab_size}",
        )
        violations.require(
            all(math.isfinite(v) and abs(v) <= limits.MAX_BIAS for v in values),
            field,
            f"values must be -{limits.MAX_BIAS:g} to {limits.MAX_BIAS:g}",
        )

    def _check_bad_words(self, words: tuple[tuple[int, ...], ...], violations: _Violations) -> None:
        field = "spec.stop.bad_words"
        violations.require(
            len(words) <= limits.MAX_BAD_WORD_SEQUENCES,
            field,
            f"must be at most {limits.MAX_BAD_WORD_SEQUENCES} token sequences",
        )
        violations.require(
            all(1 <= len(word) <= limits.MAX_BAD_WORD_TOKENS for word in words),
            field,
            f"must have 1 to {limits.MAX_BAD_WORD_TOKENS} tokens each",
        )
        self._require_ids((token for word in words for token in word), field, violations)

    def _check_stop(self, stop: StopSpec, prompt_length: int, violations: _Violations) -> None:
        require = violations.require
        room = self._model.max_model_len - prompt_length
        if stop.max_tokens < 1:
            violations.add("spec.stop.max_tokens", "must be at least 1")
        elif stop.max_tokens > room > 0:
            violations.add(
                "spec.stop.max_tokens",
                f"prompt ({prompt_length}) and max_tokens ({stop.max_tokens}) exceed the context, {self._model.max_model_len} tokens",
            )
        require(0 <= stop.min_tokens <= max(stop.max_tokens, 0), "spec.stop.min_tokens", "must be 0 to max_tokens")
        require(
            self._has_text or not stop.strings,
            "spec.stop.strings",
            "can't be used: the text of the model's tokens is not known",
        )
        require(
            len(stop.strings) <= limits.MAX_STOP_STRINGS,
            "spec.stop.strings",
            f"must be at most {limits.MAX_STOP_STRINGS}",
        )
        require(
            all(1 <= len(string) <= limits.MAX_STOP_STRING_BYTES for string in stop.strings),
            "spec.stop.strings",
            f"must have 1 to {limits.MAX_STOP_STRING_BYTES} bytes each",
        )
        num_own = len(stop.token_ids.difference(self._model.eos_token_ids))
        require(
            num_own <= limits.MAX_STOP_TOKEN_IDS, "spec.stop.token_ids", f"must be at most {limits.MAX_STOP_TOKEN_IDS}"
        )
        self._require_ids(stop.token_ids, "spec.stop.token_ids", violations)

    def _check_emitted(self, request: EngineRequest, violations: _Violations) -> None:
        emitted = request.emitted
        if not emitted:
            return
        require = violations.require
        require(len(emitted) == request.n, "emitted", "must have one entry per output, or none")
        require(
            request.num_logprobs < 0 and request.num_prompt_logprobs < 0,
            "emitted",
            "can't be continued with log probabilities, which are not known any more",
        )
        require(
            all(len(tokens) < request.stop.max_tokens for tokens in emitted),
            "emitted",
            "must be shorter than max_tokens",
        )
        for tokens in emitted:
            self._check_ids(tokens, "emitted", violations)

    def _require_ids(self, ids: Iterable[int], field: str, violations: _Violations) -> None:
        vocab_size = self._model.vocab_size
        violations.require(
            all(0 <= token < vocab_size for token in ids), field, f"ids must be below the vocabulary size, {vocab_size}"
        )


class _Violations:
    """Broken rules in the order found.

    A comparison with NaN is false, so a rule stated as what must hold refuses NaN too.
    """

    def __init__(self) -> None:
        """None yet."""
        self.found: list[Violation] = []

    def add(self, field: str, rule: str) -> None:
        """A rule is broken."""
        self.found.append(Violation(field, rule))

    def require(self, holds: bool, field: str, rule: str) -> None:
        """A rule that must hold."""
        if not holds:
            self.add(field, rule)
