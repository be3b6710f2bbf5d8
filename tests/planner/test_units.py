from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from choosing import choose_units
from hypothesis import given
from hypothesis import strategies as st
from recordings import chain, model_of_chain, unit

from shardwright.core.errors import InputError, NoPlanError
from shardwright.core.model import UnitSpec
from shardwright.core.schedule import Modes
from shardwright.cost.dense import update_seconds
from shardwright.cost.network import latency_seconds
from shardwright.cost.presets import LOCAL
from shardwright.estimate.recordings import described, plan
from shardwright.job.job import Job, parse_job
from shardwright.job.planner import DenseSection
from shardwright.planner.draft import Found
from shardwright.planner.explain import draft_of
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import (
    _StepSearch,
    search_steps,
    smallest,
    step_bound,
    unit_floors,
)
from shardwright.planner.unit_choice import DenseContext, merged
from shardwright.planner.units import (
    WORTH,
    Arrangement,
    UnitSpace,
    cut_evenly,
    fastest_first,
    worthwhile,
)

MakeJob = Callable[..., Job]
TINY, MID = 50_000 * 4, 3_150_000 * 4  # bytes of a layer of width 64 and of width 512
SHARDED = {"embed": "shard", "layers": "shard", "head": "shard"}
VALUES = {name: constant.value for name, constant in LOCAL.items()}
PAIR = DenseContext(ranks=2, local=None, c=VALUES)


def make_layers(layers: int = 6, dim: int = 16, ranks: int = 2, **sections: Any) -> Job:
    """A transformer on ``ranks`` ranks."""
    return parse_job(
        {
            "model": {
                "kind": "transformer",
                "layers": layers,
                "dim": dim,
                "heads": 2,
                "vocab": 4 * dim,
            },
            "cluster": {"world_size": ranks},
            "batch": {"size": 2, "sequence": 16},
            "train": {"optimizer": "adam"},
        }
        | sections
    )


def _found(job: Job) -> Found:
    return search_steps(job, described(job), Watch())


def _problem(job: Job) -> Problem:
    return make_problem(job, described(job))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        *(("transformer", {"zero": zero}) for zero in (1, 2, 3)),
        *(("llama", {"zero": zero}) for zero in (1, 2, 3)),
        ("llama", {"param_dtype": "bf16"}),
    ],
    ids=str,
)
def test_no_arrangement_takes_less_than_what_spares_its_step(
    kind: str, policy: str, memory: dict[str, Any]
) -> None:
    model = {"kind": kind, "layers": 3, "dim": 32, "heads": 2, "vocab": 96}
    sections = {"model": model, "memory": {"checkpointing": policy} | memory}
    problem = _problem(make_layers(train={"optimizer": "adamw"}, **sections))
    activations = _StepSearch(problem, Watch(), 0.0).activations
    left = [
        StepDraft(problem, (), a.units, a.prefetch).highest_peak
        - max(a.kept, a.at_rest + activations)
        for a in problem.unit_space.arrangements
    ]
    assert activations > 0
    assert min(left) >= 0


def _sizes(arrangement: Arrangement | None) -> list[int]:
    assert arrangement is not None
    return [len(choice.unit.members) for choice in arrangement.units]


def _layers(found: Found) -> list[int]:
    assert found.draft is not None
    return [len(choice.unit.members) for choice in found.draft.units[1:-1]]


@given(length=st.integers(1, 200), size=st.integers(1, 200))
def test_a_run_is_cut_into_neighbours_of_sizes_that_differ_by_one_at_most(
    length: int, size: int
) -> None:
    run = tuple(UnitSpec(str(i), ()) for i in range(length))
    parts = cut_evenly(run, size)
    assert tuple(itertools.chain.from_iterable(parts)) == run
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= size
    assert len(parts) == math.ceil(length / size)


def test_a_merged_unit_is_named_by_its_first_and_last_layer() -> None:
    units = described(make_layers()).units
    pair = merged(units[2:4])
    assert (pair.name, pair.series) == ("layers.1-2", "layers")
    assert pair.tensors == units[2].tensors + units[3].tensors
    assert merged(units[2:3]) is units[2]


def test_only_neighbours_of_one_series_may_share_a_unit() -> None:
    space = _problem(make_layers(4)).unit_space
    assert [[unit.name for unit in run] for run in space.runs] == [
        ["embed"],
        ["layers.0", "layers.1", "layers.2", "layers.3"],
        ["head"],
    ]


