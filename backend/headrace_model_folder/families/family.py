"""What a family of models is: names, defaults, and the way from its fields to a description."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.fields import Fields
from headrace_model_folder.text_part import TextPart


@dataclasses.dataclass(frozen=True, slots=True)
class GgufNaming:
    """How GGUF files hold models of a family."""

    # Value of general.architecture, and prefix of the family's keys.
    name: str
    # Whether the two elements that are rotated together follow each other in the rows of queries
    # and keys, where a Hugging Face folder has them half a head apart.
    alternates: bool = False
    # Whether layers have experts, all of a layer in one tensor; None: those of some models. Of two
    # families of one name it is the one with experts whose files state a number of them.
    has_experts: bool | None = False
    # Whether experts are chosen by sigmoid scores, whose files state more of them.
    has_sigmoid_scores: bool = False
    # Whether layers may have other numbers of heads, or other widths, than each other.
    has_varied_layers: bool = False
    # Architecture of files that state a sliding window; "": the family's own.
    windowed: str = ""
    # What files call the norm that folders call post_attention_layernorm.
    post_attention: str = "ffn_norm"
    # Whether files have the factors of norms themselves, where folders have what they are above 1.
    has_whole_factors: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One value of config.json's `architectures`."""

    architecture: str
    # What `transformers` assumes for fields that config.json leaves out. A null in the file means
    # null, so these fill only what is absent.
    defaults: Mapping[str, Any]
    # Called with the fields of config.json, defaults filled in. Raises InvalidModelFolder naming
    # the field, the rule and the value.
    describe: Callable[[Fields], ModelDescription]
    # The field that names the activation of MLPs, and its values that mean what the family has; the
    # first is transformers' default.
    activation_field: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    # Where the text part lies in a folder that has other parts too; None: it is the whole.
    text_part: TextPart | None = None
    # Fields of `families.foreign_fields` that the family reads, or whose meaning its layers have.
    knows: frozenset[str] = frozenset()
    # None: GGUF files of the family say that they are another one's.
    gguf: GgufNaming | None = None
