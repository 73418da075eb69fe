"""The page: whole without a network, harmless whatever a trace says, and it works.

The last is tried in a browser where there is one.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import time
from typing import Any

import pytest
from tests.trace_viewer.synthetic_traces import Plan, Request, World, beside_a_long_prefill

from headrace_trace.causes import explain
from headrace_trace.page import render, safe_json
from headrace_trace.reading import read_trace
from headrace_trace.spans import parse

ONE = "01JDECODE0005-7qm2"
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x "
    "onerror=\"document.title='taken'\">{{data}}\u2028'\"&\x1b[31m"
)
VOID = {"meta", "input", "img", "br", "link", "hr"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")


def page_of(plan: Plan, request_id: str, detail: str = "array") -> str:
    trace = read_trace(parse(World(plan).traces(detail).SerializeToString()), request_id=request_id)
    return render(trace, explain(trace))


class Reader(html.parser.HTMLParser):
    """Collects elements and texts of scripts and styles, and checks that all is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def whole(self, tag: str) -> list[str]:
        """The texts of the elements of one kind."""
        return [text for kind, text in self.texts if kind == tag]


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


PAGE = page_of(beside_a_long_prefill(), ONE)


def test_the_page_asks_no_network_for_anything() -> None:
    reader = Reader(PAGE)
    kinds = {tag for tag, _ in reader.elements}
    assert kinds.isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form", "a", "audio", "video"})
    assert not any(
        name in ("src", "href", "srcset", "style") or name.startswith("on")
        for _, attributes in reader.elements
        for name in attributes
    )
    assert "http:" not in PAGE and "https:" not in PAGE and "url(" not in PAGE and "@import" not in PAGE
    script = reader.whole("script")[-1]
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|import|eval|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b",
        script,
    )


def test_the_policy_lets_only_its_own_script_and_style_run() -> None:
    reader = Reader(PAGE)
    policy = next(
        attributes["content"] for tag, attributes in reader.elements if tag == "meta" and "http-equiv" in attributes
    )
    assert policy and policy.startswith("default-src 'none'; ")
    for text in (reader.whole("script")[-1], reader.whole("style")[0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy and policy.count("sha256-") == 2


def test_a_hostile_request_id_is_text_everywhere() -> None:
    plan = Plan((Request(HOSTILE, 0, 90, 20), Request("r-" + HOSTILE, 20, 3000, 4)))
    page = page_of(plan, HOSTILE)
    assert "<img" not in page and "<script>document" not in page
    assert "\x1b" not in page and "\u2028" not in page
    harmless = Reader(page_of(Plan((Request("r-1", 0, 90, 20), Request("r-2", 20, 3000, 4))), "r-1"))
    assert [tag for tag, _ in Reader(page).elements] == [tag for tag, _ in harmless.elements]
    assert data_of(page)["request"]["id"].startswith("</script><script>document.title='taken'")
    assert Reader(page).whole("h1")[0].startswith("</script><script>document.title=")


@pytest.mark.parametrize("field", ["model", "wire", "operation", "engine", "error_type", "call_status", "kept"])
def test_every_other_word_of_a_trace_is_text_too(field: str) -> None:
    trace = read_trace(parse(World(beside_a_long_prefill()).traces().SerializeToString()), request_id=ONE)
    page = render(changed := dataclasses.replace(trace, **{field: HOSTILE}), explain(changed))
    assert "<img" not in page and page.count("<script") == 2


def test_ledger_parts_that_nobody_knows_cannot_name_a_class() -> None:
    trace = read_trace(parse(World(beside_a_long_prefill()).traces().SerializeToString()), request_id=ONE)
    changed = dataclasses.replace(trace, ledger={"' onload='x": 5_000_000})
    page = render(changed, explain(changed))
    assert "onload='x" not in page and "class='part-other'" in page


def test_json_cannot_leave_its_block() -> None:
    assert safe_json({"a": "</script><!--&\u2028"}) == '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026\\u2028"}'


def test_the_data_says_what_the_engine_did() -> None:
    world, data = World(beside_a_long_prefill()), data_of(PAGE)
    life = world.life(ONE)
    rows = [(step, planned - life.arrival, taken - life.arrival) for step, planned, _, _, taken in world.times(life)]
    tokens = data["tokens"]
    assert list(zip(tokens["step"], tokens["scheduled"], tokens["written"], strict=True)) == rows
    at = data["steps"]["id"].index(50)
    assert data["steps"]["start"][at] == world.ran(50).started - life.arrival
    assert [(data["names"][name], count) for name, count in data["steps"]["prefills"][at]] == world.ran(50).prefills
    members = {data["names"][name] for name in data["sets"][data["steps"]["members"][at]]}
    assert members == {*world.ran(50).decodes, "01JLONGPROMPT-7qm2"}
    assert data["slowest"][0] == [0, 47]


# Pages of ordinary size are made in the other tests here.
@pytest.mark.slow
def test_ten_thousand_tokens_are_a_page_of_a_few_megabytes_in_seconds() -> None:
    others = tuple(Request(f"r-{n}", n * 900.0, 500, 200) for n in range(60))
    began = time.process_time()
    page = page_of(Plan((Request("big", 0, 300, 10_000), *others)), "big")
    # 4 s here; the limit only tells linear from quadratic.
    assert time.process_time() - began < 30
    assert len(page) < 6_000_000
    assert len(data_of(page)["tokens"]["index"]) == 10_000


def test_the_text_says_what_the_timeline_shows() -> None:
    reader = Reader(PAGE)
    assert sum(attributes.get("class") == "wait" for _, attributes in reader.elements) == 10
    assert "prefill of request 01JLONGPROMPT-7qm2 (2,016 tokens) took the step" in "".join(reader.whole("pre"))
    assert any(tag == "table" for tag, _ in reader.elements)


def dom_of(page: str, folder: pathlib.Path, token: str = "") -> str:
    """The document after its script ran, as a browser has it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,1000",
        "--virtual-time-budget=2000",
    )
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri() + token],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_a_browser_a_chosen_token_shows_its_step_and_whose_prompt_was_in_it(tmp_path: pathlib.Path) -> None:
    text = dom_of(PAGE, tmp_path, "#token=48")
    detail = text[text.index('id="detail"') :]
    for words in (
        "Token 48",
        "Step 50",
        "48.28 ms after the one before",
        "Prompts in it",
        "01JLONGPROMPT-7qm2, 2,016 tokens",
        "compute-bound",
        "32 other requests in it",
    ):
        assert words in detail, words
    assert "page 1 of 2" in text


def test_in_a_browser_a_hostile_request_id_runs_nothing(tmp_path: pathlib.Path) -> None:
    text = dom_of(
        page_of(Plan((Request(HOSTILE, 0, 90, 20), Request("x" + HOSTILE, 20, 3000, 4))), HOSTILE), tmp_path, "#token=3"
    )
    assert "<title>taken" not in text and "<img" not in text
    assert "Token 3" in text
