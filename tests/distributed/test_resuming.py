"""A training that was saved goes on as if it had never ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import resuming_tasks as tasks
import torch
from combinations import in_turn
from commands import LITTLE_TEXT
from pool import Pool

from shardwright.core.errors import InputError
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import read_plan, sealed, write_plan
from shardwright.runtime.checkpoint.read import read_full
from shardwright.train.resharding import reshard
from shardwright.train.resuming import RunStart, check_resume, facts_of
from shardwright.train.sources import source_of

BLOCKS = {"layers": 2, "dim": 16, "heads": 2}
TABLES = [{"name": f"C{i}", "rows": 60, "dim": 4} for i in range(1, 27)]
ADAM = {"optimizer": "adam", "learning_rate": 0.003}
SGD = {"optimizer": "sgd", "learning_rate": 0.05}
JOBS: dict[str, dict[str, Any]] = {
    "dlrm": {
        "model": {"bottom": [4], "top": [8, 1]},
        "tables": TABLES,
        "data": {"kind": "synthetic", "rows": 50, "test_rows": 0},
        "train": {"optimizer": "adam", "learning_rate": 0.01},
    },
    "cached": {
        "model": {"bottom": [4], "top": [8, 1]},
        "tables": TABLES,
        "data": {"kind": "synthetic", "rows": 75, "days": 3, "cache": "rows"},
        "train": {
            "optimizer": "adam",
            "learning_rate": 0.01,
            "metrics_every": 4,
            "schedule": {"warmup_steps": 3, "decay": "cosine", "end_factor": 0.1},
        },
    },
    "transformer": {"model": {"kind": "transformer", **BLOCKS}, "train": ADAM},
    **{
        name: {
            "model": {"kind": "transformer", **BLOCKS},
            "train": ADAM,
            "parallel": {"data_replicate": 2},
            "memory": {"zero": zero},
            "planner": {"units": {"layers": "shard", "head": "shard"}},
        }
        for name, zero in (("hsdp", 3), ("hfsdp", [2, 3]))
    },
    "llama": {
        "model": {"kind": "llama", **BLOCKS, "ffn_dim": 32, "vocab": 256},
        "memory": {"param_dtype": "fp32"},
        "train": ADAM,
    },
    "python": {
        "model": {"python": "resuming_tasks:build"},
        "data": {"python": "resuming_tasks:drawn"},
        "train": ADAM,
    },
    "start": {
        "model": {"python": "resuming_tasks:build"},
        "data": {"python": "resuming_tasks:numbered"},
        "train": ADAM,
    },
    "spoilt": {
        "model": {"python": "resuming_tasks:build"},
        "data": {"python": "resuming_tasks:spoilt"},
        "train": {**ADAM, "not_finite": "skip"},
    },
    "ahead": {
        "model": {"python": "resuming_tasks:looked"},
        "data": {"python": "resuming_tasks:clicked"},
        "cluster": {"ddr_cap": "5 MiB"},
        "train": {**SGD, "table_optimizer": "sgd", "overlap": "ids_and_rows"},
    },
    "hungry": {
        "model": {"python": "resuming_tasks:hungry"},
        "data": {"python": "resuming_tasks:starving"},
        "train": ADAM,
    },
    "given": {"model": {"python": "resuming_tasks:build"}, "train": ADAM},
}


def planned(
    folder: Path, kind: str, ranks: int, batch: int = 4, steps: int = 12, **more: Any
) -> str:
    """A plan of the job for so many ranks, whose data are in ``folder``."""
    document = {**JOBS[kind]}
    document["cluster"] = {"preset": "local", "world_size": ranks, **document.get("cluster", {})}
    document["batch"] = {"size": batch}
    if kind in ("transformer", "llama", "hsdp", "hfsdp"):
        document["batch"]["sequence"] = 8
        folder.mkdir(exist_ok=True)
        (folder / "text").write_bytes(LITTLE_TEXT)
        document["data"] = {"path": str(folder / "text")}
    document["train"] = {**JOBS[kind]["train"], "steps": steps, "out": str(folder)} | more
    document["checkpoint"] = {"every": "5 steps"}
    if kind == "cached":
        document["data"] = {**JOBS[kind]["data"], "cache": str(folder / "rows")}
    job = parse_job(document)
    source_of(job).prepare()
    path = folder / f"{ranks}-{batch}-{steps}.json"
    folder.mkdir(exist_ok=True)
    write_plan(plan(job), path)
    return str(path)


def trained(pool: Pool, made: str, folder: Path, **options: Any) -> list[tuple[list[float], Any]]:
    folder.mkdir(exist_ok=True)
    ranks = int(Path(made).name.partition("-")[0])
    return pool.run(ranks, tasks.train, plan=made, folder=str(folder), **options)


class Stopped(NamedTuple):
    """A training of two ranks as a whole, and stopped after seven of its twelve steps."""

    made: str
    data: Path
    whole: list[tuple[list[float], Any]]
    run: Path
    said: list[Any]

    def again(self, folder: Path) -> Path:
        """The run as it was stopped, in a folder of its own."""
        return shutil.copytree(self.run, folder / "run")


@pytest.fixture(scope="module")
def stopped(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stopped]:
    """That of a kind, made once."""

    @cache
    def of(kind: str) -> Stopped:
        folder = tmp_path_factory.mktemp(kind)
        made = planned(folder / "data", kind, 2)
        whole = trained(pool, made, folder / "whole")
        said = trained(pool, made, folder / "run", stop_after=7)
        return Stopped(made, folder / "data", whole, folder / "run", [text for _, text in said])

    return of


KINDS = [
    *("cached", "transformer", "python", "start", "given", "ahead"),
    *(pytest.param(kind, marks=pytest.mark.product) for kind in ("dlrm", "llama")),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_a_signal_stopped_goes_on_bit_by_bit(
    pool: Pool, tmp_path: Path, stopped: Callable[[str], Stopped], kind: str
) -> None:
    before = stopped(kind)
    assert bool(read_plan(before.made).modes.asked) == (kind == "ahead")
    where = before.run / "checkpoints" / "step-7"
    words = f"stopped by SIGTERM after step 7, saved in {where}: "
    assert all(found["stopped"].startswith(words) for found in before.said)
    again = trained(pool, before.made, before.again(tmp_path), resume=True)
    assert [losses for losses, _ in again] == [losses for losses, _ in before.whole]
    assert len(again[0][0]) == 12
    assert again[0][1]["resumed"] == (7,)
    assert again[0][1]["timed"][0] == 9  # its first step warms up, as any run's


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), in_turn(["hfsdp", "hsdp"], [4, 2], count=1))
def test_replicas_of_shards_go_on_from_each_other_s_checkpoints(
    pool: Pool, tmp_path: Path, kind: str, ranks: int
) -> None:
    """Beside units on all ranks, from those of other shards, and as one rank."""
    made = planned(tmp_path / "data", kind, ranks, 16 // ranks)
    whole = trained(pool, made, tmp_path / "whole")
    trained(pool, made, tmp_path / "run", stop_after=7)
    shutil.copytree(tmp_path / "run", tmp_path / "one")
    again = trained(pool, made, tmp_path / "run", resume=True)
    assert [losses for losses, _ in again] == [losses for losses, _ in whole]
    alone = planned(tmp_path / "data", "transformer", 1, 16)
    ((losses, _),) = trained(pool, alone, tmp_path / "one", resume=True)
    means = [sum(step) / ranks for step in zip(*(found[0] for found in whole), strict=True)]
    assert losses == pytest.approx(means, rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "ranks"), in_turn(["dlrm", "cached", "transformer", "start"], [1, 4])
)
def test_other_ranks_go_on_with_the_rows_that_are_left(
    pool: Pool, tmp_path: Path, stopped: Callable[[str], Stopped], kind: str, ranks: int
) -> None:
    """A global batch has the same rows whatever the ranks are; so has the curve, to rounding."""
    before = stopped(kind)
    others = planned(before.data, kind, ranks, 8 // ranks)
    cut = tmp_path / "cut" / "checkpoints"
    reshard(before.run / "checkpoints", read_plan(others), cut)
    again = trained(pool, others, before.again(tmp_path), resume=True)
    if kind != "start":
        assert trained(pool, others, tmp_path / "cut", resume=True) == again
    means = [
        [sum(step) / len(step) for step in zip(*(r[0] for r in runs), strict=True)]
        for runs in (before.whole, again)
    ]
    compared = slice(7) if kind == "start" else slice(None)  # its dropout draws other numbers
    assert means[1][compared] == pytest.approx(means[0][compared], rel=1e-4)
    assert len(means[1]) == 12


def test_modules_draw_other_numbers_on_every_rank_and_after_every_start(
    pool: Pool, tmp_path: Path
) -> None:
    two = planned(tmp_path / "data", "dlrm", 2, steps=2)
    one = planned(tmp_path / "data", "dlrm", 1, 8, steps=3)
    runs = [
        *trained(pool, two, tmp_path / "run"),
        *trained(pool, one, tmp_path / "run", resume=True),
    ]
    assert runs[-1][1]["resumed"] == (2,)
    assert len({found["seed"] for _, found in runs}) == 3


@pytest.mark.slow
def test_batches_that_do_not_know_where_to_start_refuse_other_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    trained(pool, planned(tmp_path / "data", "python", 2), tmp_path / "run", stop_after=7)
    others = planned(tmp_path / "data", "python", 1)
    ((works, said),) = pool.outcomes(
        1, tasks.train, plan=others, folder=str(tmp_path / "run"), resume=True
    )
    assert not works
    assert "expected the data of 2 ranks to go on with, got 1 ranks" in said
    assert "Let the function have a parameter 'start'" in said
    job = read_plan(others).job
    with pytest.raises(InputError, match=r"data of 2 ranks to go on with.*parameter 'start'"):
        check_resume(job, tmp_path / "run", 1, resume=True)
    check_resume(job, tmp_path / "run", 2, resume=True)


def test_bad_rows_that_were_left_out_are_rows_that_were_taken() -> None:
    place = RunStart(0).place(batch=4, rank=0, world_size=1, losses=[0.5] * 3, bad_rows=2)
    assert (place["taken"], place["bad_rows"]) == (3 * 4 + 2, 2)


def test_what_a_checkpoint_says_of_its_data_names_every_choice_among_rows() -> None:
    def said(**data: Any) -> str:
        document = JOBS["dlrm"] | {"data": {"kind": "synthetic"} | data}
        return facts_of(parse_job(document), "")["data"]

    choices: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"days": 3},
        {"kind": "criteo", "path": "x.csv", "drop_negatives": 0.5},
        {"kind": "criteo", "path": "x.csv", "drop_negatives": 0.25},
    ]
    assert len({said(**choice) for choice in choices}) == len(choices)


def test_a_changed_text_is_refused_before_it_is_read(pool: Pool, tmp_path: Path) -> None:
    made = planned(tmp_path / "data", "transformer", 1)
    trained(pool, made, tmp_path / "run", stop_after=7)
    text = tmp_path / "data" / "text"
    text.write_bytes(text.read_bytes()[:-1])
    ((works, said),) = pool.outcomes(
        1, tasks.train, plan=made, folder=str(tmp_path / "run"), resume=True
    )
    assert not works
    assert "MismatchError: data: expected those of step-7" in said


@pytest.mark.slow
def test_a_run_goes_on_with_the_rate_that_its_job_names_now(pool: Pool, tmp_path: Path) -> None:
    made = planned(tmp_path / "data", "transformer", 2, steps=6)
    trained(pool, made, tmp_path / "run")
    longer = planned(tmp_path / "data", "transformer", 2, learning_rate=1e-30)
    ((losses, _), _) = trained(pool, longer, tmp_path / "run", resume=True)
    progress = (tmp_path / "run" / "progress.jsonl").read_text()
    assert "going on after" in progress
    assert "learning_rate 1e-30 instead of 0.003" in progress
    assert len(losses) == 12


@pytest.mark.slow
def test_tables_and_units_follow_a_schedule(pool: Pool, tmp_path: Path) -> None:
    """At rates of 0.02, 0.04 and 0 the weights after ten steps are those after the second."""
    decay = {"decay": "polynomial", "decay_start": 2, "decay_steps": 1}
    weights = {}
    for name, steps, schedule in (
        ("over", 10, {"warmup_steps": 2, **decay}),
        ("two", 2, {"warmup_steps": 2}),
        ("steady", 2, {"warmup_steps": 1}),
    ):
        train = {"optimizer": "sgd", "learning_rate": 0.04, "schedule": schedule}
        made = planned(tmp_path / name, "dlrm", 2, steps=steps, **train)
        trained(pool, made, tmp_path / name)
        weights[name] = read_full(tmp_path / name / "checkpoints", steps)
    two, over, steady = weights["two"], weights["over"], weights["steady"]
    learnt = [key for key in two if key.endswith("weight")]
    assert any("C26" in key for key in learnt)
    assert any("top" in key for key in learnt)
    assert all(torch.equal(two[key], over[key]) for key in learnt)
    assert not any(torch.equal(two[key], steady[key]) for key in learnt)


@pytest.mark.slow
def test_steps_that_are_not_finite_are_left_out_and_counted(pool: Pool, tmp_path: Path) -> None:
    made = planned(tmp_path / "data", "spoilt", 2)
    (_, found), _ = trained(pool, made, tmp_path / "run")
    assert found["skipped"] == 2
    said = (tmp_path / "run" / "progress.jsonl").read_text()
    assert "loss on rank 1 in step 3: expected finite numbers" in said


def test_a_plan_that_does_not_fit_what_is_free_now_is_refused_before_anything_moves(
    pool: Pool, tmp_path: Path
) -> None:
    made = read_plan(planned(tmp_path / "data", "transformer", 2))
    ranks = tuple(msgspec.structs.replace(r, peak_bytes=2**50 + r.rank) for r in made.ranks)
    write_plan(sealed(msgspec.structs.replace(made, ranks=ranks)), tmp_path / "large.json")
    where = str(tmp_path)
    said = pool.run(2, tasks.refused, plan=str(tmp_path / "large.json"), folder=where)
    for text in said:
        assert text.startswith("free memory on rank 0: expected 1024.00 TiB (a peak of ")
        assert "KiB for the copy that a save writes, as planned)" in text
        assert "or plan for less: --set cluster.ddr_cap, or more ranks." in text


def test_where_memory_ran_out_predicted_and_actual_bytes_are_said(
    pool: Pool, tmp_path: Path
) -> None:
    made = planned(tmp_path / "data", "hungry", 1)
    (tmp_path / "run").mkdir()
    ((works, said),) = pool.outcomes(1, tasks.train, plan=made, folder=str(tmp_path / "run"))
    assert not works
    line = next(text for text in said.splitlines() if "RunError: out of memory" in text)
    assert "out of memory in step 3, forward, on rank 0: the plan predicts a peak of " in line
    for words in ("this process has", "are free", "the largest are ", "can't allocate memory"):
        assert words in line


def test_a_loop_of_one_s_own_is_stopped_and_goes_on_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    made = planned(tmp_path / "data", "given", 2)
    options = {"plan": made, "folder": str(tmp_path / "run")}
    whole = pool.run(2, tasks.own_loop, plan=made, folder=str(tmp_path / "whole"))
    assert whole[0][2] is None
    for said in pool.run(2, tasks.own_loop, stop_after=5, **options):
        assert said.startswith("stopped by SIGTERM after step 5, saved in ")
    for found, true in zip(pool.run(2, tasks.own_loop, **options), whole, strict=True):
        assert found[:2] == true[:2]
        assert found[2] == (5, "mine")
