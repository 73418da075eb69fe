"""Renders conversations to prompts, by the model's own chat template.

The template runs in a helper process that can be killed.

Owns the helper: started when first needed, reused, bounded in CPU time, wall time, memory and
output, and replaced after it was killed. Only the model folder's template is ever rendered; callers
send messages, never templates. `template_helper` starts it and speaks to it.

A conversation whose helper does not answer is refused by whose fault it is: a template that used up
its CPU time would use it up again (INVALID_ARGUMENT); one that got too little of it, because the
machine is busy, or whose helper somebody killed, may be sent again (UNAVAILABLE).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import structlog

from headrace_service import errors
from headrace_service.text import template_helper
from headrace_service.text.template_helper import TemplateHelper, TooLong

_log = structlog.get_logger("headrace.service")
_START_ALLOWANCE_S = 5.0
# How many times its CPU time a conversation may take by the clock: a helper that gets a fifth of a
# core is waited for.
_PATIENCE = 5.0
# The shortest wait between two looks at the CPU time, which the kernel counts in hundredths of a
# second.
_SHORTEST_LOOK_S = 0.02
_RETRY_S = 1.0
# From the end of its output to the end of a process.
_END_WITHIN_S = 5.0
# How a template ends its helper within the limits of the kernel; any other signal came from
# outside.
_OWN_SIGNALS = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)


class _TooCostly(Exception):
    """The template reached a limit before it had laid the conversation out; the text says which."""


class ChatTemplateRenderer:
    """Lays conversations out, one at a time.

    Args:
        timeout_s: CPU time of one conversation, seconds; by the clock it may take `_PATIENCE` times
            as long.
        memory_bytes: address space of the helper.
    """

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._helper: TemplateHelper | None = None
        # CPU time that the helper had used when it last answered, seconds.
        self._used_s = 0.0
        self._turn = asyncio.Lock()

    async def render(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        max_chars: int,
        continue_last_message: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str = "",
    ) -> str:
        """Returns the prompt of a conversation.

        Args:
            source: the folder's template.
            messages: role and content of each, and what else it has.
            special_tokens: variables such as bos_token.
            max_chars: longest prompt.
            continue_last_message: whether the prompt ends within the last message, for the model to
                go on there.
            tools: functions that the model may call, as templates read them; None: none.
            reasoning_effort: the variable of that name; "": it is not defined, so that the template
                has its own default.

        Raises:
            ServiceError: INVALID_ARGUMENT; the template refuses this conversation, or fails on it
                within its bounds. UNAVAILABLE; the helper could not be started, got too little CPU
                time, or was killed.
        """
        variables = {
            "messages": [dict(entry) for entry in messages],
            "add_generation_prompt": not continue_last_message,
            "tools": tools,
            **special_tokens,
        }
        if reasoning_effort:
            variables["reasoning_effort"] = reasoning_effort
        if continue_last_message:
            return await self._render_continued(source, variables, max_chars)
        return await self._render(source, variables, max_chars)

    async def warm_up(self) -> None:
        """Starts the helper before the first conversation, which would wait 0.2 s for it."""
        with contextlib.suppress(errors.ServiceError):
            async with self._turn:
                await self._running_helper()

    async def close(self) -> None:
        """Ends the helper."""
        await self._kill()

    async def _render_continued(self, source: str, variables: Mapping[str, Any], max_chars: int) -> str:
        """Returns the prompt up to the end of its last message.

        The template shows where that message ends.
        """
        mark = f"end-{secrets.token_hex(16)}"
        *before, last = variables["messages"]
        marked = {**variables, "messages": [*before, {**last, "content": last["content"] + mark}]}
        text = await self._render(source, marked, max_chars + len(mark))
        prompt, found, rest = text.rpartition(mark)
        if not found:
            raise _failed("it does not show the last message, so that there is no place to continue")
        # A template may show the message elsewhere too.
        prompt = prompt.replace(mark, "")
        if last["content"] == last["content"].rstrip():
            return prompt
        return _as_trimmed(prompt, await self._render(source, variables, max_chars), rest)

    async def _render(self, source: str, variables: Mapping[str, Any], max_chars: int) -> str:
        question = {"source": source, "variables": variables, "max_chars": max_chars, "cpu_s": int(self._timeout_s) + 1}
        async with self._turn:
            try:
                reply = await self._ask(question, max_chars)
            except _TooCostly as reason:
                raise _failed(str(reason)) from None
        if "refused" in reply:
            raise errors.invalid_field("messages", f"refused by the model's chat template: {reply['refused']}")
        if "failed" in reply:
            raise _failed(str(reply["failed"]))
        return str(reply["text"])

    async def _ask(self, question: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
        helper = await self._running_helper()
        answering = asyncio.create_task(helper.exchange(question, max_chars))
        answered = False
        try:
            await self._wait(answering, helper.pid)
            reply = answering.result()
            self._used_s = reply["cpu_s"]
            answered = True
            return reply
        except TooLong:
            raise _TooCostly(f"its text has more than {max_chars} characters") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await _why_lost(helper) from None
        finally:
            answering.cancel()
            # Also when this call was cancelled: half a conversation must not be the start of the
            # next.
            if not answered:
                await asyncio.shield(self._kill())

    async def _wait(self, answering: asyncio.Task[dict[str, Any]], pid: int) -> None:
        """Returns when the helper has answered, or its connection broke.

        Raises:
            _TooCostly: it used up its CPU time.
            ServiceError: UNAVAILABLE; it got too little of it.
        """
        began_s = time.monotonic()
        left_s = self._timeout_s
        while not (await asyncio.wait({answering}, timeout=left_s))[0]:
            cpu_left_s = self._timeout_s - (_cpu_s(pid) - self._used_s)
            if cpu_left_s <= 0:
                raise _TooCostly(f"it takes longer than {self._timeout_s:g} s")
            wall_left_s = began_s + _PATIENCE * self._timeout_s - time.monotonic()
            if wall_left_s <= 0:
                raise errors.unavailable("the machine is too busy to lay this conversation out; try again", _RETRY_S)
            left_s = max(min(cpu_left_s, wall_left_s), _SHORTEST_LOOK_S)

    async def _running_helper(self) -> TemplateHelper:
        if self._helper is not None and self._helper.returncode is not None:
            await self._kill()
        if self._helper is None:
            # Its start (an interpreter and Jinja) is not the conversation's time: wait for its
            # first answer.
            probe = {"source": "", "variables": {}, "max_chars": 1, "cpu_s": int(_START_ALLOWANCE_S)}
            try:
                self._helper = await template_helper.start(self._memory_bytes)
                async with asyncio.timeout(_START_ALLOWANCE_S):
                    reply = await self._helper.exchange(probe, 1)
                self._used_s = reply["cpu_s"]
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                await self._kill()
                _log.error("chat_template.helper_did_not_start", reason=type(error).__name__)
                raise errors.unavailable("the chat template's helper process could not be started") from None
        return self._helper

    async def _kill(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            await helper.kill()


def _as_trimmed(prompt: str, conversation: str, rest: str) -> str:
    """Returns the prompt with the continued message exactly as it was given.

    Templates take off the space at its end.

    Args:
        prompt: what is before the mark at the message's end, where no space is trimmed.
        conversation: what the template makes of the conversation without a mark.
        rest: what it puts behind the message.
    """
    trimmed = conversation.removesuffix(rest)
    # A template that says something else where the message ends with a mark is not judged by it.
    is_the_same = conversation.endswith(rest) and "".join(trimmed.split()) == "".join(prompt.split())
    return trimmed if is_the_same else prompt


async def _why_lost(helper: TemplateHelper) -> Exception:
    """Returns what to raise for a helper whose connection broke.

    Whether its template ended it, or somebody else did.
    """
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(helper.wait(), _END_WITHIN_S)
    code = helper.returncode
    if code is None or code > 0 or -code in _OWN_SIGNALS:
        return _TooCostly("it needs more memory or CPU time than it may have")
    _log.warning("chat_template.helper_was_killed", signal=-code)
    return errors.unavailable("the chat template's helper process was killed; try again", _RETRY_S)


def _cpu_s(pid: int) -> float:
    """Returns the CPU time that a child of this process has used, seconds.

    0 once it is gone, which its connection tells.
    """
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _failed(why: str) -> errors.ServiceError:
    return errors.invalid_field("messages", f"the model's chat template failed on this conversation: {why}")
