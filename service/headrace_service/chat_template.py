"""Conversations to prompts, by the model's own chat template, in a helper process that can be killed.

Owns the helper: started when first needed, reused, bounded in wall time, CPU time, memory and output, and replaced after it was killed. Only
the model folder's template is ever rendered; callers send messages, never templates. What runs inside is `template_worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import structlog

from headrace_service import errors, template_worker

_log = structlog.get_logger("headrace.service")
_LENGTH = struct.Struct("<I")
_START_ALLOWANCE_S = 5.0
# JSON may write one character as twelve bytes (a surrogate pair of escapes).
_MAX_BYTES_PER_CHAR = 12


class _HelperLost(Exception):
    """The helper ended, or had to be ended, before it answered; the text says why."""


class ChatTemplateRenderer:
    """Lays conversations out, one at a time.

    Args:
        timeout_s: wall time of one conversation.
        memory_bytes: address space of the helper.
    """

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._helper: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def render(
        self,
        source: str,
        messages: Sequence[Mapping[str, str]],
        special_tokens: Mapping[str, str],
        max_chars: int,
        continue_last_message: bool,
    ) -> str:
        """Returns the prompt of a conversation.

        Args:
            source: the folder's template.
            messages: role and content of each.
            special_tokens: variables such as bos_token.
            max_chars: longest prompt.
            continue_last_message: whether the prompt ends within the last message, for the model to go on there.

        Raises:
            ServiceError: INVALID_ARGUMENT; the template refuses this conversation, or fails on it within its bounds.
        """
        variables = {
            "messages": [dict(entry) for entry in messages],
            "add_generation_prompt": not continue_last_message,
            "tools": None,
            **special_tokens,
        }
        if continue_last_message:
            return await self._render_continued(source, variables, max_chars)
        return await self._render(source, variables, max_chars)

    async def warm_up(self) -> None:
        """Starts the helper ahead of the first conversation, which would wait a fifth of a second for it."""
        with contextlib.suppress(errors.ServiceError):
            async with self._turn:
                await self._running_helper()

    async def close(self) -> None:
        """Ends the helper."""
        await self._kill()

    async def _render_continued(self, source: str, variables: Mapping[str, Any], max_chars: int) -> str:
        """Returns the prompt up to the end of its last message, as the template shows that message."""
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
            except _HelperLost as lost:
                raise _failed(str(lost)) from None
        if "refused" in reply:
            raise errors.invalid_field("messages", f"refused by the model's chat template: {reply['refused']}")
        if "failed" in reply:
            raise _failed(str(reply["failed"]))
        return str(reply["text"])

    async def _ask(self, question: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
        helper = await self._running_helper()
        answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await _exchange(helper, json.dumps(question).encode(), max_chars)
            answered = True
            return reply
        except TimeoutError:
            raise _HelperLost(f"it takes longer than {self._timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, BrokenPipeError):
            raise _HelperLost("it needs more memory or CPU time than it may have") from None
        finally:
            # Also when this call was cancelled: half a conversation must not be the start of the next.
            if not answered:
                await asyncio.shield(self._kill())

    async def _running_helper(self) -> asyncio.subprocess.Process:
        if self._helper is None or self._helper.returncode is not None:
            self._helper = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a script's own folder is no place to import from
                template_worker.__file__,
                str(self._memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            # Its start (an interpreter and Jinja) is not the conversation's time: wait for its first answer.
            probe = {"source": "", "variables": {}, "max_chars": 1, "cpu_s": int(_START_ALLOWANCE_S)}
            try:
                async with asyncio.timeout(_START_ALLOWANCE_S):
                    await _exchange(self._helper, json.dumps(probe).encode(), 1)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
                await self._kill()
                _log.error("chat_template.helper_did_not_start", reason=type(error).__name__)
                raise errors.unavailable("the chat template's helper process could not be started") from None
        return self._helper

    async def _kill(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None and helper.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                helper.kill()
            await helper.wait()


async def _exchange(helper: asyncio.subprocess.Process, data: bytes, max_chars: int) -> dict[str, Any]:
    """Sends a question and returns the answer, which may not be longer than its text can be."""
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(_LENGTH.pack(len(data)) + data)
    await helper.stdin.drain()
    (num_bytes,) = _LENGTH.unpack(await helper.stdout.readexactly(_LENGTH.size))
    if num_bytes > max_chars * _MAX_BYTES_PER_CHAR + 1024:
        raise ConnectionError("the answer is longer than any prompt")
    reply: dict[str, Any] = json.loads(await helper.stdout.readexactly(num_bytes))
    return reply


def _as_trimmed(prompt: str, conversation: str, rest: str) -> str:
    """Returns the prompt without the space at its end that the template takes off a message, and with what it keeps.

    Args:
        prompt: what is before the mark at the message's end, where no space is trimmed.
        conversation: what the template makes of the conversation without a mark.
        rest: what it puts behind the message.
    """
    trimmed = conversation.removesuffix(rest)
    # A template that says something else where the message ends with a mark is not judged by it.
    is_the_same = conversation.endswith(rest) and "".join(trimmed.split()) == "".join(prompt.split())
    return trimmed if is_the_same else prompt


def _failed(why: str) -> errors.ServiceError:
    text = f"messages: the model's chat template failed on this conversation: {why}"
    return errors.ServiceError(grpc.StatusCode.INVALID_ARGUMENT, text, errors.invalid_field("messages", text).details)
