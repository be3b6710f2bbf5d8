"""Whatever the widths, cuts, units and settings: the numbers of the unsharded model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import pytest
import random_tasks as tasks
from combinations import rare, slow
from own_tasks import OF_UNITS, in_order
from pool import Pool
from random_own_models import policy_of, ways
from test_own_models_measured import check_planned_bytes

from shardwright.core.errors import InputError
from shardwright.core.schedule import Action, training_step
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [(2, range(6)), slow(3, range(15, 22)), rare(2, range(6, 15)), rare(3, range(22, 40))],
)
def test_random_models_cut_at_random_train_as_the_unsharded_one(
    pool: Pool, world_size: int, seeds: range
) -> None:
    for furthest in pool.run(world_size, tasks.furthest_of_random_models, seeds=seeds):
        assert furthest < 1e-11


@pytest.mark.parametrize(
    "seeds",
    [
        (4,),  # units that are cut, one ahead
        slow((8, 229)),  # twins and parts in dicts at a stage of ZeRO; some units cut
        slow((0, 6)),  # blocks computed again; in host memory
        *(rare(range(*bounds)) for bounds in ((0, 7), (7, 14), (220, 230))),
    ],
)
def test_random_models_of_ones_own_run_as_planned(pool: Pool, seeds: range) -> None:
    """On as many ranks as it comes: equal to one process where they compute in their own dtype,
    the bytes and the peak that were planned, and what is done with units in the planned order."""
    for seed in seeds:
        made = _planned(seed, 1 + seed % 3)
        job, size = made.job, made.world_size
        results = pool.run(size, in_order, job=job, made=made, compares=not job.memory)
        check_planned_bytes(made, [(apart, events) for apart, events, _ in results])
        assert [apart for apart, _, _ in results] == [{}] * size, seed
        steps = training_step(made.model.step, made.modes)
        wanted = _done(action for action in steps if action.verb in OF_UNITS)
        for _, _, did in results:
            assert _done(did) == wanted, seed


def _planned(seed: int, size: int) -> Plan:
    """A random model under a random policy; what this model has not is left out."""
    document = {
        "model": {"python": "random_own_models:build", "arguments": {"seed": seed}},
        "data": {"python": f"random_own_models:batches_{seed}"},
        **policy_of(seed, size),
    }
    dense = document["planner"]["dense"]
    for key in ("", "layers_per_unit", "checkpointing"):
        dense.pop(key, None)
        try:
            made = plan(parse_job(document))
            break
        except InputError:
            if key == "checkpointing":
                raise
    wanted = ways(seed, [unit.name for unit in made.units if "-" not in unit.name])
    if made.job.memory and made.job.memory.offload == "all":  # where none is replicated
        return made
    document["planner"]["units"] = wanted
    return plan(parse_job(document))


def _done(actions: Iterable[Action]) -> list[Action]:
    """Gathers that follow one another in one order: where a model hands on what a unit gave, the
    backwards of both begin at once."""
    found: list[Action] = []
    for gathers, run in groupby(actions, lambda action: action.verb == "gather"):
        its = list(run)
        found += sorted(its, key=lambda action: action.target) if gathers else its
    return found
