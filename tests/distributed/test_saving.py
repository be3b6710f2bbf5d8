"""What was saved goes on as if it had never stopped, under any world size, cut and optimizer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import saving_tasks as tasks
import torch
from pool import Pool, Threads
from reference import small_job, train_unsharded
from saving_tasks import Case

from shardwright.estimate.recordings import plan

KINDS = ("sgd", "adamw", "adagrad")
STRATEGIES = ("flat", "per_param", "param_boundary", "mixed", "replicated")
Saved = dict[Case, tuple[Path, Any]]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a case that three ranks saved, and how they went on."""
    made: Saved = {}

    def of(case: Case) -> tuple[Path, Any]:
        if case not in made:
            folder = tmp_path_factory.mktemp("saved")
            made[case] = folder, pool.run(3, tasks.begin, folder=str(folder), case=case)[0]
        return made[case]

    return of


def hold(results: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Losses and weights of every rank are the wanted ones."""
    losses, weights = wanted
    for found, found_weights in results:
        assert found == pytest.approx(losses, rel=0, abs=tolerance)
        assert found_weights.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(
                found_weights[name], weight, rtol=0, atol=tolerance, msg=name
            )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "strategy", "form"),
    [
        *(("adamw", "flat", "flat groups"), ("sgd", "per_param", "flat groups")),
        *(("adamw", "param_boundary", "flat groups"), ("adagrad", "mixed", "parameters")),
        *(("adamw", "replicated", "flat groups"), ("sgd", "flat", "parameters")),
    ],
)
def test_the_same_cut_goes_on_bit_by_bit(
    pool: Pool, saved: Any, kind: str, strategy: str, form: str
) -> None:
    case = Case(kind, strategy, form)
    folder, wanted = saved(case)
    hold(pool.run(3, tasks.resume, folder=str(folder), case=case), wanted, 0.0)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("strategy", "kind", "world_size"),
    [
        *(("flat", "adamw", 2), ("per_param", "sgd", 1)),
        *(("per_param", "sgd", 2), ("flat", "adagrad", 1), ("flat", "adamw", 4)),
    ],
)
def test_other_ranks_go_on(
    pool: Pool, saved: Any, kind: str, strategy: str, world_size: int
) -> None:
    folder, wanted = saved(Case(kind, strategy, "flat groups"))
    other = Case(kind, strategy, "flat groups", one_unit=True)
    hold(pool.run(world_size, tasks.resume, folder=str(folder), case=other), wanted)


FORMS = ("flat groups", "parameters groups")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("source", STRATEGIES)
def test_another_strategy_and_another_view_of_the_optimizer_go_on(
    pool: Pool, saved: Any, source: str, shift: int
) -> None:
    number = STRATEGIES.index(source)
    target = STRATEGIES[(number + shift) % len(STRATEGIES)]
    first, second = FORMS if (number + shift) % 3 else FORMS[::-1]
    folder, wanted = saved(Case("adamw", source, first))
    hold(pool.run(2, tasks.resume, folder=str(folder), case=Case("adamw", target, second)), wanted)


@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", STRATEGIES)
@pytest.mark.parametrize("target", STRATEGIES)
def test_every_strategy_goes_on_as_every_other(
    pool: Pool, saved: Any, kind: str, source: str, target: str
) -> None:
    for first, second in itertools.permutations(FORMS):
        folder, wanted = saved(Case(kind, source, first))
        for ranks in (1, 2, 3, 4):
            other = Case(kind, target, second)
            hold(pool.run(ranks, tasks.resume, folder=str(folder), case=other), wanted)


def test_one_group_goes_on_as_two(pool: Pool, saved: Any) -> None:
    folder, wanted = saved(Case())
    for form in ("flat groups", "parameters groups"):
        results = pool.run(2, tasks.resume, folder=str(folder), case=Case(form=form))
        hold(results, wanted)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_has_taken_steps_forgets_them(pool: Pool, saved: Any, kind: str) -> None:
    case = Case(kind)
    folder, wanted = saved(case)
    results = pool.run(3, tasks.resume, folder=str(folder), case=case, stepped=True)
    hold(results, wanted, 0.0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("form", "zero"), [("flat", (2, 3)), ("parameters", 3)], ids=str)
def test_replicas_times_shards_save_and_load(
    pool: Pool, saved: Any, tmp_path: Path, zero: Any, form: str
) -> None:
    case, alike = Case(form=form), Case(form=form, zero=zero)
    wanted = pool.run(4, tasks.begin_on_grid, folder=str(tmp_path), case=alike)[0]
    hold(pool.run(4, tasks.resume_on_grid, folder=str(tmp_path), case=alike), wanted, 0.0)
    hold(pool.run(4, tasks.resume_on_grid, folder=str(tmp_path), case=case), wanted)
    hold(pool.run(3, tasks.resume, folder=str(tmp_path), case=case), wanted)
    folder, wanted = saved(case)
    hold(pool.run(4, tasks.resume_on_grid, folder=str(folder), case=alike), wanted)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("form", "strategy"), [("flat", "mixed"), ("parameters", "flat")])
def test_shards_in_host_memory_save_and_load(
    pool: Pool, saved: Any, tmp_path: Path, strategy: str, form: str
) -> None:
    here, there = Case(form=form, strategy=strategy), Case(form=form, offloaded=True)
    wanted = pool.run(2, tasks.begin, folder=str(tmp_path), case=there)[0]
    hold(pool.run(2, tasks.resume, folder=str(tmp_path), case=there), wanted, 0.0)
    hold(pool.run(3, tasks.resume, folder=str(tmp_path), case=here), wanted)
    folder, wanted = saved(here)
    hold(pool.run(2, tasks.resume, folder=str(folder), case=there), wanted)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names_and_values_are_those_of_the_unsharded_model(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    assert (
        pool.run(3, tasks.save_untrained, folder=str(tmp_path), case=Case(strategy=strategy))
        == [[]] * 3
    )


@pytest.mark.parametrize("strategy", ["flat", "per_param", "replicated"])
def test_a_model_on_the_meta_device_is_filled_after_to_empty(
    pool: Pool, saved: Any, strategy: str
) -> None:
    folder, _ = saved(Case())
    results = pool.run(3, tasks.load_on_meta, folder=str(folder), case=Case(strategy=strategy))
    for refusal, found, wanted in results:
        assert refusal.startswith("InputError: ")
        assert "of unit 'First': expected a real tensor, got one on the meta device" in refusal
        assert found.keys() == wanted.keys() | {"first.again.weight"}
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert torch.equal(found["first.again.weight"], wanted["first.0.weight"])


def test_loading_fills_in_place_whatever_shows_the_weights(pool: Pool, saved: Any) -> None:
    folder, _ = saved(Case())
    results = pool.run(2, tasks.load_while_unsharded, folder=str(folder))
    assert results == [("sharded", [True] * 3, True, True)] * 2


REFUSALS = {
    "another model": "step-3: last.weight: expected shape (4, 5) as in the model, got (3, 5)",
    "more layers": "param_groups[0]: expected parameters that the saved optimizer had, got first.",
    "optimizer": "optimizer state of first.0.weight: expected step, sum, which Adagrad keeps, got ",
    "fewer parameters": "got 3 that the model lacks (optimizer/offset/",
    "stale optimizer": "expected a parameter of the model, or of its last optimizer_parameters",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    pool: Pool, saved: Any, what: str
) -> None:
    folder, _ = saved(Case())
    for text, kept in pool.run(2, tasks.refusal, folder=str(folder), what=what):
        assert REFUSALS[what] in text
        assert "\n" not in text
        assert kept


def test_groups_with_other_settings_do_not_become_one(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, tasks.merged_groups, folder=str(tmp_path)):
        assert text == (
            "MismatchError: optimizer.param_groups[0]: expected parameters of one saved group, got "
            "some of group 0 with weight_decay 0.2 and of group 1 with 0.01. Make the groups as "
            "they were saved."
        )


def test_a_checkpoint_without_optimizer_is_refused_to_one(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, tasks.without_optimizer, folder=str(tmp_path)):
        assert text == (
            f"MismatchError: {tmp_path / 'step-1'}: expected the state of an optimizer, got none. "
            "Save with the optimizer, or load without it."
        )


@pytest.mark.parametrize(
    ("how", "whole"),
    [
        ("full disk", "earlier checkpoints are whole, and "),
        ("a file in its place", ""),  # where there were some, there are none
    ],
)
def test_training_goes_on_after_a_save_that_one_rank_could_not_write(
    pool: Pool, tmp_path: Path, how: str, whole: str
) -> None:
    results = pool.run(3, tasks.survives_a_failed_save, folder=str(tmp_path), how=how, rank=1)
    for text, same, name in results:
        assert text.startswith("RunError")
        assert text.endswith(f"on rank 1. Nothing was saved; {whole}training can go on.")
        assert same
        assert name == "step-4"
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["step-4"]


@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "no guard"])
def test_a_save_goes_on_at_the_first_step_at_which_no_rank_writes(
    threads: Threads, tmp_path: Path, guarded: bool
) -> None:
    results = threads.run(2, tasks.held_back, folder=str(tmp_path), guarded=guarded)
    assert results == [(False, True, 1)] * 2


@pytest.mark.parametrize("what", ["no units", "several meshes"])
def test_a_model_that_does_not_say_its_ranks_is_saved_by_those_that_are_given(
    pool: Pool, tmp_path: Path, what: str
) -> None:
    for text, names in pool.run(4, tasks.unknown_ranks, folder=str(tmp_path), what=what):
        assert text.startswith("InputError: mesh: expected ")
        assert "Pass mesh=..." in text
        assert names == sorted(set(tasks.network(1).state_dict()) - {"first.again.weight"})


def test_random_numbers_go_on_where_there_are_as_many_ranks(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, tasks.random_numbers, folder=str(tmp_path), ranks=2) == [(True, True)] * 2
    assert pool.run(3, tasks.random_numbers, folder=str(tmp_path), ranks=2) == [(False, False)] * 3


# ---- state dicts ---------------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("strategy", "form"), [(strategy, FORMS[i % 2]) for i, strategy in enumerate(STRATEGIES)]
)
def test_distributed_checkpoint_saves_and_loads_model_and_optimizer(
    pool: Pool, tmp_path: Path, strategy: str, form: str
) -> None:
    case = Case("adamw", strategy, form)
    wanted = pool.run(3, tasks.dcp_save, folder=str(tmp_path), case=case)[0]
    wanted[1].pop("seen")
    other = Case("adamw", "flat", form, one_unit=True)  # torch wants as many groups
    for world_size, chosen in ((2, other), (3, case)):
        results = pool.run(world_size, tasks.dcp_load, folder=str(tmp_path), case=chosen)
        for _, weights in results:
            weights.pop("seen")
        hold(results, wanted)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *zip(STRATEGIES, (*STRATEGIES[1:], STRATEGIES[0]), strict=True),
        *(("flat", "flat"), ("mixed", "mixed"), ("per_param", "flat"), ("flat", "mixed")),
    ],
)
def test_state_dicts_of_one_cut_are_taken_by_another(pool: Pool, source: str, target: str) -> None:
    cases = {"source": Case(strategy=source), "target": Case("adamw", target, "parameters")}
    for cloned in (False, True) if source == target else (False,):
        for found, true in pool.run(3, tasks.take_over, cloned=cloned, **cases):
            assert found == pytest.approx(true, rel=0, abs=1e-6)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("kind", "strategy", "form"),
    [
        *(("adamw", "flat", "flat groups"), ("sgd", "mixed", "parameters")),
        *(("adagrad", "per_param", "flat groups"), ("adamw", "replicated", "parameters")),
        *(("sgd", "param_boundary", "flat groups"), ("adamw", "flat", "parameters")),
    ],
)
def test_the_optimizer_state_dict_is_torchs_of_the_unsharded_model(
    pool: Pool, kind: str, strategy: str, form: str
) -> None:
    for own, true in pool.run(3, tasks.beside_torch, case=Case(kind, strategy, form)):
        true["state"].pop("first.empty", None)
        own["state"].pop("first.empty", None)
        assert tasks.different(own, true, 1e-6) == []
        names = {name for group in true["param_groups"] for name in group["params"]}
        assert {name for group in own["param_groups"] for name in group["params"]} >= names - {
            "first.empty"
        }


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kind", "strategy"), [(KINDS[(i + 1) % 3], strategy) for i, strategy in enumerate(STRATEGIES)]
)
def test_torchs_optimizer_state_of_the_unsharded_model_is_taken(
    pool: Pool, kind: str, strategy: str
) -> None:
    for found, true in pool.run(3, tasks.take_torchs, case=Case(kind, strategy, "flat groups")):
        assert found == pytest.approx(true, rel=0, abs=1e-6)


STATES = {
    "name": "InputError: optimizer state: expected the name of a parameter of the model",
    "shape": "InputError: state 'exp_avg' of first.0.weight: expected a number or shape (7, 5)",
    "kind": "MismatchError: optimizer state of last.bias: expected exp_avg, exp_avg_sq, step, as",
    "step": "MismatchError: state 'step' of last.bias: expected 1.0, as of first.",
    "keys": "InputError: optimizer state: expected the keys 'state' and 'param_groups', got ",
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_dict_that_does_not_fit_is_refused_by_name(pool: Pool, what: str) -> None:
    for text, kept in pool.run(2, tasks.refused_state, what=what):
        assert text.startswith(STATES[what])
        assert kept


# ---- tables --------------------------------------------------------------------------------------

FOUR = ("data_parallel", "table_wise", "row_wise") * 2
TWO = ("row_wise", "data_parallel", "table_wise", "table_wise", "row_wise", "row_wise")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_planned_model_goes_on_under_another_plan(
    pool: Pool, tmp_path: Path, optimizer: str
) -> None:
    four = FOUR if optimizer == "adagrad" else ("column_wise", *FOUR[1:])
    two = TWO if optimizer == "adagrad" else (*TWO[:5], "column_wise")
    jobs = {
        4: small_job(four, ("shard", "shard"), 4, optimizer),
        2: small_job(two, ("replicate", "shard"), 2, optimizer),
        3: small_job(four, ("shard", "replicate"), 3, optimizer),
    }
    losses, weights = train_unsharded(jobs[4])
    for world_size, steps in ((4, 2), (2, 3), (3, 5)):
        results = pool.run(
            world_size,
            tasks.train_planned,
            folder=str(tmp_path),
            made=plan(jobs[world_size]),
            steps=steps,
            per_unit=world_size == 2,
        )
        assert all(found == results[0][0] for found, _ in results)
        part, losses = losses[: len(results[0][0])], losses[len(results[0][0]) :]
        assert results[0][0] == pytest.approx(part, rel=0, abs=5e-6)
    assert not losses
    for _, found in results:
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=5e-6, msg=name)


def test_row_sums_are_loaded_with_their_tables(pool: Pool, tmp_path: Path) -> None:
    job, folder = small_job(FOUR, ("shard", "shard"), 3, "adagrad"), str(tmp_path)
    pool.run(3, tasks.train_planned, folder=folder, made=plan(job), steps=2, per_unit=False)
    other = small_job(TWO, ("shard", "shard"), 2, "adagrad")
    for saved, found, sums in pool.run(2, tasks.load_tables_alone, folder=folder, made=plan(other)):
        assert saved.keys() == found.keys()
        assert all(torch.equal(saved[name], found[name]) for name in saved)
        assert sums
        assert all(sums)
