"""What a rank may still take of a host that others run on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.lab import room


def test_ranks_of_a_host_share_what_is_left_of_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A group of processes that may have a MiB more, which is less than any machine has free."""
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    limit.write_text(f"{3 * 2**20}\n")
    used.write_text(f"{2 * 2**20}\n")
    monkeypatch.setattr(room, "_GROUPS", ((str(limit), str(used)),))
    found = [room.free_bytes(torch.device("cpu"), ranks) for ranks in (1, 4)]
    assert found == [2**20, 2**18]
