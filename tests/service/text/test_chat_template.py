"""The template's helper process.

Bombs end in a clear error within their bounds, and the next conversation works.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pathlib
import signal
import sys
import time
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
import pytest_asyncio
from tests.service.harness import engine_model
from transformers.utils.chat_template_utils import render_jinja_template

from headrace_service import errors
from headrace_service.config import ServiceConfig
from headrace_service.errors import ServiceError
from headrace_service.text import chat_template
from headrace_service.text.chat_template import ChatTemplateRenderer
from headrace_service.text.template_worker import compile_template
from headrace_service.text.text_loader import TextLoader

PLAIN = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt "
    "%}>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes "}]
BOMBS = {
    "a gigabyte": "{{ 'a' * 10**9 }}",
    "a gigabyte at run time": "{% for m in messages %}{{ m.role * 10**9 }}{% endfor %}",
    "an endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one long step": "{{ 7 ** (7 ** 12) }}",
    "much output": "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "a list of lists": "{% set ns = namespace(x='aaaaaaaa') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "deep recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a missing method": "{{ messages.nothing() }}",
    "bad syntax": "{% for %}",
    "half of a surrogate pair": "{{ '\\ud800' }}",
    "halves that make a pair": "{{ '\\ud83d' }}{{ '\\ude42' }}",
    "half of a surrogate pair from a number": "{{ '%c' % 57343 }}",
}


@pytest_asyncio.fixture
async def renderer() -> AsyncIterator[ChatTemplateRenderer]:
    made = ChatTemplateRenderer(timeout_s=30.0, memory_bytes=256 << 20)
    yield made
    await made.close()


async def render(renderer: ChatTemplateRenderer, source: str, continues: bool = False) -> str:
    return await renderer.render(source, MESSAGES, {"bos_token": "<s>"}, 10_000, continues)


async def test_a_conversation_is_laid_out(renderer: ChatTemplateRenderer) -> None:
    assert await render(renderer, "{{ bos_token }}" + PLAIN) == "<s>[user]hi[assistant] yes >"
    assert await render(renderer, PLAIN, continues=True) == "[user]hi[assistant] yes "


async def test_the_helper_runs_before_the_first_conversation(
    renderer: ChatTemplateRenderer, model_path: pathlib.Path
) -> None:
    config = ServiceConfig(listen=("127.0.0.1:0",), engine=("unix:engine.sock",))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        await TextLoader(config, threads, renderer).load(engine_model(model_path))
    assert renderer._helper is not None and renderer._helper.returncode is None
    before = renderer._helper
    assert await render(renderer, PLAIN) == "[user]hi[assistant] yes >"
    assert renderer._helper is before


async def test_the_helper_is_reused(renderer: ChatTemplateRenderer) -> None:
    await render(renderer, PLAIN)
    before = renderer._helper
    await render(renderer, PLAIN)
    assert renderer._helper is before


async def test_what_model_makers_templates_use(renderer: ChatTemplateRenderer) -> None:
    source = (
        "{%- for message in messages -%}\n    {%- if loop.last %}{% break %}{% endif -%}\n{% generation %}{{ "
        "message.content | trim }}"
        "{% endgeneration %}{%- endfor -%}{{ {'ü': [1]} | tojson }}{{ strftime_now('%Y')|length }}{{ tools is none }}"
    )
    assert await render(renderer, source) == 'hi{"ü": [1]}4True'


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_bomb_ends_within_its_bounds_and_the_next_conversation_works(
    renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch, bomb: str
) -> None:
    await render(renderer, PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "_timeout_s", 1.0)
        # A busy machine may take minutes to give a helper one second.
        patch.setattr(chat_template, "_PATIENCE", 100.0)
        began_s = time.monotonic()
        with pytest.raises(ServiceError) as refused:
            await render(renderer, BOMBS[bomb])
        # Those that end by themselves would take hours.
        assert time.monotonic() - began_s < 110.0
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "chat template failed" in refused.value.message
    assert await render(renderer, PLAIN) == "[user]hi[assistant] yes >"


async def test_a_template_may_refuse_a_conversation_in_its_own_words(renderer: ChatTemplateRenderer) -> None:
    with pytest.raises(ServiceError, match="roles must alternate"):
        await render(renderer, "{{ raise_exception('roles must alternate') }}")


async def test_half_of_a_surrogate_pair_in_a_templates_own_words_is_reported_escaped(
    renderer: ChatTemplateRenderer,
) -> None:
    with pytest.raises(ServiceError) as refused:
        await render(renderer, "{{ raise_exception('no \\ud800 here') }}")
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.message.endswith("no \\ud800 here")


async def test_the_half_that_a_text_has_is_named(renderer: ChatTemplateRenderer) -> None:
    with pytest.raises(ServiceError, match=r"its text has U\+D800, half of a surrogate pair"):
        await render(renderer, "{{ '\\ud800' }}")


async def test_a_helper_that_gets_no_time_is_not_the_callers_fault(
    renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await render(renderer, PLAIN)
    assert renderer._helper is not None
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "_timeout_s", 0.1)
        psutil.Process(renderer._helper.pid).suspend()
        with pytest.raises(ServiceError) as busy:
            await render(renderer, PLAIN)
    assert busy.value.code == grpc.StatusCode.UNAVAILABLE
    assert "too busy" in busy.value.message and busy.value.details == errors.unavailable("").details
    assert await render(renderer, PLAIN) == "[user]hi[assistant] yes >"


async def test_a_helper_that_gets_little_time_is_waited_for(
    renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await render(renderer, PLAIN)
    assert renderer._helper is not None
    helper = psutil.Process(renderer._helper.pid)
    monkeypatch.setattr(renderer, "_timeout_s", 0.5)
    monkeypatch.setattr(chat_template, "_PATIENCE", 200.0)
    helper.suspend()
    rendering = asyncio.create_task(render(renderer, PLAIN))
    looked = asyncio.Event()
    monkeypatch.setattr(chat_template, "_cpu_s", lambda pid: looked.set() or 0.0)
    await looked.wait()
    helper.resume()
    assert await rendering == "[user]hi[assistant] yes >"
    assert renderer._helper is not None and renderer._helper.pid == helper.pid


async def test_continuing_a_message_that_the_template_hides_is_refused(renderer: ChatTemplateRenderer) -> None:
    with pytest.raises(ServiceError, match="does not show the last message"):
        await render(renderer, "{{ messages[0].content }}", continues=True)


# How templates show a message: as it is, trimmed on either side or both, newlines alone, with text
# of their own around it, twice, and depending on what it says.
SHOWN = {
    "as it is": "<{{ message.role }}>{{ message.content }}<end>\n",
    "trimmed": "<{{ message.role }}>\n{{ message.content | trim }}\n<end>",
    "stripped of newlines": "<{{ message.role }}>\n{{ message.content.strip('\n') }}<end>",
    "stripped on the right": "<{{ message.role }}>{{ message.content.rstrip() }} <end>",
    "before a space": "<{{ message.role }}>{{ message.content }} \n",
    "trimmed before nothing": "<{{ message.role }}>{{ message.content | trim }}",
    "twice": "({{ message.content | trim }}){{ message.content }}<end>",
    "after what it thought": "<{{ message.role }}>{{ message.content.split('</think>')[-1].lstrip('\n') }}<end>",
}
CONTENTS = ["yes", " yes", "yes ", "yes \n", "\nyes\n\n", "a\n b\t", "", " ", "hm\n</think>\n\nyes ", "yes\u00a0"]


@pytest.mark.parametrize("shown", SHOWN)
async def test_a_continued_message_ends_as_the_template_shows_it(renderer: ChatTemplateRenderer, shown: str) -> None:
    source = (
        "{% for message in messages %}"
        + SHOWN[shown]
        + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for content in CONTENTS:
        messages = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": content}]
        prompt = await renderer.render(source, messages, {}, 10_000, continue_last_message=True)
        whole = compile_template(source).render(messages=messages, add_generation_prompt=False)
        rest = SHOWN[shown].rpartition("}}")[2]
        assert prompt == whole.removesuffix(rest), repr(content)


# Of the others transformers, which looks whether a space of its own is kept, concludes too much.
@pytest.mark.parametrize(
    "shown", ["as it is", "trimmed", "before a space", "trimmed before nothing", "after what it thought"]
)
async def test_a_continued_message_is_the_prompt_that_transformers_makes(
    renderer: ChatTemplateRenderer, shown: str
) -> None:
    source = (
        "{% for message in messages %}"
        + SHOWN[shown]
        + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for content in ["yes", " yes", "yes ", "yes \n", "\nyes\n\n", "a\n b\t"]:
        messages = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": content}]
        prompt = await renderer.render(source, messages, {}, 10_000, continue_last_message=True)
        [expected], _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
        assert prompt == expected, repr(content)


async def test_a_killed_helper_is_replaced(renderer: ChatTemplateRenderer) -> None:
    await render(renderer, PLAIN)
    helper = renderer._helper
    assert helper is not None
    os.kill(helper.pid, signal.SIGKILL)
    assert await asyncio.wait_for(helper.wait(), 30) == -signal.SIGKILL
    assert await render(renderer, PLAIN) == "[user]hi[assistant] yes >"
    assert renderer._helper is not helper


async def test_a_helper_that_is_killed_while_it_works_is_not_the_callers_fault(renderer: ChatTemplateRenderer) -> None:
    await render(renderer, PLAIN)
    assert renderer._helper is not None
    helper = psutil.Process(renderer._helper.pid)
    helper.suspend()
    rendering = asyncio.create_task(render(renderer, PLAIN))
    await asyncio.sleep(0)
    helper.kill()
    with pytest.raises(ServiceError) as killed:
        await rendering
    assert killed.value.code == grpc.StatusCode.UNAVAILABLE
    assert "was killed" in killed.value.message and killed.value.details == errors.unavailable("").details


async def test_a_helper_that_cannot_be_started_is_not_the_callers_fault(
    renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ServiceError) as refused:
        await render(renderer, PLAIN)
    assert refused.value.code == grpc.StatusCode.UNAVAILABLE
