"""A checkpoint that was cut anew for another plan is the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from combinations import in_turn
from plans import plan
from pool import Pool
from reference import bag_job, in_half
from tasks import go_on

from shardwright.cli.main import main
from shardwright.job.job import Job
from shardwright.job.plan import write_plan
from shardwright.runtime.checkpoint import read_full
from shardwright.runtime.checkpoint.read import open_stored

BEFORE = ("row_wise", "table_wise", "row_wise", "data_parallel", "column_wise", "row_wise")
AFTER = ("column_wise", "row_wise", "data_parallel", "row_wise", "grid_shard", "table_wise")
STEPS = 3


def reshard(folder: Path, job: Job, out: Path, *more: str) -> int:
    path = out.with_suffix(".json")
    write_plan(plan(job), path)
    return main(["reshard", str(folder), "--plan", str(path), "--out", str(out), *more])


@pytest.mark.slow
@pytest.mark.parametrize(("half", "optimizer"), in_turn([False, True], ["adam", "adagrad"]))
def test_a_checkpoint_of_two_ranks_is_that_of_three_under_other_types(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str, half: bool
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    jobs = [bag_job(BEFORE, 2, optimizer), bag_job(AFTER, 3, optimizer)]
    first, job = map(in_half, jobs) if half else jobs
    pool.run(2, go_on, job=first, made=plan(first), steps=range(STEPS), save=str(saved))
    assert reshard(saved, job, out, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["saved"], said["world_size"], said["step"]) == (2, 3, STEPS)
    before, after = read_full(saved), read_full(out)
    assert before.keys() == after.keys()
    assert (before["tables.t1.weight"].dtype == torch.float16) == half
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    stored = open_stored(out / f"step-{STEPS}", STEPS)
    assert stored.manifest.facts["plan"] == plan(job).fingerprint
    assert {rank for rank, _ in stored.tensors["tables.t1.weight"].pieces} == {0, 1, 2}
    steps, made = range(STEPS, STEPS + 2), plan(job)
    wanted = pool.run(3, go_on, job=job, made=made, steps=steps, load=str(saved))
    for (losses, weights), (found_losses, found) in zip(
        wanted, pool.run(3, go_on, job=job, made=made, steps=steps, load=str(out)), strict=True
    ):
        assert losses == found_losses
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.slow
def test_what_cannot_be_cut_anew_is_one_line(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    first = bag_job(AFTER, 1)
    pool.run(1, go_on, job=first, made=plan(first), steps=range(1), save=str(saved))
    other = bag_job(AFTER, 2, rows=(7, 13, 5, 1, 30, 65))
    cases = [
        (saved, other, 4, "'tables.t5.weight' of shape (65, 5), as planned, got shape (64, 5)"),
        (tmp_path / "none", other, 2, "expected a folder of checkpoints, got nothing"),
        (tmp_path, other, 2, "expected a folder step-N with a manifest.json, got none"),
    ]
    for folder, job, code, text in cases:
        assert reshard(folder, job, tmp_path / "out") == code
        said = capsys.readouterr().err
        assert text in said
        assert said.count("\n") == 1
    shard = next((saved / "step-1").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert reshard(saved, bag_job(AFTER, 2), tmp_path / "out") == 4
    assert str(shard) in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("step-*"))
