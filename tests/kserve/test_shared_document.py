"""A document that processes share."""

from __future__ import annotations

import multiprocessing
import pathlib

import pytest

from headrace_service.kserve.messages.shared_document import Content, SharedDocument


def _add(path: pathlib.Path, name: str) -> None:
    document = SharedDocument(path, {})
    for index in range(30):
        document.update(lambda content, index=index: content.update({f"{name}-{index}": index}))  # type: ignore[misc]


def test_no_change_of_any_process_is_lost(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "d.json"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add, args=(path, name)) for name in "ab"]
    for process in processes:
        process.start()
    _add(path, "c")
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert len(SharedDocument(path, {}).read()) == 90


@pytest.mark.parametrize("shared", [True, False])
def test_a_change_that_fails_changes_nothing(tmp_path: pathlib.Path, shared: bool) -> None:
    document = SharedDocument(tmp_path / "d.json" if shared else None, {"a": 1})

    def fail(content: Content) -> None:
        content["a"] = 2
        raise ValueError

    with pytest.raises(ValueError):
        document.update(fail)
    assert document.read() == {"a": 1}
    document.update(lambda content: content.update(b=2))
    assert document.read() == {"a": 1, "b": 2}


def test_others_see_a_change_at_once(tmp_path: pathlib.Path) -> None:
    one, other = SharedDocument(tmp_path / "d.json", {}), SharedDocument(tmp_path / "d.json", {})
    assert other.read() == {}
    one.update(lambda content: content.update(a=1))
    assert other.read() == {"a": 1}
