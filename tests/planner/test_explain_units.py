"""Plans of layers alone: every number has its derivation, no edited one is believed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from plans import plan
from tampering import changed, leaves

from shardwright.core.amount import Step
from shardwright.core.block import check_tiling
from shardwright.core.errors import MismatchError
from shardwright.estimate.recordings import described
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan, sealed
from shardwright.planner import explain
from shardwright.planner.statistics import memory_prices, statistics

CASES: dict[str, dict[str, Any]] = {
    "free": {},
    "resharded": {"units": {"layers": "shard"}, "dense": {"reshard": True, "layers_per_unit": 2}},
    "on demand": {"units": {"layers": "shard", "head": "shard"}, "dense": {"prefetch": 0}},
    "alone": {"dense": {"layers_per_unit": 1, "prefetch": 1}, "units": {"embed": "shard"}},
    "checkpointed": {"dense": {"checkpointing": ["full"]}},
    "offloaded": {"units": {"layers": "offload"}, "dense": {"prefetch": 1}},
}
# What no number depends on, and what only a new search could tell.
NOT_FELT = (
    *("version", "fingerprint", "job.data", "job.model", "job.cluster.preset"),
    *("search.wall_seconds", "search.proposals", "search.feasible", "search.slow_kernels"),
    *("job.planner.estimator", "job.planner.partitioner", "job.planner.options"),
    *("job.planner.reservation", "job.train.steps", "job.train.learning_rate", "job.train.seed"),
    *("job.train.out", "job.train.timeout", "job.planner.units"),
)


# Names of operators and modules are for people; what computes nothing has no numbers.
OF_RECORDING = re.compile(
    r"recording\.(operators|result|series\.\d+\.period|pieces\.\d+\.touches\.\d+\.[45])"
)


def _job(planner: dict[str, Any], ranks: int = 2, preset: str = "local", layers: int = 6) -> Job:
    return parse_job(
        {
            "model": {"kind": "transformer", "layers": layers, "dim": 16, "heads": 2, "vocab": 50},
            "cluster": {"preset": preset, "world_size": ranks},
            "batch": {"size": 3, "sequence": 8},
            "train": {"optimizer": "adam"},
            "planner": planner,
        }
    )


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest) -> Plan:
    return plan(_job(CASES[request.param]))


@pytest.mark.slow
def test_the_cases_differ_in_cut_placement_and_prefetch() -> None:
    plans = [plan(_job(planner)) for planner in CASES.values()]
    assert {p.prefetch for p in plans} == {0, 1}
    assert {len(unit.modules) for p in plans for unit in p.units} > {1, 2}
    assert {u.reshard_after_forward for p in plans for u in p.units} == {True, False}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("case", "preset", "ranks"),
    [
        *((case, "local", 3) for case in list(CASES)[::2]),
        *((case, "h100-8", 16) for case in list(CASES)[1::2]),
        ("free", "local", 1),
    ],
)
def test_every_number_of_every_unit_is_derived(
    reevaluate: Callable[[Sequence[Step]], None], case: str, preset: str, ranks: int
) -> None:
    made = plan(_job(CASES[case], ranks, preset))
    for unit in made.units:
        found = explain.explain_tensor(made, unit.name)
        assert found[-1].stored == unit.seconds
        assert found[-2].stored == unit.bytes_per_step
        assert found[-3].stored == unit.collectives
        for explanation in found:
            reevaluate(explanation.steps)


@pytest.mark.slow_after(1)
def test_every_statistic_is_derived(
    reevaluate: Callable[[Sequence[Step]], None], made: Plan
) -> None:
    for name in explain.STATISTICS:
        for explanation in explain.explain_statistic(made, name):
            reevaluate(explanation.steps)
    assert memory_prices(made) == ()
    assert statistics(made).tables == ()


def test_seconds_of_units_and_of_the_rest_are_those_of_a_rank(made: Plan) -> None:
    ranks = dict(explain_ranks(made))
    for totals in made.ranks:
        assert ranks[totals.rank] == pytest.approx(totals.seconds, rel=1e-12)
        assert sum(unit.seconds for unit in made.units) < totals.seconds  # the loss has no unit


def explain_ranks(made: Plan) -> Iterator[tuple[int, float]]:
    for rank in range(made.world_size):
        for found in explain.explain_statistic(made, "ranks", rank=rank):
            if found.title.endswith("seconds per step"):
                yield rank, found.stored


def test_a_layer_and_its_tensors_are_explained_by_their_unit() -> None:
    made = plan(_job(CASES["resharded"]))
    whole = explain.explain_tensor(made, "layers.2-3")
    assert explain.explain_tensor(made, "layers.3") == whole
    assert explain.explain_tensor(made, "layers.2.qkv.weight") == whole


def test_blocks_of_merged_units_tile_the_model(made: Plan) -> None:
    check_tiling(made.expanded(), described(made.job).tensors, made.world_size)


def test_facts_say_what_was_forced_and_what_was_chosen() -> None:
    facts = {f.what: f for f in explain.basis(plan(_job(CASES["resharded"])))}
    assert (
        facts["model"].value == "transformer: units embed, layers.0-1, layers.2-3, layers.4-5, head"
    )
    assert facts["layers of a unit"].value == "2 at most"
    assert facts["layers of a unit"].origin == "planner.dense.layers_per_unit"
    assert facts["reshard_after_forward"].origin == "planner.dense.reshard"
    assert facts["gathered ahead"].origin.startswith("planner.dense.prefetch not given")
    assert "tables" not in facts["search"].value


@pytest.mark.parametrize("dense", [{"layers_per_unit": 4}, {"prefetch": 0}])
def test_units_that_the_job_does_not_allow_are_not_explained(dense: dict[str, int]) -> None:
    made = plan(_job(CASES["alone"]))
    section = msgspec.structs.replace(made.job.planner.dense, **dense)
    planner = msgspec.structs.replace(made.job.planner, dense=section)
    other = msgspec.structs.replace(made.job, planner=planner)
    with pytest.raises(MismatchError, match=r"^plan: (units|prefetch): expected "):
        explain.draft_of(sealed(msgspec.structs.replace(made, job=other)))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "first"), [("resharded", 0), ("checkpointed", 1)])
def test_every_number_of_a_plan_of_layers_alone_is_recomputed(case: str, first: int) -> None:
    """Every other one of two plans that have the same ones but for their ways."""
    made = plan(_job(CASES[case], layers=2))
    document = json.loads(msgspec.json.encode(made))
    unnoticed = []
    for path in [*leaves(document)][first::2]:
        name = ".".join(map(str, path))
        felt = not name.startswith(NOT_FELT) and not OF_RECORDING.match(name)
        if felt and not _is_noticed(document, path) and not _is_nothing(document, path):
            unnoticed.append(name)
    assert unnoticed == []


def _is_nothing(document: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """Whether this is of a recorded piece: a unit of none, or a number of one that is idle."""
    if path[:2] != ("recording", "pieces"):
        return False
    piece = document["recording"]["pieces"][path[2]]
    return not piece["unit"] if path[3] == "unit" else path[3] == "work" and not piece["work"][0]


def _is_noticed(document: dict[str, Any], path: tuple[Any, ...]) -> bool:
    spot: Any = document
    for key in path[:-1]:
        spot = spot[key]
    before = spot[path[-1]]
    spot[path[-1]] = changed(before)
    try:
        explain.draft_of(sealed(msgspec.convert(document, Plan)))
    except (MismatchError, msgspec.ValidationError):
        return True
    finally:
        spot[path[-1]] = before
    return False
