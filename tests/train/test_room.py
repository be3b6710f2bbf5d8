"""What a rank may still take of a host that others run on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plans import plan

from shardwright.core.errors import NoPlanError
from shardwright.job.job import parse_job
from shardwright.train import room


def test_ranks_of_a_host_share_what_is_left_of_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A group of processes that may have a MiB more, which is less than any machine has free."""
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    limit.write_text(f"{3 * 2**20}\n")
    used.write_text(f"{2 * 2**20}\n")
    monkeypatch.setattr(room, "GROUPS", ((str(limit), str(used)),))
    found = [room.free_bytes(torch.device("cpu"), ranks) for ranks in (1, 4)]
    assert found == [2**20, 2**18]


def test_a_save_beside_training_needs_room_for_a_copy_of_weights_and_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = {
        "model": {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2},
        "cluster": {"preset": "local", "world_size": 1},
        "train": {"optimizer": "adam"},
    }
    made, device = plan(parse_job(job)), torch.device("cpu")
    (totals,) = made.ranks
    needed = totals.peak_bytes + totals.exact["weight"] + totals.exact["optimizer_state"]
    assert totals.exact["optimizer_state"] > 0
    monkeypatch.setattr(room, "free_bytes", lambda *_: needed - 1)
    room.check_room(made, 0, device, copied=False)
    with pytest.raises(NoPlanError, match="for the copy that a save writes, as planned"):
        room.check_room(made, 0, device, copied=True)
    monkeypatch.setattr(room, "free_bytes", lambda *_: needed)
    room.check_room(made, 0, device, copied=True)


def test_a_run_that_hangs_on_the_allocator_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {
        "model": {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2},
        "cluster": {"compute_device": "cuda", "world_size": 1},
        "memory": {"checkpointing": "none"},
    }
    made, device = plan(parse_job(job)), torch.device("cpu")
    peak, (least, most) = made.ranks[0].peak_bytes, made.needed
    for free, said in ((peak + most - least, ""), (peak, "Perhaps fits: ")):
        monkeypatch.setattr(room, "free_bytes", lambda *_, free=free: free)
        room.check_room(made, 0, device, copied=False)
        assert capsys.readouterr().err[: len(said) or None] == said
