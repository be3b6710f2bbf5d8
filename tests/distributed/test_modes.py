"""Rows of one table: for parameters, gradients and states whether they are whole or cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mode_tasks as tasks
import probe_tasks
import pytest
from pool import Pool

Trained = Callable[..., list[dict[str, Any]]]
UNEVEN = (  # the ways of which one says something on three ranks that another does not
    *("ddp", "zero1", "zero2 owned", "zero2 rows", "zero2 mixture", "zero3", "zero3 kept"),
    *("zero3 offloaded rows", "zero3 offloaded mixture"),
)
ALONE = ("ddp", "zero1", "zero2 rows", "zero3 offloaded mixture")


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Trained:
    """What ranks find that train; many tests look at one training."""

    @cache
    def found(world_size: int, way: str, flat: bool, holds: bool) -> list[dict[str, Any]]:
        return pool.run(world_size, tasks.train, way=way, flat=flat, holds=holds)

    return found


def _flat(way: str) -> bool:
    """Whether the first tests' training of a way on two ranks is over flat tensors."""
    return "rows" not in way and "mixture" not in way and way != "zero1 offloaded"


def _holds(way: str) -> bool:
    """Whether it sums the gradients of a step once."""
    return way in ("zero1", "zero2 owned", "zero3 kept", "ddp offloaded", "zero3 offloaded rows")


@pytest.mark.parametrize("way", tasks.WAYS)
def test_every_row_trains_as_one_process(trained: Trained, way: str) -> None:
    assert max(rank["apart"] for rank in trained(2, way, _flat(way), _holds(way))) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ways"), [(1, ALONE), (3, UNEVEN)], ids=["1", "3"])
def test_so_it_does_alone_and_on_ranks_that_do_not_divide(
    trained: Trained, world_size: int, ways: tuple[str, ...]
) -> None:
    for way in ways:
        found = trained(world_size, way, not _flat(way), not _holds(way))
        assert max(rank["apart"] for rank in found) <= 2e-6, way


@pytest.mark.product
@pytest.mark.parametrize("flat", [True, False], ids=["flat optimizer", "model.parameters"])
@pytest.mark.parametrize("holds", [True, False], ids=["one sum", "a sum each"])
@pytest.mark.parametrize("way", tasks.WAYS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_row_trains_so_with_every_optimizer(
    trained: Trained, world_size: int, way: str, holds: bool, flat: bool
) -> None:
    assert max(rank["apart"] for rank in trained(world_size, way, flat, holds)) <= 2e-6


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "way", ["zero1", "zero3", "zero2 ahead", "zero3 kept", "zero3 offloaded mixture"]
)
def test_forwards_that_run_again_inside_of_their_hooks_have_whole_parameters(
    pool: Pool, way: str
) -> None:
    found = pool.run(2, tasks.train, way=way, flat=True, holds=False, again=True)
    assert max(rank["apart"] for rank in found) <= 2e-6


# Per unit and step of three backwards: gathers, sums of gradients where they are held back.
CALLS = {
    "ddp": (0, 1),
    "zero1": (1, 1),
    "zero2": (1, 1),
    "zero2 owned": (1, 1),
    "zero2 ahead": (1, 1),
    "zero3": (6, 1),
    "zero3 kept": (3, 1),
    "ddp offloaded": (0, 1),
    "zero2 offloaded": (1, 1),
    "zero3 offloaded": (6, 1),
}


@pytest.mark.parametrize("way", CALLS)
def test_a_step_has_the_collectives_of_its_row(trained: Trained, way: str) -> None:
    _hold_calls(trained, way, _holds(way))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        *("ddp", "zero1", "zero2", "zero3"),
        *(pytest.param(way, marks=pytest.mark.product) for way in CALLS if " " in way),
    ],
)
def test_so_it_has_where_sums_are_held_back_or_not(trained: Trained, way: str) -> None:
    _hold_calls(trained, way, not _holds(way))


def _hold_calls(trained: Trained, way: str, holds: bool) -> None:
    gathers, sums = CALLS[way]
    sums *= 1 if holds else tasks.BACKWARDS
    for rank in trained(2, way, True, holds):
        for found, _ in rank["calls"][1:]:
            kinds = 2 if "owned" in way else 1  # scalars are whole on every rank
            units = 4 + 3 * (kinds - 1)
            assert found.get("gather", 0) == gathers * 4
            assert found["reduce"] == sums * units


