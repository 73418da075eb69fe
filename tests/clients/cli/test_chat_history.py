"""The file of what was typed: whose it is, how long it gets, what damages cost."""

from __future__ import annotations

import json
import pathlib

import pytest

from headrace.cli.chat_history import MAX_ENTRIES, HistoryFile, default_path


def test_it_lies_in_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for state in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert default_path() == tmp_path / ".local/state/headrace/chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_path() == tmp_path / "state/headrace/chat_history"


def test_entries_are_found_again_whatever_is_in_them(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "headrace" / "chat_history"
    entries = ["one", "two\nlines", '"quoted" \\ \x1b[2J', "Grüße \U0001f30a", "not text: \udcff"]
    history = HistoryFile(path)
    for entry in entries:
        history.add(entry)
        history.add(entry)
        history.add(" ")
    assert HistoryFile(path).entries == entries


def test_only_its_owner_can_read_it_also_if_it_was_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "chat_history"
    path.write_text('"before"\n')
    path.chmod(0o644)
    assert HistoryFile(path).entries == ["before"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_does_not_grow_for_good_and_damaged_lines_cost_themselves(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "chat_history"
    lines = [json.dumps(f"entry {i}") for i in range(MAX_ENTRIES)]
    path.write_bytes("\n".join([*lines, "{", "5", '"cut', ""]).encode() + b"\xff\n")
    history = HistoryFile(path)
    assert history.entries == [f"entry {i}" for i in range(MAX_ENTRIES)]
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_text().splitlines()) == MAX_ENTRIES
    assert [file.name for file in tmp_path.iterdir()] == ["chat_history"]


def test_two_chats_append_to_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "chat_history"
    first, second = HistoryFile(path), HistoryFile(path)
    first.add("one")
    second.add("two")
    first.add("three")
    assert HistoryFile(path).entries == ["one", "two", "three"]
