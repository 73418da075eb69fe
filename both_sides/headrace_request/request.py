"""One request, as a service asks the engine for it.

Owns the struct and its byte form on the way from service to engine: msgpack, by the order of
fields. Does not own what a service and an engine say about a request beside it (whose it is, when
it must end, how it is traced): protos/headrace_engine/v1/engine.proto.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from headrace_request.beam_search import BeamSearch
from headrace_request.reasoning import Reasoning
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop
from headrace_request.structured_output import StructuredOutput


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prompt and what is wanted of it. Every value is resolved."""

    # Token ids, uint32 little-endian. At least 1, and room for one of output in the context.
    prompt_token_ids: bytes
    stop: Stop
    sampling: Sampling = Sampling()
    # Outputs. 1 to 128, or to what the engine is configured for.
    n: int = 1
    # Most likely tokens reported beside each sampled one, 0 to 20; -1: no log probabilities.
    num_logprobs: int = -1
    # The same of each token of the prompt.
    num_prompt_logprobs: int = -1
    # Higher runs first. -100 to 100.
    priority: int = 0
    # Salt of the prefix cache; tenants are salted apart besides. At most 256 bytes.
    cache_salt: bytes = b""
    # Most drafted tokens that a step verifies for an output, 0 (no speculation) to 8; -1: as many
    # as the server has. More than 0 wants a server that drafts.
    max_drafts: int = -1
    # The form that each output must have; None: any text.
    structured_output: StructuredOutput | None = None
    # Outputs that are computed, of which the n with the largest mean log probability are reported
    # at the end. n to 20; 0: as many as n, reported as they come.
    best_of: int = 0
    # Search for the n most likely outputs; None: outputs are sampled.
    beam_search: BeamSearch | None = None
    # How the model reasons before it answers; None: it does not, or nobody needs to know.
    reasoning: Reasoning | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed for the n outputs."""
        if self.beam_search is not None:
            return self.beam_search.width
        return self.best_of or self.n

    @property
    def selects(self) -> bool:
        """Whether the outputs are known at the end alone, because they are chosen then."""
        return self.beam_search is not None or self.best_of > self.n

    @property
    def num_row_logprobs(self) -> int:
        """Most likely tokens that a worker reports at each token of a row; -1: none at all.

        Of a hypothesis as many as the search is wide and as many as may end it: so that many
        continue each of them, whatever ends the others.
        """
        if self.beam_search is None:
            return max(self.num_logprobs, 0) if self.selects else self.num_logprobs
        return max(self.num_logprobs, self.beam_search.width + len(self.stop.token_ids) // 4)

    def encode(self) -> bytes:
        """Returns the bytes that `decode` reads."""
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes) -> Request:
        """Reads what `encode` wrote, perhaps in another process.

        Raises:
            ValueError: The bytes are no request; the text says where.
        """
        try:
            return _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Request)


def _layout(*structs: type[msgspec.Struct]) -> str:
    """Returns a digest of the structs' fields, with their order and types."""
    described = [(struct.__name__, list(struct.__annotations__.items())) for struct in structs]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


LAYOUT: Final = _layout(Request, Stop, Sampling, StructuredOutput, BeamSearch, Reasoning)
"""Names the byte form. Two processes with different ones would misread each other's requests: they
compare it when they connect.
"""