def test_every_cut_of_the_longest_run_is_tried() -> None:
    assert _problem(make_layers(12)).unit_space.sizes == (1, 2, 3, 4, 6, 12)
    assert _problem(make_layers(7)).unit_space.sizes == (1, 2, 3, 4, 7)


def test_units_of_a_dlrm_are_neither_merged_nor_gathered_ahead(make_job: MakeJob) -> None:
    space = _problem(make_job(50)).unit_space
    found = space.arrangements
    assert {a.prefetch for a in found} == {0}
    assert [u.unit.name for u in found[0].units] == ["bottom", "top"]
    ways = [("replicated" if u.replicated else u.reshard) for a in found for u in a.units]
    assert len(found) == 9
    assert {*ways} == {"replicated", False, True}


def test_small_layers_are_merged_and_large_ones_are_not() -> None:
    """24 layers of width 64 in few units, 8 of width 512 alone."""
    flops = {TINY: 3 * 10**6, MID: 800 * 10**6}
    small = choose_units([TINY] * 24, [flops[TINY]] * 24, PAIR, operations=12)
    large = choose_units([MID] * 8, [flops[MID]] * 8, PAIR, operations=12)
    assert max(_sizes(small)) >= 6
    assert _sizes(large) == [1] * 8


@pytest.mark.parametrize(("layers", "dim", "merged"), [(24, 64, True), (8, 512, False)])
def test_layers_of_a_transformer_are_merged_where_latency_dominates(
    layers: int, dim: int, merged: bool
) -> None:
    planner = {"units": SHARDED, "dense": {"reshard": True}}
    found = _found(make_layers(layers, dim, planner=planner))
    assert (max(_layers(found)) > 1) == merged


def test_merging_beyond_what_malloc_keeps_costs_new_memory() -> None:
    """Two units of four layers of 12.6 MB are slower than eight of one; with an allocator that
    keeps every buffer they are not."""

    def seconds(size: int, c: dict[str, float]) -> float:
        setting = DenseContext(2, None, c)
        section = DenseSection(layers_per_unit=size, prefetch=0, reshard=True)
        found = choose_units([MID] * 8, [0] * 8, setting, section=section)
        assert found is not None
        return found.seconds

    assert seconds(4, VALUES) > 1.3 * seconds(1, VALUES)
    keeping = VALUES | {"fresh_memory_bytes": 1e12}
    assert seconds(4, keeping) < seconds(1, keeping)


