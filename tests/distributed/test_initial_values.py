"""Tables on the meta device get their values block by block, on any number of ranks the same."""

from __future__ import annotations

from pathlib import Path

import initial_tasks as tasks
import pytest
import torch
from plans import plan
from pool import Pool
from test_shard_embeddings import planned_tables as plan_of

import shardwright as sw
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan


def _plan_of(rows: int, dim: int, tables: int = 1) -> Plan:
    table = {"rows": rows, "dim": dim, "sharding_types": ["row_wise"]}
    named = [{"name": f"t{number}", **table} for number in range(tables)]
    cluster = {"preset": "local", "world_size": 2}
    return plan(parse_job({"tables": named, "cluster": cluster, "batch": {"size": 32}}))


def test_rows_start_alike_however_tables_are_cut(pool: Pool) -> None:
    (alone,) = pool.run(1, tasks.started, made=plan_of(1))
    for kinds in (("row_wise",), ("column_wise", "row_wise", "table_wise")):
        for found in pool.run(2, tasks.started, made=plan_of(2, kinds)):
            assert all(torch.equal(found[name], value) for name, value in alone.items())
    first, second, _, seen, user = (alone[name] for name in tasks.SHAPES)
    assert 5 <= first.min() <= first.max() <= 6  # as its collection says
    assert not seen[2].any()  # the row of padding
    assert seen[[0, 1, 3]].all()
    everything = torch.cat([second.view(-1), seen.view(-1), user.view(-1)])
    assert 0.7 < everything.std() < 1.3
    assert len(everything.unique()) > 130


def test_a_whole_model_on_the_meta_device_is_applied(pool: Pool) -> None:
    plans = [
        sw.plan_module(
            lambda: tasks.Net(9, 4),
            (torch.zeros(3, 2, dtype=torch.int64),),
            cluster={"preset": "local", "world_size": world_size},
            optimizer="sgd",
            train={"table_optimizer": "sgd", "table_learning_rate": 0.1},
            planner={"tables": {"t0": "row_wise"}},
            batch={"size": 3},
        )
        for world_size in (1, 2)
    ]
    (alone,) = pool.run(1, tasks.applied, made=plans[0])
    assert (alone["top.weight"].abs() <= 0.5).all()  # as a layer of four inputs starts
    for found in pool.run(2, tasks.applied, made=plans[1]):
        assert all(torch.equal(found[name], value) for name, value in alone.items())


def test_values_come_from_the_model_a_function_arrays_and_files(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, tasks.given, made=plan_of(2), folder=tmp_path):
        assert found == dict.fromkeys(found, 0.0)


META = "InputError: user.weight: expected a weight as its own module initialises it, got one that"
WRONG = {
    "by hand": f"{META} was initialised on the meta device, which keeps no numbers. Give the model",
    "as a whole": "seen.weight: expected an initialisation of every element by itself, got '",
    "name": "InputError: initial: expected names of parameters as bags.embedding_bags.t0.weight",
    "shape": "initial of user.weight: expected shape (5, 8), got an array of (8, 5)",
    "file": "nowhere.npy: expected a .npy file of an array",
    "rectangle": "expected a tensor of shape (5, 4), got (1, 1)",
    "one rank": "MismatchError: shard_embeddings: expected the same parameters on the meta device",
}


def test_values_that_are_none_are_refused_on_every_rank(pool: Pool) -> None:
    for found in pool.run(2, tasks.refused, made=plan_of(2, ("row_wise",))):
        for case, text in WRONG.items():
            assert text in found[case], found[case]


def test_tables_with_weights_are_never_all_there_twice(pool: Pool) -> None:
    plans = [_plan_of(rows, 64, tables=4) for rows in (8, 65_536)]  # 16 MiB each
    for _, grown in pool.run(2, tasks.resident_growth, plans=plans):
        assert grown < 0.35 * 4 * 2**24  # not half of all of them


@pytest.mark.parametrize(
    ("rows", "dim", "limit"),
    [
        (1_048_576, 32, None),  # 128 MiB, of which three quarters would fit
        pytest.param(6_291_456, 128, 2**31, marks=pytest.mark.product),  # 3 GiB in 2 GiB
    ],
)
def test_a_table_that_no_process_may_hold_is_trained_and_loaded(
    pool: Pool, tmp_path: Path, rows: int, dim: int, limit: int | None
) -> None:
    given = {"made": _plan_of(rows, dim), "folder": tmp_path, "limit": limit}
    for found in pool.run(2, tasks.fits_no_host, **given):
        *_, before, last = found["losses"]
        assert last < before
        assert found["loaded"] == pytest.approx(last)
