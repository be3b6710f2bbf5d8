"""Checkpoints of several ranks: read by any other number, and saved by all ranks or none."""

from __future__ import annotations

import re
from pathlib import Path

import checkpoint_cases as cases
import checkpoint_tasks as tasks
import msgspec
import pytest
from combinations import in_turn
from pool import Pool, Threads

from shardwright.runtime.checkpoint import read_full


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    assert pool.run(4, tasks.write, folder=str(folder), step=1, seed=1) == ["step-1"] * 4
    return folder


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("world_size", "seed"), in_turn([2, 3, 1, 4], [1, 2, 3]))
def test_what_four_ranks_saved_is_read_by_fewer_in_other_cuts(
    pool: Pool, saved: Path, world_size: int, seed: int
) -> None:
    for rank, (restored, equal) in enumerate(
        pool.run(world_size, tasks.read, folder=str(saved), seed=seed)
    ):
        assert equal
        everyones = tuple({"rank": each, "step": 1} for each in range(4))
        assert restored == (1, {"plan": "p1"}, everyones[rank], 4, everyones)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(1, marks=pytest.mark.product)])
def test_what_fewer_ranks_saved_is_read_by_four(
    pool: Pool, tmp_path: Path, world_size: int
) -> None:
    pool.run(world_size, tasks.write, folder=str(tmp_path), step=8, seed=7)
    results = pool.run(4, tasks.read, folder=str(tmp_path), seed=8)
    assert all(equal for _, equal in results)
    ranks = [restored[2]["rank"] for restored, _ in results]
    assert ranks == [rank % world_size for rank in range(4)]
    assert cases.same(read_full(tmp_path), cases.tensors())


def test_rows_of_a_mesh_that_are_copies_save_and_read_as_one(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, tasks.write_on_grid, folder=str(tmp_path)) == ["step-4"] * 4
    assert len(list((tmp_path / "step-4").iterdir())) == 9
    results = pool.run(4, tasks.read_on_grid, folder=str(tmp_path))
    assert all(equal for _, equal in results)
    assert [restored[2]["rank"] for restored, _ in results] == [0, 1, 2, 3]
    assert all(equal for _, equal in pool.run(3, tasks.read, folder=str(tmp_path), seed=2))


def test_a_copy_is_written_by_one_rank(saved: Path) -> None:
    lists = [msgspec.json.decode(p.read_bytes()) for p in sorted(saved.glob("*/rank-*.json"))]
    assert len(lists) == 4
    pieces = [(p["tensor"], p["offsets"], p["sizes"]) for found in lists for p in found["pieces"]]
    assert len({str(piece) for piece in pieces}) == len(pieces)


def test_a_save_takes_six_collectives(pool: Pool, tmp_path: Path) -> None:
    """Agree, prepare, count parts, list parts, write, commit."""
    assert pool.run(3, tasks.collectives_of_a_save, folder=str(tmp_path)) == [6] * 3