def test_latency_decides_how_many_layers_share_a_unit() -> None:
    sizes = []
    for latency in (1e-6, 1e-4, 1e-2):
        links = {f"{kind}_latency": latency for kind in ("all_gather", "reduce_scatter")}
        setting = DenseContext(2, None, VALUES | links)
        sizes.append(max(_sizes(choose_units([10**6] * 12, [10**7] * 12, setting))))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_less_memory_makes_smaller_units_or_none() -> None:
    plenty = choose_units([TINY] * 24, [10**6] * 24, PAIR)
    assert plenty is not None
    sizes = []
    for share in (1.0, 0.8, 0.7):
        memory = int(plenty.footprint * share)
        found = choose_units([TINY] * 24, [10**6] * 24, PAIR, memory=memory)
        assert found is not None
        assert found.footprint <= memory
        sizes.append(max(_sizes(found)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    assert choose_units([TINY] * 24, [10**6] * 24, PAIR, memory=1000) is None


ON_GPU = {"preset": "h100-8", "world_size": 2}
LLAMA = {"kind": "llama", "layers": 5, "dim": 64, "heads": 2, "vocab": 96}


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    "sections", [{}, {"model": LLAMA, "cluster": ON_GPU}], ids=["a CPU", "GPUs"]
)
def test_floors_are_below_seconds_which_are_those_of_every_action(
    sections: dict[str, Any], zero: int
) -> None:
    space = _problem(make_layers(memory={"zero": zero}, **sections)).unit_space
    _check_seconds(space)


def _check_seconds(space: UnitSpace) -> None:
    for a in space.arrangements:
        assert a.seconds == math.fsum(s.seconds for s in space.walk(a.units, a.modes))
        assert 0 < a.floor <= a.seconds


def test_what_the_root_computes_counts_once() -> None:
    """Its unit has another name than it is recorded under, which is that of no unit."""
    units = chain([unit("", 100), unit("layers.0", 100), unit("layers.1", 100)])
    _check_seconds(UnitSpace(model_of_chain(units), PAIR))


def test_arrangements_come_by_their_seconds_and_few_of_them_are_walked_for_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _problem(make_layers(12, 64)).unit_space.arrangements
    expected = sorted(found, key=lambda a: a.seconds)
    assert list(fastest_first(found, lambda _: False)) == expected
    even = [a for a in expected if not a.prefetch]
    assert list(fastest_first(found, lambda a: bool(a.prefetch))) == even
    space, walk, walked = _problem(make_layers(12, 64)).unit_space, UnitSpace.walk, list[Modes]()

    def counted(self: UnitSpace, units: Any, modes: Modes) -> Any:
        walked.append(modes)
        return walk(self, units, modes)

    monkeypatch.setattr(UnitSpace, "walk", counted)
    first = next(fastest_first(space.arrangements, lambda _: False))
    assert first.seconds == expected[0].seconds
    assert 0 < len(walked) < len(found) // 2


def test_what_is_chosen_is_the_first_that_fits_of_all_by_their_seconds() -> None:
    """However few of them are looked at."""
    sections: dict[str, Any] = {"model": {**LLAMA, "vocab": 32000, "dim": 1024}, "cluster": ON_GPU}
    job = make_layers(batch={"size": 8, "sequence": 2048}, **sections)
    model = described(job)
    problem = make_problem(job, model)
    order = sorted(problem.unit_space.arrangements, key=lambda a: a.seconds)
    needs = [StepDraft(problem, (), order[0].units, order[0].prefetch).needs[1]]
    needs.append(smallest(problem).needs[1])
    seen = set()
    for share in (-2.0, 0.0, 0.3, 0.7, 1.0):
        cap = int(needs[1] + share * (needs[0] - needs[1]))
        cluster = msgspec.structs.replace(job.cluster, hbm_cap=cap)
        its = make_problem(msgspec.structs.replace(job, cluster=cluster), model)
        seeker, plain = (_StepSearch(its, Watch(), 0.0) for _ in range(2))
        seeker.arrange()
        first = next(filter(plain._fits, order), None)
        before = order[: order.index(first)] if first else order
        assert seeker.gave_up == any(a.kept <= cap for a in before)
        if first is not None:
            seconds = plain._draft(first).max_rank_seconds
            first = next(filter(plain._fits, worthwhile(order, first, seconds)), first)
            assert seeker.best is not None
            assert (seeker.best.units, seeker.best.prefetch) == (first.units, first.prefetch)
            assert seeker.best.needs[1] <= cap
        assert (seeker.tried - (not first), seeker.feasible) == (plain.tried, plain.feasible)
        seen.add((first is not None, seeker.gave_up, plain.tried > plain.feasible))
    assert len(seen) > 2, seen


def test_larger_units_have_to_be_worth_their_memory() -> None:
    space = _problem(make_layers(8, 512, planner={"units": SHARDED})).unit_space
    found = space.arrangements
    chosen = _found(make_layers(8, 512, planner={"units": SHARDED})).draft
    assert chosen is not None
    fastest = min(found, key=lambda a: a.seconds)
    took = next(
        a
        for a in found
        if (a.prefetch, [u.unit.name for u in a.units])
        == (chosen.prefetch, [u.unit.name for u in chosen.units])
        and [u.reshard for u in a.units] == [u.reshard for u in chosen.units]
    )
    assert took.footprint < fastest.footprint
    assert took.seconds <= fastest.seconds * (1 + WORTH)


@pytest.mark.slow
def test_the_plan_is_the_fastest_arrangement_that_fits_but_for_what_is_not_worth_it() -> None:
    for cap in (376_616, 400_000, 450_000, "1 GiB"):
        found = _found(make_layers(5, 16, cluster={"world_size": 2, "ddr_cap": cap}))
        problem, draft = found.problem, found.draft
        assert draft is not None
        fitting = []
        for a in problem.unit_space.arrangements:
            other = type(draft)(problem, (), a.units, a.prefetch)
            if other.fits:
                fitting.append(other.max_rank_seconds)
        assert draft.fits
        assert draft.max_rank_seconds <= min(fitting) * (1 + WORTH)


def test_a_tighter_budget_shards_and_reshards_more() -> None:
    caps = ("1 GiB", 500_000, 400_000, 320_000)
    kept = []
    for cap in caps:
        draft = _found(make_layers(6, 16, 4, cluster={"world_size": 4, "ddr_cap": cap})).draft
        assert draft is not None
        kept.append(draft.highest_peak)
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("prefetch", [None, 0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_arrangement_beats_the_bound(ranks: int, prefetch: int | None) -> None:
    dense = {} if prefetch is None else {"prefetch": prefetch}
    for dim in (8, 64):
        job = make_layers(5, dim, ranks, planner={"dense": dense})
        problem = _problem(job)
        bound = step_bound(problem)
        others = sum(floor.seconds for floor in unit_floors(problem.unit_space))
        assert 0 < others <= bound
        draft = _found(job).draft
        assert draft is not None
        for a in problem.unit_space.arrangements:
            other = type(draft)(problem, (), a.units, a.prefetch)
            assert bound <= other.max_rank_seconds * (1 + 1e-12)


def test_the_bound_holds_for_layers_above_what_malloc_keeps() -> None:
    job = make_layers(3, 1024, 2)
    problem, draft = _problem(job), _found(job).draft
    assert draft is not None
    for a in problem.unit_space.arrangements:
        seconds = type(draft)(problem, (), a.units, a.prefetch).max_rank_seconds
        assert step_bound(problem) <= seconds * (1 + 1e-12)


@pytest.mark.parametrize("size", [1, 2, 4, 6])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("reshard", [False, True])
def test_the_job_forces_the_cut_the_prefetch_and_the_resharding(
    size: int, prefetch: int, reshard: bool
) -> None:
    dense = {"layers_per_unit": size, "prefetch": prefetch, "reshard": reshard}
    found = _found(make_layers(planner={"units": SHARDED, "dense": dense}))
    assert found.draft is not None
    assert found.draft.prefetch == prefetch
    assert _layers(found) == {1: [1] * 6, 2: [2] * 3, 4: [3, 3], 6: [6]}[size]
    assert {unit.reshard for unit in found.draft.units} == {reshard}


def test_a_layer_that_is_placed_otherwise_is_not_merged_with_the_others() -> None:
    units = {"layers": "shard", "layers.2": "replicate"}
    dense = {"layers_per_unit": 3}
    found = _found(make_layers(planner={"units": units, "dense": dense})).draft
    assert found is not None
    names = {u.unit.name: u.replicated for u in found.units[1:-1]}
    assert names == {"layers.0-1": False, "layers.2": True, "layers.3-5": False}


def test_planning_layers_twice_gives_the_same_units() -> None:
    first, again = (_found(make_layers(9, 48)).draft for _ in range(2))
    assert first is not None
    assert again is not None
    assert [u.unit for u in first.units] == [u.unit for u in again.units]
    assert first.rank_seconds == again.rank_seconds


def test_of_many_runs_of_units_all_are_placed_alike_but_the_last() -> None:
    alone = chain([unit(f"layers.{index}", 100) for index in range(8)])
    space = UnitSpace(model_of_chain(alone), PAIR)
    found = [[u.replicated or u.reshard for u in a.units] for a in space.arrangements]
    assert len(found) == 9
    assert all(len({*modes[:-1]}) == 1 for modes in found)


def test_on_one_rank_nothing_is_gained_by_sharding() -> None:
    draft = _found(make_layers(ranks=1)).draft
    assert draft is not None
    assert all(unit.replicated for unit in draft.units)


def test_memory_below_the_smallest_arrangement_has_no_draft() -> None:
    found = _found(make_layers(cluster={"world_size": 2, "ddr_cap": 1000}))
    assert (found.draft, found.feasible) == (None, 0)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (
            {"dense": {"layers_per_unit": 7}},
            "planner.dense.layers_per_unit: expected at most 6, the layers that follow one another "
            "alike, got 7.",
        ),
        (
            {"units": {"layer": "shard"}},
            "planner.units: expected units embed, layers, head, or one layer of a series, got "
            "'layer'.",
        ),
    ],
)
def test_what_is_forced_of_units_that_there_are_not_is_refused(
    planner: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        _problem(make_layers(planner=planner))
    assert str(caught.value) == message


def test_units_without_neighbours_cannot_be_merged(make_job: MakeJob) -> None:
    with pytest.raises(InputError) as caught:
        _problem(make_job(50, planner={"dense": {"layers_per_unit": 2}}))
    assert str(caught.value) == (
        "planner.dense.layers_per_unit: expected 1 for a dlrm, whose units have no neighbours "
        "alike, got 2."
    )


def test_tables_alone_have_no_units_to_cut(make_tables: MakeJob) -> None:
    with pytest.raises(InputError) as caught:
        _problem(make_tables(50, planner={"dense": {"prefetch": 1}}))
    assert str(caught.value) == (
        "planner.dense: expected nothing: tables alone have no units, got a section. Leave it out."
    )


@pytest.mark.parametrize(
    ("dense", "found"),
    [
        ({"prefetch": 2}, "planner.dense.prefetch: expected one of 0, 1, got 2."),
        ({"layers_per_unit": 0}, "planner.dense.layers_per_unit: expected int >= 1"),
        ({"reshard": "yes"}, "planner.dense.reshard: expected bool"),
        ({"layers": 2}, "unknown key 'planner.dense.layers'. Did you mean 'layers_per_unit'?"),
    ],
)
def test_nonsense_in_the_dense_section_is_refused(dense: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError) as caught:
        make_layers(planner={"dense": dense})
    assert found in str(caught.value)


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_that_may_be_replicated_share_one_reduce_at_least(ranks: int) -> None:
    space = _problem(make_layers(ranks=ranks)).unit_space
    shared = [floor.seconds for floor in unit_floors(space) if floor.name.endswith(", once")]
    one = latency_seconds("all_reduce", ranks, VALUES, space.context.local)
    assert 0 < max(shared) <= one + update_seconds(0, VALUES)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_floor_of_a_layer_alone_is_no_more_than_its_fastest_placement(zero: int) -> None:
    memory = {"param_dtype": "fp32", "zero": zero}
    space = _problem(make_layers(layers=1, dim=768, memory=memory)).unit_space
    least = [min(math.fsum(c.seconds.values()) for c in space.choices(run)) for run in space.runs]
    floors = math.fsum(floor.seconds for floor in unit_floors(space))
    assert 0 < floors <= math.fsum(least) * (1 + 1e-9)


def test_units_of_a_dlrm_are_gathered_ahead_on_request(make_job: MakeJob) -> None:
    units = {"bottom": "shard", "top": "shard"}
    forced = {"units": units, "dense": {"prefetch": 1, "reshard": True}}
    made = plan(make_job(50, 3000, planner=forced))
    on_demand = plan(make_job(50, 3000, planner={"units": units, "dense": {"reshard": True}}))
    assert (made.prefetch, on_demand.prefetch) == (1, 0)
    assert made.lower_bound_seconds <= made.max_rank_seconds < on_demand.max_rank_seconds
    assert max(r.peak_bytes for r in made.ranks) >= max(r.peak_bytes for r in on_demand.ranks)
    draft_of(made)


def test_ranks_that_differ_in_padding_alone_are_simulated_once_each_kind() -> None:
    draft = _found(make_layers(4, 24, 64)).draft
    assert draft is not None
    assert len({id(phases) for phases in draft.peaks}) <= 4
    assert len({*draft.peak_bytes}) == 1
    assert draft.highest_peak == draft.peak_bytes[0]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_simulated_of_one_rank_is_what_every_rank_has(prefetch: int) -> None:
    dense = {"layers_per_unit": 2, "prefetch": prefetch, "reshard": True}
    for ranks in (1, 2, 3, 5):
        job = make_layers(5, 10, ranks, planner={"units": SHARDED, "dense": dense})
        draft = _found(job).draft
        assert draft is not None
        assert {*draft.peak_bytes} == {draft.highest_peak}
        assert {*draft.kept_bytes} == {sum(draft.exact[0].values())}


@pytest.mark.slow
def test_of_layers_that_do_not_fit_it_is_said_what_would_help() -> None:
    with pytest.raises(NoPlanError) as caught:
        plan(make_layers(8, 64, cluster={"world_size": 2, "ddr_cap": "3 MiB"}))
    told = str(caught.value)
    assert told.startswith("no plan found that fits: rank 0 needs most, ")
    assert "its largest part is layers.0 with " in told
    assert " ranks fit (" in told
