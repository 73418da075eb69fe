"""What newcomers ask first is answered by a real server as the demo model's card says."""

from __future__ import annotations

import concurrent.futures
import pathlib
import tomllib

import pytest
from tests.support.running_server import RunningServer

import headrace

QUESTIONS = pathlib.Path(__file__).resolve().parents[2] / "models/demo/scripts/first_questions.toml"
AT_ONCE = 16
# Of all answers; rounding differs between devices, and an answer may hang on it.
RIGHT_SHARE = 0.95

Exchange = tuple[str, str, str]  # question, what the answer has to contain, answer


def converse(client: headrace.Client, system: str, asked: list[list[str]]) -> list[Exchange]:
    """One conversation, with the model's own answers before each next question."""
    said = [headrace.Message("system", system)] if system else []
    exchanges = []
    for question, part in asked:
        said.append(headrace.Message("user", question))
        answer = client.chat(said, max_tokens=240).result().text
        said.append(headrace.Message("assistant", answer))
        exchanges.append((question, part, answer))
    return exchanges


@pytest.mark.slow  # tests/clients/test_examples.py asks some of them
def test_first_questions_are_answered(server: RunningServer) -> None:
    table = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
    with headrace.Client(server.address) as client, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        chats = [pool.submit(converse, client, "", chat) for chat in table["chats"]]
        chats += [pool.submit(converse, client, "Be brief.", chat) for chat in table["briefly"]]
        texts = [(text, part, pool.submit(client.complete, text, max_tokens=60)) for text, part in table["texts"]]
        exchanges = [exchange for chat in chats for exchange in chat.result()]
        exchanges += [(text, part, answer.result().text) for text, part, answer in texts]
    wrong = [exchange for exchange in exchanges if exchange[1] not in exchange[2]]
    assert len(exchanges) > 80
    assert len(wrong) <= (1 - RIGHT_SHARE) * len(exchanges), wrong
