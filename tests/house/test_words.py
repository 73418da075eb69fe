"""What `make words` finds, and what it lets pass."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

spec = importlib.util.spec_from_file_location("check_words", ROOT / "tools/check_words.py")
assert spec is not None and spec.loader is not None
check_words = importlib.util.module_from_spec(spec)
sys.modules["check_words"] = check_words
spec.loader.exec_module(check_words)


@pytest.mark.parametrize(
    "text",
    [
        "whether the values are sound",
        "an unsound file",
        "def soundness(x):",
        "turned_keys",
        "restored_weights",
        "the service is told of it",
        "made_up_steps",
        "made-up weights",
        "unlike_layers",
        "a blank word",
        "PartedWeight",
        "wishes",
        "few_kernels",
        "sums over the ranks",
        "PendingSum",
    ],
)
def test_a_retired_word_is_found(text: str) -> None:
    assert list(check_words.retired_words(text))


@pytest.mark.parametrize(
    "text",
    [
        "it sounds right",
        "returned values",
        "turned off",
        "restored from its snapshot",
        "a request told apart from the device",
        "made upstream",
        "unlike the CPU",
        "a blank line",
        "departed",
        "swished",
        "sums of squares",
        "department",
    ],
)
def test_an_ordinary_word_is_none(text: str) -> None:
    assert not list(check_words.retired_words(text))


def test_words_are_found_in_names_strings_and_comments_with_their_lines() -> None:
    source = 'x = 1  # told\nwish = f"""\n  unsound {x}\n"""\n'
    found = list(check_words.check_words("a.py", check_words.words_of_code(source)))
    assert sorted({finding.line for finding in found}) == [1, 2, 3]


def test_logs_of_the_past_keep_their_words() -> None:
    assert not list(check_words.check_words("CHANGELOG.md", [(1, "told")]))
    assert list(check_words.check_words("docs/api.md", [(1, "told")]))


def test_docstrings_and_their_args_are_asked_how_they_begin() -> None:
    source = '''\
def whole(name: str) -> int:
    """Returns the number.

    Args:
        name: Of the thing.
        other: Those of the others,
            where there are some.
        right: The file's path.
    """


class Fragment:
    """As the other."""


def also_right() -> None:
    """Ofttimes as before; seen below."""
'''
    found = list(check_words.check_openings("a.py", source))
    assert [(finding.line, finding.message.split(":")[0]) for finding in found] == [
        (5, "begins with 'Of'"),
        (6, "begins with 'Those'"),
        (13, "begins with 'As'"),
    ]


def test_only_prose_has_a_width() -> None:
    wide = "word " * 30
    text = "\n".join(
        ["# " + wide, wide, "| " + wide, "```", wide, "```", "<!--", wide, "-->", "", "    " + wide, "", "x" * 120]
    )
    assert [finding.line for finding in check_words.check_width("a.md", text)] == [2]


def test_a_list_items_second_paragraph_has_a_width_too() -> None:
    text = "- one\n    " + "word " * 30
    assert [finding.line for finding in check_words.check_width("a.md", text)] == [2]


def test_a_full_folder_of_the_product_is_found() -> None:
    full = [f"service/headrace_service/room/module_{index}.py" for index in range(21)]
    assert [finding.path for finding in check_words.check_folders(full)] == ["service/headrace_service/room"]
    assert not list(check_words.check_folders(full[:20]))
    assert not list(check_words.check_folders([name.replace("service/", "tests/", 1) for name in full]))


def test_a_finding_counts_for_its_room() -> None:
    finding = check_words.Finding("tests/house/test_words.py", 1, "word", "")
    assert check_words.room_of(finding) == "tests/house"
    assert check_words.room_of(check_words.Finding("backend/headrace_backend/engine", 0, "folder", "")) == (
        "backend/headrace_backend"
    )
    assert check_words.room_of(check_words.Finding("README.md", 1, "width", "")) == "."
    table = check_words.summary([finding, finding]).splitlines()
    assert table[1].split() == ["tests/house", "0", "2", "0", "0"]


def test_this_repository_can_be_read() -> None:
    assert "README.md" in check_words.tracked([])
    assert not [name for name in check_words.tracked(["clients"]) if "_pb2" in name]
