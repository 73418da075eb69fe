"""The fields that chat completions and completions share, with their types.

Owns names and types: OpenAI's own, and the extra ones that vLLM's clients send for sampling. What
a field must be beyond its type is `validation`'s to say, which every wire uses; which fields this
server cannot honour, `unsupported`'s.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
I32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream says besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of request. None: not given, as null is."""

    model: str | None = None
    n: U32 | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Names of vLLM's for what OpenAI's API does not have.
    top_k: I32 | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    repetition_penalty: float | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[U32] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    priority: I32 | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    # The form of outputs: OpenAI's name, then vLLM's newer and older ones.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def wants_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that have a value; null is as absent, as clients mean it."""
    return {name: value for name, value in values.items() if value is not None}
