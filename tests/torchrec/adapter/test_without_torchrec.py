"""Where TorchRec is not installed, a line says so."""

from __future__ import annotations

import importlib.util

import pytest

from shardwright import torchrec
from shardwright.core.errors import UnsupportedError


def test_a_name_of_the_adapter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"got no module.*Install shardwright\[torchrec\]"):
        _ = torchrec.ShardwrightPlanner


def test_names_are_listed_without_loading_torchrec() -> None:
    assert "ShardwrightPlanner" in dir(torchrec)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = torchrec.nonsense
