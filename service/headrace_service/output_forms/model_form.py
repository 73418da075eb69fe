"""How a model writes calls and reasoning, by its folder: its chat template and its tokens.

Owns the table of formats. A format that no template names is none: whoever knows better says so
(`--tool-format`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from headrace_request.reasoning import Reasoning as Section
from headrace_service.output_forms import gemma, harmony, harmony_grammar, hermes, llama, mistral
from headrace_service.output_forms.call_format import Spelling, Tool, ToolUse
from headrace_service.output_forms.output_plan import KnownTool, OutputPlan
from headrace_service.output_forms.parts import Calls, Part
from headrace_service.output_forms.plain import AnswerReader, PlainReader
from headrace_service.output_forms.tagged import arguments, glm, qwen_coder
from headrace_service.output_forms.tagged.reader import TaggedReader


def _holds_all(tool: Tool) -> str:
    """Says of formats with JSON in them that grammars hold whatever schemas say."""
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Format:
    """A format of calls.

    Attributes:
        markers: those that may be special tokens of the model.
        signs: what a chat template has if its model writes so; one of them suffices.
        grammar: of an output, from its tools and the special tokens that markers are.
        why_not_strict: what in a tool's schema no grammar of it can hold; "": nothing.
    """

    markers: Sequence[str]
    signs: Sequence[str]
    grammar: Callable[[ToolUse, Mapping[str, int]], str]
    why_not_strict: Callable[[Tool], str] = _holds_all


# In the order in which templates are looked through: the first that fits counts.
_FORMATS: Final[Mapping[str, _Format]] = {
    "seed-oss": _Format(
        qwen_coder.SEED_MARKERS, qwen_coder.SEED_MARKERS, qwen_coder.seed_grammar, arguments.why_not_strict
    ),
    "qwen3-coder": _Format(qwen_coder.MARKERS, ("<function=",), qwen_coder.grammar, arguments.why_not_strict),
    "glm": _Format(glm.MARKERS, (glm.KEY,), glm.grammar, arguments.why_not_strict),
    "hermes": _Format(hermes.MARKERS, (hermes.OPEN,), hermes.grammar),
    "mistral": _Format(mistral.MARKERS, (mistral.OPEN,), mistral.grammar),
    "llama3-json": _Format(llama.MARKERS, (llama.TAG, '{"name": function name, "parameters"'), llama.grammar),
    "gemma4": _Format(gemma.MARKERS, (gemma.OPEN,), gemma.grammar, gemma.why_not_strict),
}
# Those whose readers know by the tools which values are text, and these readers.
_WITH_TEXTS: Final[Mapping[str, type[TaggedReader]]] = {
    "glm": glm.GlmReader,
    "qwen3-coder": qwen_coder.QwenCoderReader,
    "seed-oss": qwen_coder.SeedReader,
}
_HARMONY: Final = "harmony"
NAMES: Final = (_HARMONY, *_FORMATS)
# The variable of a template that says how much the model is to reason.
_EFFORT: Final = "reasoning_effort"
# Markers of reasoning, by which templates name them.
_REASONING: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought\n", "<channel|>"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelForm:
    """What outputs of a model's conversations are made of.

    Attributes:
        call_format: how it writes calls; "": it takes no tools.
        why_no_tools: what is missing where it takes none.
        special_markers: the markers that are special tokens, and no text therefore, with their ids.
        reasoning: markers that begin and end reasoning; None: it has none, or channels.
        section: a section of reasoning as the engine knows it, without a budget; None: it has none.
        has_channels: whether its outputs are messages of harmony.
        takes_effort: whether its template says how much the model is to reason.
    """

    call_format: str
    why_no_tools: str
    special_markers: Mapping[str, int]
    reasoning: tuple[str, str] | None
    section: Section | None
    has_channels: bool = False
    takes_effort: bool = False

    @staticmethod
    def of(
        template: str | None,
        encode: Callable[[str], Sequence[int]],
        special_ids: Collection[int],
        wanted: str = "auto",
    ) -> ModelForm:
        """Returns what a folder says.

        Args:
            template: its chat template; None: it has none.
            encode: the tokens of a text, none added.
            special_ids: tokens that are no text.
            wanted: the format that the operator names; "auto": the template's; "off": none.
        """
        template = template or ""
        if wanted == _HARMONY or (wanted in ("auto", "off") and harmony.CHANNEL in template):
            return _of_channels(template, encode, special_ids, wanted)
        name, why = _call_format(template, wanted)
        reasoning = next((pair for pair in _REASONING if pair[1] in template), None)
        # A channel's marker may be a special token, its name is text.
        begun_by = [marker.partition("thought")[0] for marker in reasoning or ()]
        markers = [*(_FORMATS[name].markers if name else ()), *begun_by]
        tokens = {marker: tuple(encode(marker)) for marker in markers}
        section = Section(tuple(encode(reasoning[0])), tuple(encode(reasoning[1]))) if reasoning else None
        special = _special(tokens, special_ids)
        return ModelForm(name, why, special, reasoning, section, takes_effort=_EFFORT in template)

    def plan(self, tools: Sequence[Tool], begins_inside: bool, within_channel: str = "") -> OutputPlan | None:
        """Returns how outputs with these tools are read; None: they are text alone.

        Args:
            tools: those that the model is shown.
            begins_inside: whether the prompt ends within reasoning.
            within_channel: the channel of the message of harmony in which it ends; "": in none.
        """
        if not tools and self.section is None:
            return None
        special = sorted((token, marker) for marker, token in self.special_markers.items())
        return OutputPlan(
            call_format=self.call_format if tools else "",
            tools=tuple(KnownTool(tool.name, self._text_parameters(tool)) for tool in tools),
            special_markers=tuple(special),
            reasoning=self.reasoning,
            begins_inside=begins_inside,
            has_channels=self.has_channels,
            within_channel=within_channel,
        )

    def grammar(self, use: ToolUse, within_channel: str = "", max_reasoning_tokens: int | None = None) -> str:
        """Returns the grammar, in Lark's notation, of outputs that call these tools.

        Args:
            use: the tools, and whether they are called.
            within_channel: the channel of the message of harmony in which the prompt ends.
            max_reasoning_tokens: in harmony, whose grammar has the reasoning in it, its budget.
        """
        if self.has_channels:
            return harmony_grammar.of_calls(use, self.special_markers, within_channel, max_reasoning_tokens)
        return _FORMATS[self.call_format].grammar(use, self.special_markers)

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """The tokens with which the format ends an output, beside the model's own end-of-text."""
        return tuple(self.special_markers[marker] for marker in harmony.LAST) if self.has_channels else ()

    def around_answer(self, within_channel: str, max_reasoning_tokens: int | None) -> str:
        """Returns the grammar of outputs in which an answer has a form of its own.

        "": nothing stands around an answer but the section of reasoning that the engine knows.
        """
        if not self.has_channels:
            return ""
        return harmony_grammar.of_answer(self.special_markers, within_channel, max_reasoning_tokens)

    def why_not_strict(self, tool: Tool) -> str:
        """Returns what in a tool's schema no grammar of the format can hold; "": nothing."""
        return _FORMATS[self.call_format].why_not_strict(tool) if self.call_format in _FORMATS else ""

    def _text_parameters(self, tool: Tool) -> tuple[str, ...]:
        return tuple(sorted(arguments.text_parameters(tool))) if self.call_format in _WITH_TEXTS else ()