SHARED = ("zero1", "zero2", "zero3", "zero2 offloaded", "zero3 offloaded")


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(2, ("ddp", *SHARED)), pytest.param(3, ("zero1", "zero3"), marks=pytest.mark.slow)],
    ids=["2", "3"],
)
def test_a_rank_keeps_what_its_row_says(
    pool: Pool, trained: Trained, world_size: int, ways: tuple[str, ...]
) -> None:
    (whole, share) = _sizes(pool, world_size)
    rows = {
        "zero1": (whole, share, share),
        "zero2": (whole, share, share),
        "zero3": (share, share, share),
        "zero2 offloaded": (share + whole, share, share),
        "zero3 offloaded": (share, share, share),
    }
    for way in ways:
        for rank in trained(world_size, way, True, _holds(way)):
            kept = rank["bytes"]
            if way == "ddp":
                assert len(set(kept.values())) == 1
                assert kept["parameter"] <= whole
            else:
                assert tuple(kept.values()) == rows[way], way


def _sizes(pool: Pool, world_size: int) -> tuple[int, int]:
    found: dict[str, Any] = pool.run(world_size, tasks.sizes)[0]
    return found["whole"], found["share"]


def test_accumulation_keeps_a_whole_gradient_or_its_share(trained: Trained) -> None:
    payload = sum(p.nbytes for p in tasks.net().parameters())
    (first, *_), (second, *_) = (
        trained(2, way, True, holds) for way, holds in (("zero1", True), ("zero2", False))
    )
    assert first["between"] == [payload, payload, 0] * tasks.STEPS
    assert second["between"] == [0, 0, 0] * tasks.STEPS


@pytest.mark.parametrize(
    ("world_size", "way"), [(2, "zero2"), (2, "zero2 owned"), (3, "zero2 rows")]
)
def test_whole_parameters_travel_when_they_have_changed(
    pool: Pool, world_size: int, way: str
) -> None:
    for found in pool.run(world_size, tasks.looks, way=way):
        assert found == [{"gather": 4}, {}, {"gather": 4}, {}]


@pytest.mark.parametrize("world_size", [1, 3])
def test_shares_are_stretches_of_the_whole_parameters(pool: Pool, world_size: int) -> None:
    for found in pool.run(world_size, tasks.shares_are_views):
        assert all(found)


@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_parameters_of_another_dtype_stay_beside_their_shares(
    pool: Pool, world_size: int
) -> None:
    _, share = _sizes(pool, world_size)
    for apart, kept, whole in pool.run(world_size, tasks.half):
        assert apart == 0.0
        assert kept["parameter"] == share + whole
        assert kept["optimizer_state"] == share


@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_tensors_are_whole_and_do_not_travel(pool: Pool, world_size: int) -> None:
    for apart, calls in pool.run(world_size, tasks.frozen):
        assert apart <= 2e-6
        assert calls == {"gather": 4, "reduce": 4}


def test_weights_that_change_before_their_backward_are_refused(pool: Pool) -> None:
    for said in pool.run(2, tasks.changed_between):
        assert "expected the weights of its forward" in said


def test_options_that_do_not_go_together_are_refused(pool: Pool) -> None:
    for unknown, truth, both, pair in pool.run(2, tasks.refusals):
        assert unknown.startswith("zero: expected 1, 2 or 3, got 0. For DDP")
        assert truth.startswith("zero: expected 1, 2 or 3, got True.")
        wanted = "reshard_after_forward: expected False or None beside zero=2"
        assert both.startswith(wanted)
        wanted = "zero: expected a stage, or (1, 3) or (2, 3) on a mesh of (replicate, shard)"
        assert pair.startswith(f"{wanted}, got (2, 3) on 1 dimension. To cut parameters")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("zero", [(2, 3), 1, 2, 3], ids=str)
