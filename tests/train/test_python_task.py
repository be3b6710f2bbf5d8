"""Models and batches of a user's own, on one rank: what is trained, and what is refused."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.core.errors import InputError
from shardwright.estimate.own_model import Task, as_tensors
from shardwright.job.job import Job, parse_job
from shardwright.train.sources import source_of, task_of

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _beside_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def job_of(function: str = "build", batches: str = "", **sections: Any) -> Job:
    section = {"python": f"own:{batches}"} if batches else {}
    return parse_job(
        {
            "model": {"python": f"own:{function}"},
            "batch": {"size": 6},
            "data": {**section, "seed": 3},
            "train": {"steps": 4},
            **sections,
        }
    )


def first(task: Task, rank: int = 0) -> Any:
    return as_tensors(next(task.batches(rank, 2)))


def whole(model: torch.nn.Module) -> torch.nn.Module:
    """The module with its numbers."""
    for name, parameter in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        shape = tuple(parameter.shape)
        value = model.initial_block(name, (0,) * len(shape), shape)
        setattr(model.get_submodule(path), last, torch.nn.Parameter(value))
    return model


# ---- what is trained -----------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["build", "bare", "closed"])
def test_a_function_s_module_is_trained_on_its_inputs(name: str) -> None:
    task = task_of(job_of(name))
    model, batch = whole(task.model(CPU)), first(task)
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.dim() == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["build", "closed"])
def test_ranks_have_the_same_module_and_inputs_of_their_own(name: str) -> None:
    tasks = [task_of(job_of(name)) for _ in range(2)]
    weights = [whole(task.model(CPU)).state_dict() for task in tasks]
    inputs = [first(task, rank)[:2] for rank, task in enumerate(tasks)]
    for key, weight in weights[0].items():
        assert torch.equal(weights[1][key], weight)
    found = [torch.cat([t.flatten() for t in torch.utils._pytree.tree_leaves(i)]) for i in inputs]
    assert not torch.equal(*found)


def test_a_step_without_data_of_its_own_has_the_inputs_of_the_last() -> None:
    one, other = islice(task_of(job_of("bare")).batches(0, 2), 2)
    assert torch.equal(one[0][0], other[0][0])


def test_weights_are_those_of_the_seed() -> None:
    torch.manual_seed(7)
    true = torch.nn.Linear(4, 2)
    module = whole(task_of(job_of("bare", train={"seed": 7})).model(CPU))
    assert torch.equal(module.weight, true.weight)


def test_what_cannot_be_built_later_is_built_at_once_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = task_of(job_of("from_numpy")).model(CPU)
    assert not any(parameter.is_meta for parameter in model.parameters())
    said = capsys.readouterr().err
    assert said.startswith("model.python 'own:from_numpy': built whole on every rank, for ")
    assert said.count("\n") == 1


def test_batches_come_from_the_data_s_function_with_what_it_asks_for() -> None:
    task = task_of(job_of(batches="good"))
    for rank in (0, 1):
        generator = torch.Generator().manual_seed(30 + rank)
        for _, keywords, targets in islice(task.batches(rank, 2), 3):
            x = torch.randn(6, 4, generator=generator)
            assert torch.equal(keywords["x"], x)
            assert torch.equal(targets, x.sum(1))


def test_a_task_that_a_function_returns_is_the_task() -> None:
    task = task_of(job_of("task"))
    model = task.model(CPU)
    batch, numbers = next(task.held_out(1, 2))
    with torch.no_grad():
        scores = task.scores(model, as_tensors(batch), numbers)
    assert scores[:, 0].tolist() == [1, 3, 5]
    assert task.loss(model, first(task)).item() > 0


def test_scores_of_a_task_come_to_a_mean_by_weight() -> None:
    job = job_of("task")
    scores = np.array([[0.0, 2.0, 6.0], [1.0, 1.0, 0.0]])
    found = source_of(job).quality(scores)
    assert found is not None
    assert (found.rows, found.log_loss) == (2, 2.0)
    assert source_of(job).quality(np.empty((0, 3))) is None


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "ends": "data.python 'own:ends': expected batches for 4 steps, got 2. Let it go on",
    "without_targets": "batch 1: expected (inputs, targets), got dict.",
    "another_dtype": "batch 1: expected inputs like (x=float32 [6, 4], weight=float32 [6]),"
    " got (x=float64 [6, 4], weight=float32 [6]).",
    "another_name": "got (x=float32 [6, 4], weights=float32 [6]).",
    "odd_targets": "batch 1: expected targets like (float32 [6]), got (float32 [6, 1]).",
    "nothing": "expected a function that returns batches, such as a generator, got NoneType.",
    "wants_width": "expected arguments that it takes (width), got missing a required argument",
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", REFUSED)
def test_batches_that_are_none_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError) as refused:
        list(islice(task_of(job_of(batches=name)).batches(0, 2), 4))
    message = str(refused.value)
    assert message.startswith(f"data.python 'own:{name}'")
    assert REFUSED[name] in message
    assert "\n" not in message


def test_a_generator_that_raises_is_named_with_its_batch() -> None:
    batches = task_of(job_of(batches="raises")).batches(1, 2)
    next(batches)
    with pytest.raises(InputError, match=r"expected batch 2, got OSError: the disk is gone\."):
        next(batches)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"model": {"python": "no_such:model"}}, "model.python 'no_such:model': expected an"),
        ({"data": {"python": "own:no_such"}}, "data.python 'own:no_such': expected a function"),
        ({"data": {"kind": "text"}}, "data.kind: expected 'python' for a model of that kind"),
        ({"data": {"path": "rows.tsv"}}, "data.path: expected none for data.kind 'python'"),
    ],
)
def test_a_run_checks_first_what_can_be_imported(sections: dict[str, Any], text: str) -> None:
    job = job_of(**sections)
    with pytest.raises(InputError) as refused:
        source_of(job).check()
    assert str(refused.value).startswith(text)


def test_what_was_imported_leaves_the_path_as_it_was() -> None:
    before = list(sys.path)
    job = job_of(batches="good")
    source_of(job).check()
    assert sys.path == before


def test_a_function_that_has_no_name_is_refused_with_its_key() -> None:
    with pytest.raises(InputError, match=r"data\.python: expected 'package\.module:function'"):
        job_of(data={"python": "own.good"})


def test_a_data_s_function_is_refused_beside_another_kind_of_data() -> None:
    with pytest.raises(InputError, match=r"data\.python: expected none beside data\.kind 'text'"):
        job_of(data={"python": "own:good", "kind": "text"})


def test_a_llama_needs_words_for_all_bytes() -> None:
    job = parse_job(
        {"model": {"kind": "llama", "vocab": 100, "dim": 16, "heads": 2}, "batch": {"sequence": 8}}
    )
    with pytest.raises(InputError, match=r"model\.vocab: expected at least 256 for text"):
        source_of(job).check()
