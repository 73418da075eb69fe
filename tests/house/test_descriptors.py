"""What asks for descriptors that a test leaves open finds them."""

from __future__ import annotations

import os

import pytest
from tests.support import descriptors


def test_one_descriptor_that_stays_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_PATIENCE_S", 0.1)
    before = descriptors.settled_descriptors()
    left = os.memfd_create("left")
    found = descriptors.stay_open(before)
    os.close(left)
    assert found == {str(left): "/memfd:left (deleted)"}
    assert not descriptors.stay_open(before)