def test_replicas_of_shards_at_every_stage(pool: Pool, zero: Any) -> None:
    pool.run(4, probe_tasks.make_grids)
    whole, share = _sizes(pool, 2)
    _, fourth = _sizes(pool, 4)
    both = isinstance(zero, tuple)
    cut = both or zero == 3
    gathers = tasks.BACKWARDS * (2 * 4 - 1) if cut else 4
    options = {"rows": 2, "cut": "flat", "zero": zero, "flat": True}
    for found in pool.run(4, tasks.train_on_grid, **options):
        assert found["apart"] <= 2e-6
        sums = 4 * tasks.BACKWARDS
        over = {"gather over replicas": 4} if both else {}
        assert found["calls"] == {
            "gather": gathers,
            "reduce": sums,
            "reduce over replicas": sums,
            **over,
        }
        kept = found["bytes"]
        assert kept["parameter"] == (2 * fourth if both else share if cut else whole)
        assert kept["gradient"] == kept["optimizer_state"] == (fourth if both else share)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("rows", "columns", "cut", "flat"),
    [
        (2, 1, "flat", True),
        (2, 2, "mixture", False),
        (1, 2, "rows", True),
        (2, 2, "flat", False),
        (2, 2, "rows", True),
        (2, 2, "owned", True),
        (2, 1, "mixture", True),
    ],
)
def test_states_are_cut_over_replicas_too(
    pool: Pool, rows: int, columns: int, cut: str, flat: bool
) -> None:
    _hold_states(pool, rows, columns, cut, flat)


@pytest.mark.product
@pytest.mark.parametrize("flat", [True, False], ids=["flat optimizer", "model.parameters"])
@pytest.mark.parametrize("cut", ["flat", "rows", "owned", "mixture"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)])
def test_so_they_are_on_every_grid(
    pool: Pool, rows: int, columns: int, cut: str, flat: bool
) -> None:
    _hold_states(pool, rows, columns, cut, flat)


def _hold_states(pool: Pool, rows: int, columns: int, cut: str, flat: bool) -> None:
    pool.run(4, probe_tasks.make_grids)
    options = {"rows": rows, "cut": cut, "zero": (2, 3), "flat": flat, "narrow": not flat}
    for found in pool.run(rows * columns, tasks.train_on_grid, **options):
        assert found["apart"] <= 2e-6
        kept = found["share"] - found["alone"]
        assert found["bytes"]["parameter"] == rows * kept + found["alone"]
        if flat:
            assert found["bytes"]["optimizer_state"] == found["share"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("cut", ["mixture", "flat", "rows", "owned"])
def test_users_see_whole_tensors_whoever_has_which_part(pool: Pool, cut: str) -> None:
    pool.run(4, probe_tasks.make_grids)
    for found in pool.run(4, tasks.asked_on_grid, cut=cut):
        assert max(found.values()) <= 2e-6, found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("cut", ["mixture", "flat", "rows", "bf16"])
def test_neighbouring_shares_follow_what_is_written(pool: Pool, cut: str) -> None:
    pool.run(4, probe_tasks.make_grids)
    for written, loaded in pool.run(4, tasks.written_on_grid, cut=cut):
        assert written <= (0.1 if "bf16" in cut else 1e-6)
        assert loaded <= (0.1 if "bf16" in cut else 1e-6)


@pytest.mark.parametrize("way", ["zero3", "ddp"])
def test_copies_between_memories_go_on_beside_computing(pool: Pool, way: str) -> None:
    for step, forward in pool.run(2, tasks.copies_of_a_step, way=way):
        # the root has no parameters; then the layers, in the order of their forwards
        for number, layer in enumerate((0, 1, 2), start=1):
            its, following = f"device {number}", f"device {number + 1}"
            waits = f"computing waits for {its}"
            for found in (step, forward):
                assert found.index(its) < found.index(waits) < found.index(f"forward {layer}")
                if layer < 2:
                    assert found.index(following) < found.index(f"forward {layer}")
            # where no backward tells, host memory may be written once a forward is over
            assert forward.index(f"forward {layer}") < forward.index(f"the host waits for {its}")
        for number, layer in enumerate((2, 1, 0), start=5):
            waits = step.index(f"computing waits for device {number}")
            assert step.index(f"device {number}") < waits < step.index(f"backward {layer}")
        for number, layer in enumerate((2, 1, 0)):
            copy = step.index(f"host {number}")
            assert step.index(f"{layer} reduce") < copy
            assert layer < 2 or copy < step.index("backward 0")
            assert step.index("backward 0") < step.index(f"the host waits for host {number}")
        assert all(step.index(f"the host waits for device {n}") < len(step) - 1 for n in (5, 6, 7))
        assert step[-1] == "step"