def answer_reader(
    plan: OutputPlan, parts: list[Part], calls: Calls, spelling: Spelling, is_after_marker: bool
) -> AnswerReader:
    """Returns the reader of an answer; a later version's format, which none can read, is text.

    Args:
        plan: what to look for.
        parts: where parts are appended.
        calls: takes the calls.
        spelling: of markers.
        is_after_marker: whether whitespace at the beginning belongs to something else.
    """
    if (with_texts := _WITH_TEXTS.get(plan.call_format)) is not None:
        texts = {tool.name: frozenset(tool.text_parameters) for tool in plan.tools}
        return with_texts(parts, calls, spelling, is_after_marker, texts)
    match plan.call_format:
        case "hermes":
            return hermes.HermesReader(parts, calls, spelling, is_after_marker)
        case "llama3-json":
            return llama.LlamaReader(parts, calls, spelling, is_after_marker)
        case "mistral":
            return mistral.MistralReader(parts, calls, spelling, is_after_marker)
        case "gemma4":
            return gemma.GemmaReader(parts, calls, spelling, is_after_marker)
    return PlainReader(parts, is_after_marker)


def _of_channels(
    template: str, encode: Callable[[str], Sequence[int]], special_ids: Collection[int], wanted: str
) -> ModelForm:
    """Returns the form of a model that writes harmony; text alone where it lacks the tokens."""
    special = _special({marker: tuple(encode(marker)) for marker in harmony.MARKERS}, special_ids)
    takes_effort = _EFFORT in template
    lacking = next((marker for marker in harmony.MARKERS if marker not in special), None)
    if lacking is not None:
        why = f"harmony needs the special token {lacking}, which the model's tokenizer lacks"
        return ModelForm("", why, {}, None, None, takes_effort=takes_effort)
    why = _why_no_tools(template, wanted)
    section = harmony.section(encode)
    name = "" if why else _HARMONY
    return ModelForm(name, why, special, None, section, has_channels=True, takes_effort=takes_effort)


def _special(tokens: Mapping[str, Sequence[int]], special_ids: Collection[int]) -> dict[str, int]:
    """Returns the markers that are one special token, with their ids."""
    return {marker: ids[0] for marker, ids in tokens.items() if len(ids) == 1 and ids[0] in special_ids}


def _call_format(template: str, wanted: str) -> tuple[str, str]:
    """Returns the format of a template, or why there is none."""
    why = _why_no_tools(template, wanted)
    if why:
        return "", why
    for name, form in _FORMATS.items():
        if name == wanted or (wanted == "auto" and any(sign in template for sign in form.signs)):
            return name, ""
    return "", "the model's chat template names no format of calls that this server knows; tool_format can name one"


def _why_no_tools(template: str, wanted: str) -> str:
    """Returns why no format of calls is looked for; "": it is."""
    if wanted == "off":
        return "the server was started with tool_format off"
    if not template:
        return "the model's folder has no chat template"
    return "" if "tools" in template else "the model's chat template does not show tools"
