"""What is a model's name, and what is a folder."""

from __future__ import annotations

import pathlib

import pytest

from headrace_hub.errors import BadName
from headrace_hub.names import HubName, parse, parsed
from headrace_hub.resolve import ResolvedModel, marked_as_folder, no_folder, resolve


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a/b:Q4_K_M", HubName("a/b", None, "Q4_K_M")),
        ("a/b@v1:Q8_0", HubName("a/b", "v1", "Q8_0")),
        ("a/b:Q8_0@v1", HubName("a/b", "v1", "Q8_0")),
        ("a/b:sub/b-Q8_0.gguf", HubName("a/b", None, "sub/b-Q8_0.gguf")),
    ],
)
def test_a_name_has_two_parts_a_revision_and_a_file(text: str, name: HubName) -> None:
    assert parse(text) == name
    assert name.name == text.partition("/")[2].partition("@")[0].partition(":")[0]


@pytest.mark.parametrize(
    "text",
    ["gpt2", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "/", "", "a b/c", "a/b@", "a/b:", "a/b@x@y", "a/..", "a--b/c",
     "a/b..c", ".a/b", "a/b.", "-a/b", "a/" + "b" * 97, "a/b\n", "a/b@../../x", "http://a/b"],
)  # fmt: skip
def test_anything_else_is_no_name(text: str) -> None:
    assert parse(text) is None
    with pytest.raises(BadName, match="is no model's name"):
        parsed(text)


def test_a_revision_said_twice_is_refused() -> None:
    assert parsed("a/b", "v1", "Q8_0") == HubName("a/b", "v1", "Q8_0")
    for arguments, word in ((("a/b@v1", "v2", None), "revision"), (("a/b:x", None, "y"), "file")):
        with pytest.raises(BadName, match=f"says its {word} twice"):
            parsed(*arguments)


def test_a_folder_that_is_here_goes_before_a_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert resolve("acme/tiny") == ResolvedModel(pathlib.Path("acme/tiny"))


@pytest.mark.parametrize("text", ["./acme/tiny", "acme/tiny/", "/acme/tiny", "acme/of/tiny", "tiny", "../acme"])
def test_a_path_is_never_looked_for_on_a_network(
    text: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: object) -> None:
        raise AssertionError("a process was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headrace_hub.resolve._asked", asked)
    assert resolve(text).name == ""
    # As a setting it is a Path by then.
    assert resolve(pathlib.Path(marked_as_folder(text))).name == ""


def test_a_bare_word_says_what_a_name_looks_like(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert "ORG/NAME" in no_folder(pathlib.Path("tiny"))
    assert no_folder(pathlib.Path("here")) == no_folder(pathlib.Path("/tiny")) == no_folder(pathlib.Path("a/b/c")) == ""
