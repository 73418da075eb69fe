"""What a conversation's prompt means for its outputs.

Owns what is looked for in them, the form that calls of its tools must have, and whether they begin
within reasoning. Formats and their grammars are `output_forms`'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from headrace_request import limits
from headrace_request.structured_output import StructuredOutput
from headrace_service import errors
from headrace_service.generations.conversation import Conversation
from headrace_service.generations.engine_request import Prompt
from headrace_service.generations.tools import Offered
from headrace_service.output_forms import harmony
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.streams.render_state import FORM_OF_TOOLS
from headrace_service.text.text_model import TextModel
from headrace_service.text.tokenization import TokenIds


def prompt_of(token_ids: TokenIds, text: str, conversation: Conversation, model: TextModel) -> Prompt:
    """Returns a conversation's prompt, with what follows from it for outputs.

    Args:
        token_ids: the prompt.
        text: as the template wrote it.
        conversation: what was asked.
        model: its model.

    Raises:
        ServiceError: INVALID_ARGUMENT, the tools are more than a grammar may have.
    """
    form, offered = model.form, conversation.offered
    channel = harmony.channel_within(text) if form.has_channels else ""
    inside = channel == "analysis" or _ends_inside(text, conversation, form)
    reasoning = None if form.section is None else msgspec.structs.replace(form.section, begins_inside=inside)
    return Prompt(
        token_ids,
        "messages",
        is_chat=True,
        plan=form.plan(offered.shown if offered is not None else (), inside, channel),
        reasoning=reasoning,
        form=_form_of_calls(offered, form, channel, conversation) if offered is not None else None,
        ending_ids=form.ending_ids,
        around_answer=form.around_answer(channel, conversation.max_reasoning_tokens),
    )


@contextlib.contextmanager
def refusals_named(prompt: Prompt) -> Iterator[None]:
    """Has refusals of a grammar that was made of tools name the tools."""
    try:
        yield
    except errors.ServiceError as error:
        raise (errors.renamed(error, FORM_OF_TOOLS) if prompt.form is not None else error) from None


def _form_of_calls(
    offered: Offered, form: ModelForm, channel: str, conversation: Conversation
) -> StructuredOutput | None:
    if not offered.use.needs_grammar:
        return None
    grammar = form.grammar(offered.use, channel, conversation.max_reasoning_tokens)
    num_bytes = len(grammar.encode())
    if num_bytes > limits.MAX_STRUCTURED_BYTES:
        rule = f"make a grammar of {num_bytes} bytes; it must have at most {limits.MAX_STRUCTURED_BYTES}"
        raise errors.invalid_field("tools", rule)
    return StructuredOutput("grammar", grammar)


def _ends_inside(text: str, conversation: Conversation, form: ModelForm) -> bool:
    """Returns whether a prompt ends within reasoning, by its template or the continued message."""
    if form.reasoning is None:
        return False
    start, end = form.reasoning
    if conversation.continues_last:
        last = conversation.messages[-1]["content"]
        return bool(last.rfind(start) > last.rfind(end))
    return text.rstrip().endswith(start.rstrip())