def test_the_newest_checkpoints_of_all_ranks_are_kept(pool: Pool, tmp_path: Path) -> None:
    for step in (1, 2, 10):
        pool.run(2, tasks.write, folder=str(tmp_path), step=step, seed=step, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-10", "step-2"]
    results = pool.run(3, tasks.read, folder=str(tmp_path), seed=4, step=2)
    assert [(restored[0], equal) for restored, equal in results] == [(2, True)] * 3


WRITES = {
    "disk": "RunError: {final}: expected every rank to save its part, got 'File too large' on rank",
    "folder": "RunError: {final}: expected every rank to save its part, got 'No such file or",
    "scalars": "InputError: scalars.value: expected text, a finite number",
    "facts": "expected the same fact 'plan' on every rank",
    "step": "expected the same step on every rank",
    "gap": "step-2.tmp: large: expected every one of",
    "dtype": "step-2.tmp/rank-",
}
FAILS_ON = dict(zip(WRITES, (0, 2, 2, 0, 2, 0, 2), strict=True))  # the rank, daily


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("how", "rank"),
    [
        pytest.param(how, rank, marks=() if rank == FAILS_ON[how] else pytest.mark.product)
        for how in WRITES
        for rank in (0, 2)
        if (how, rank) != ("folder", 0)
    ],
)
def test_a_save_that_fails_on_one_rank_is_saved_on_none(
    pool: Pool, tmp_path: Path, how: str, rank: int
) -> None:
    pool.run(3, tasks.write, folder=str(tmp_path), step=1, seed=1)
    results = pool.run(3, tasks.refused_write, folder=str(tmp_path), how=how, rank=rank)
    texts = {re.sub(r"\.tmp-[0-9a-f]{16}", ".tmp", text) for text, _, _ in results}
    texts = {text.replace("/gone/", "/") for text in texts}
    text = WRITES[how].format(final=tmp_path / "step-2")
    assert all(text in found for found in texts)
    for found, kept, total in results:
        assert "\n" not in found
        assert kept
        assert total == 3.0
    if how in ("disk", "folder"):
        assert all(f"on rank {rank}. Nothing was saved" in found for found in texts)
    if how not in ("facts", "step"):
        assert len(texts) == 1
    if how == "scalars":
        assert texts.pop().endswith(f"Found on rank {rank}.")
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1"]
    assert all(equal for _, equal in pool.run(2, tasks.read, folder=str(tmp_path), seed=3))


@pytest.mark.parametrize(
    ("how", "where"), [("folder", "on rank {}. Nothing was saved"), ("scalars", "on rank {}.")]
)
def test_a_save_of_some_ranks_names_the_rank_of_the_job(
    threads: Threads, tmp_path: Path, how: str, where: str
) -> None:
    found = threads.run(4, tasks.refused_write_in_halves, folder=str(tmp_path), how=how)
    assert all(where.format(1) in text for text in found[:2])
    assert all(where.format(3) in text for text in found[2:])


READS = {
    "name": "MismatchError: {final}: expected the tensors of the model, got 1 that the checkpoint "
    "lacks (odd)",
    "shape": "MismatchError: {final}: cube: expected shape (1,) as in the model, got (3, 4, 5)",
    "dtype": "expected a dtype that holds every value of float64, got float32",
    "tensor": "InputError: int8: expected a tensor of 1 elements, got one of 2",
}


@pytest.mark.parametrize(("how", "rank"), in_turn(READS, [1, 0]))
def test_a_read_that_fails_on_one_rank_changes_nothing_on_any(
    pool: Pool, tmp_path: Path, how: str, rank: int
) -> None:
    final = cases.save(tmp_path, 1, [cases.all_of(cases.tensors())])
    results = pool.run(2, tasks.refused_read, folder=str(tmp_path), spoil=how, rank=rank)
    assert {kept for _, kept in results} == {True}
    assert len({text for text, _ in results}) == 1
    assert READS[how].format(final=final) in results[0][0]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "written_by", [1, 3, *(pytest.param(rank, marks=pytest.mark.product) for rank in (0, 2))]
)
def test_a_changed_file_is_refused_by_all_ranks_whoever_finds_it(
    pool: Pool, tmp_path: Path, written_by: int
) -> None:
    pool.run(4, tasks.write, folder=str(tmp_path), step=1, seed=1)
    path = tmp_path / "step-1" / f"rank-{written_by}.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    results = pool.run(3, tasks.refused_read, folder=str(tmp_path))
    assert {kept for _, kept in results} == {True}
    assert all(text.startswith(f"MismatchError: {path}: expected sha256") for text, _ in results)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ("missing step", "step-2: expected a readable folder, got 'No such file or directory'"),
        ("step", "expected the same step on every rank"),
    ],
)
def test_a_step_that_is_missing_or_asked_for_by_one_rank_is_refused(
    pool: Pool, saved: Path, spoil: str, text: str
) -> None:
    results = pool.run(2, tasks.refused_read, folder=str(saved), spoil=spoil, rank=1)
    assert {kept for _, kept in results} == {True}
    assert all(text in found for found, _ in results)
