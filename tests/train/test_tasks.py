from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET
from torch.utils._pytree import tree_leaves

from shardwright.core.errors import InputError
from shardwright.estimate.own_model import Task, inputs_of
from shardwright.estimate.recordings import recorded
from shardwright.job.job import Job, parse_job
from shardwright.models.dlrm import DLRM
from shardwright.models.transformer import Transformer, next_token_loss
from shardwright.train.sources import source_of, task_of

CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path: Path) -> Job:
    path = tmp_path / "book.txt"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8).tobytes())
    return parse_job(
        {
            "model": {"kind": "transformer", "layers": 1, "dim": 8, "heads": 2},
            "batch": {"size": 3, "sequence": 9},
            "data": {"path": str(path)},
        }
    )


@pytest.fixture
def clicks(tmp_path: Path) -> Job:
    job = parse_job(
        {
            "model": {"kind": "dlrm"},
            "batch": {"size": 3},
            "data": {"kind": "synthetic", "rows": 60, "test_rows": 50},
            "train": {"out": str(tmp_path)},
            "tables": [{"name": f"t{i}", "rows": 4, "dim": 16} for i in range(26)],
        }
    )
    source_of(job).prepare()
    return job


def _tensors(arrays: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in arrays)


def _scores(task: Task, model: torch.nn.Module, rank: int = 0, size: int = 1) -> np.ndarray:
    with torch.no_grad():
        held_out = task.held_out(rank, size)
        found = [task.scores(model, _tensors(a), numbers) for a, numbers in held_out]
    return np.concatenate(found)


@pytest.mark.parametrize("kind", ["text", "clicks"])
def test_a_model_is_on_the_meta_device_but_for_its_buffers(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model = task_of(request.getfixturevalue(kind)).model(CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


@pytest.mark.parametrize(("kind", "built"), [("text", Transformer), ("clicks", DLRM)])
def test_the_loss_of_a_batch_can_be_trained_on(
    kind: str, built: Any, request: pytest.FixtureRequest
) -> None:
    job = request.getfixturevalue(kind)
    task, model = task_of(job), built(job)
    batch = _tensors(next(task.batches(0, 1)))
    first = task.loss(model, batch)
    first.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert first.dim() == 0
    assert task.loss(model, batch).item() < first.item()
    assert task.bad_rows == 0


@pytest.mark.parametrize("kind", ["text", "clicks"])
def test_two_ranks_together_read_the_batch_of_one(
    kind: str, request: pytest.FixtureRequest
) -> None:
    job = request.getfixturevalue(kind)
    double = msgspec.structs.replace(job, batch=msgspec.structs.replace(job.batch, size=6))
    whole = task_of(double).batches(0, 1)
    ranks = [task_of(job).batches(rank, 2) for rank in (0, 1)]
    for wanted, *parts in islice(zip(whole, *ranks, strict=True), 5):
        for array, *halves in zip(wanted, *parts, strict=True):
            assert np.array_equal(np.concatenate(halves), array)


def test_held_out_losses_are_those_of_each_window(text: Job) -> None:
    model = Transformer(text)
    found = _scores(task_of(text), model)
    windows = [w for arrays, _ in task_of(text).held_out(0, 1) for w in zip(*arrays, strict=True)]
    for (number, tokens, nats), (inputs, targets) in zip(found, windows, strict=False):
        rows = torch.from_numpy(inputs)[None], torch.from_numpy(targets)[None]
        loss = next_token_loss(model(rows[0]), rows[1])
        assert tokens == 9
        assert nats == pytest.approx(9 * loss.item(), rel=1e-5), number


@pytest.mark.parametrize(("kind", "built"), [("text", Transformer), ("clicks", DLRM)])
def test_ranks_together_score_every_held_out_row_once(
    kind: str, built: Any, request: pytest.FixtureRequest
) -> None:
    job = request.getfixturevalue(kind)
    model = built(job)
    alone = _scores(task_of(job), model)
    shared = np.concatenate([_scores(task_of(job), model, rank, 3) for rank in range(3)])
    shared = shared[np.argsort(shared[:, 0], kind="stable")]
    assert alone[:, 0].tolist() == list(range(len(alone)))
    np.testing.assert_allclose(shared, alone, rtol=1e-5)


@pytest.mark.parametrize(("rows", "sizes"), [(UNSET, [50]), (20, [20, 20, 10])])
def test_held_out_rows_come_as_many_at_a_time_as_the_job_says(
    clicks: Job, rows: Any, sizes: list[int]
) -> None:
    data = msgspec.structs.replace(clicks.data, test_batch=rows)
    task = task_of(msgspec.structs.replace(clicks, data=data))
    assert [len(numbers) for _, numbers in task.held_out(0, 1)] == sizes


def test_without_a_test_file_nothing_is_held_out(clicks: Job, tmp_path: Path) -> None:
    document = {"model": {"kind": "dlrm"}, "data": {"kind": "synthetic", "test_rows": 0}}
    job = parse_job(document | {"tables": [{"name": "t", "rows": 4, "dim": 16}]})
    assert list(task_of(job).held_out(0, 1)) == []


@pytest.mark.parametrize("other", [{}, {"dim": 8}, {"pooling_factors": [3.0]}])
def test_a_batch_has_the_bytes_that_its_recording_foresees(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Three tables, as no log of Criteo's has: given whole where each has one id of one dim."""
    tables = [{"name": name, "rows": 90, "dim": 16} for name in "abc"]
    job = parse_job(
        {
            "model": {"kind": "dlrm", "dense_features": 3, "interaction": "cat"},
            "batch": {"size": 8},
            "data": {"kind": "synthetic", "rows": 60, "zipf": 1.5},
            "train": {"out": str(tmp_path)},
            "tables": [*tables[:2], tables[2] | other],
        }
    )
    source_of(job).prepare()
    batch = next(iter(task_of(job).batches(0, 1)))
    assert isinstance(batch[1], dict) is bool(other)
    arrays = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == recorded(job).inputs


def test_a_task_that_does_not_say_what_its_model_is_called_with_lets_no_ids_travel_ahead() -> None:
    job = parse_job(
        {"train": {"overlap": "ids_and_rows"}, "tables": [{"name": "t", "rows": 9, "dim": 16}]}
    )

    class Silent:
        pass

    with pytest.raises(InputError, match=r"train\.overlap: expected 'rows' or 'none' for a task"):
        inputs_of(Silent(), job)  # type: ignore[arg-type]
    task = task_of(job)
    batch = (1, 2, 3)
    assert inputs_of(task, job)(batch) == ((1, 2), {})
