"""POST /v1/completions: its fields, and the prompts in them."""

from __future__ import annotations

from typing import Any

from headrace.v1 import generation_pb2
from headrace_service import errors
from headrace_service.openai.requests import generation_spec
from headrace_service.openai.requests.shared_fields import U32, SharedFields

# OpenAI's own default, on which its clients rely.
_DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
_MAX_TOKEN_ID = (1 << 32) - 1

Prompt = str | list[int]


class CompletionRequest(SharedFields, frozen=True, kw_only=True):
    """The fields of one request."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: U32 | None = None
    best_of: U32 | None = None

    @property
    def only_scores(self) -> bool:
        """Whether the prompt alone is wanted, with its log probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def spec(self) -> generation_pb2.GenerationSpec:
        """Returns what is asked for each prompt, without the prompt.

        Raises:
            ServiceError: INVALID_ARGUMENT; a value that no field of the spec holds.
        """
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        # One token is computed where none is wanted: the least that the engine does.
        spec = generation_spec.spec_of(self, 1 if self.only_scores else max_tokens, "max_tokens")
        if self.best_of is not None:
            spec.best_of = self.best_of
        if self.logprobs is not None:
            spec.logprobs = self.logprobs
            if self.echo:
                spec.prompt_logprobs = self.logprobs
        return spec

    @property
    def names(self) -> dict[str, str]:
        """What fields of GenerationSpec are called in this request."""
        return {**generation_spec.NAMES, **generation_spec.names_of_form(self)}

    def prompts(self) -> list[Prompt]:
        """Returns the prompts: texts, or token ids.

        Raises:
            ServiceError: INVALID_ARGUMENT; none, too many, or none of the four forms.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [_checked(prompt, "prompt")]
        if not prompt:
            raise errors.invalid_field("prompt", "must not be empty")
        if all(type(token) is int for token in prompt):
            return [_checked(prompt, "prompt")]
        if len(prompt) > MAX_PROMPTS:
            raise errors.invalid_field("prompt", f"must have at most {MAX_PROMPTS} prompts")
        return [_checked(one, f"prompt[{index}]") for index, one in enumerate(prompt)]


def _checked(prompt: Any, field: str) -> Prompt:
    if isinstance(prompt, str):
        if not prompt:
            raise errors.invalid_field(field, "must not be empty")
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise errors.invalid_field(
            "prompt", "must be a string, a list of strings, token ids, or a list of lists of those"
        )
    if not prompt:
        raise errors.invalid_field(field, "must give at least 1 token")
    for index, token in enumerate(prompt):
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise errors.invalid_field(f"{field}[{index}]", f"must be at least 0 and at most {_MAX_TOKEN_ID}")
    return prompt
