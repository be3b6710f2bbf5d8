"""Plans whose units are buckets: they train as one process does, take the bytes that were predicted
and make the calls that were counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from combinations import rare, slow
from held_against import check_bytes
from msgspec import UNSET
from own_tasks import own_job, planned
from pool import Pool
from reference import bag_job, small_job, train_unsharded
from tasks import go_on, train_sharded
from test_hybrids import check_calls
from test_measured_as_predicted import BAG_ROWS, ROUTED, TYPES
from test_own_models_measured import check_bytes_alone, check_planned_bytes
from test_resharding import reshard
from test_sharded_equals_unsharded import hold
from test_transformer import LLAMAS, check_curve, check_step_bytes, text_job
from transformer_tasks import actions_of_a_step, moved_by_units

from shardwright.core.errors import InputError
from shardwright.core.schedule import training_step
from shardwright.data.tokens import write_text
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.memory import PLANNED
from shardwright.job.parallel import ParallelSection
from shardwright.runtime.checkpoint import read_full

SIZE = 5_000  # elements, of 24,000 or so
UNITS: dict[str, Any] = {"modules": {"size": UNSET, "layers_per_unit": 1}, "buckets": {}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    write_text(path, 3000)
    return path


def bucketed(job: Job, size: Any = SIZE, zero: Any = 2, **dense: Any) -> Job:
    """The same in buckets, with nothing said of single units."""
    replace = msgspec.structs.replace
    section = replace(job.planner.dense, bucket_size=size, **dense)
    memory = replace(PLANNED, zero=zero)
    return replace(job, planner=replace(job.planner, units={}, dense=section), memory=memory)


@pytest.mark.parametrize(
    ("world_size", "zero", "prefetch"),
    [
        (2, 2, 1),
        slow(2, 1, 0),
        slow(3, 2, 0),
        *(rare(*case) for case in ((2, 1, 1), (2, 2, 0), (1, 1, 0), (1, 2, 1), (3, 1, 1))),
    ],
)
def test_a_transformer_trains_as_on_one_process(
    pool: Pool, text: Path, world_size: int, zero: int, prefetch: int
) -> None:
    job = bucketed(text_job(text, world_size, {}), zero=zero, prefetch=prefetch)
    made = plan(job)
    assert len(made.units) > 2
    assert made.prefetch == prefetch
    check_curve(pool, job, world_size)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *(slow("full", "dense"), slow("selective", "experts")),
        *(rare(policy, "dense") for policy in ("none", "selective")),
        *(rare(policy, "experts") for policy in ("none", "full")),
    ],
)
def test_so_does_a_llama_whose_blocks_are_checkpointed(
    pool: Pool, text: Path, policy: str, kind: str
) -> None:
    widths = {"kind": "llama", "dim": 16, "kv_heads": 2, "ffn_dim": 24, **LLAMAS[kind]}
    job = text_job(text, 2, {}, model=widths, train={"learning_rate": 0.15})
    job = bucketed(job, 3_000, checkpointing=(policy,))
    check_curve(pool, job, 2)
    check_step_bytes(pool, job, 2)


@pytest.mark.parametrize(
    ("world_size", "elements", "prefetch"),
    [
        (2, 500, 1),
        *(slow(*case) for case in ((3, SIZE, 0), (2, 1_000_000, 0))),
        *(rare(1, elements, 1) for elements in (500, SIZE, 1_000_000)),
        *(rare(*case) for case in ((2, 500, 0), (2, SIZE, 1), (3, 500, 0), (3, 1_000_000, 1))),
    ],
)
def test_bytes_are_exact_and_peaks_near(
    pool: Pool, text: Path, world_size: int, elements: int, prefetch: int
) -> None:
    changes = {"train": {"optimizer": "adam", "learning_rate": 0.01}}
    job = bucketed(text_job(text, world_size, {}, **changes), elements, prefetch=prefetch)
    check_step_bytes(pool, job, world_size)


@pytest.mark.parametrize("world_size", [2, slow(3), rare(1)])
def test_what_a_bucket_moves_is_what_the_plan_says(pool: Pool, text: Path, world_size: int) -> None:
    made = plan(bucketed(text_job(text, world_size, {})))
    told = {unit.name: (unit.collectives, unit.bytes_per_step) for unit in made.units}
    for rank, found in enumerate(pool.run(world_size, moved_by_units, made=made)):
        assert found == told, rank


@pytest.mark.parametrize(
    ("world_size", "types", "prefetch"),
    [
        *((2, TYPES, 1), slow(3, ROUTED, 0)),
        *(rare(*case) for case in ((1, TYPES, 0), (2, ROUTED, 1), (3, TYPES, 1), (4, TYPES, 0))),
    ],
)
def test_a_dlrm_trains_beside_its_tables_as_on_one_process(
    pool: Pool, world_size: int, types: tuple[str, ...], prefetch: int
) -> None:
    job = bucketed(small_job(types, ("shard", "shard"), world_size), 100, prefetch=prefetch)
    assert len(plan(job).units) == 2
    results = pool.run(world_size, train_sharded, job=job, meta=world_size % 2 == 0)
    hold(results, *train_unsharded(job, torch.float64))


@pytest.mark.parametrize(
    ("world_size", "types"), [(2, TYPES), slow(3, ROUTED), rare(2, ROUTED), rare(3, TYPES)]
)
def test_calls_beside_tables_are_as_planned(
    pool: Pool, world_size: int, types: tuple[str, ...]
) -> None:
    check_calls(pool, plan(bucketed(small_job(types, ("shard", "shard"), world_size), 100)))


def test_bytes_beside_tables_are_exact(pool: Pool) -> None:
    check_bytes(pool, bucketed(bag_job(ROUTED, 2, "sgd", batch=256, rows=BAG_ROWS), 100), 0.01)


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        *(slow(*case) for case in (("GPT2", 2), ("VAE", 1))),
        *(rare(*case) for case in (("GPT2", 1), ("T5", 1), ("T5", 2), ("VAE", 2))),
    ],
)
def test_a_module_trains_and_takes_memory_as_planned(pool: Pool, name: str, replicas: int) -> None:
    cluster = {"preset": "local", "world_size": 2 * replicas}
    job = own_job(name, "sgd", cluster=cluster, parallel={"data_replicate": replicas})
    job = bucketed(job, 1_500)
    made = plan(job)
    assert len(made.units) > 1
    results = pool.run(made.world_size, planned, job=job, made=made)
    check_planned_bytes(made, results)
    nearly = 2e-6  # of fp32, in which the job computes; the module is one of fp64
    assert max(by for apart, _ in results for by in apart.values()) < nearly


@pytest.mark.parametrize(
    ("offload", "dtype"),
    [("none", "bf16"), slow("all", "fp32"), rare("none", "fp32"), rare("all", "bf16")],
)
def test_frozen_layers_in_another_dtype_take_memory_as_planned(
    pool: Pool, offload: str, dtype: str
) -> None:
    job = parse_job(
        {
            "model": {"python": "own_models:adapted"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": "adam", "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": 2},
            "memory": {"zero": 2, "param_dtype": dtype, "reduce_dtype": "fp32", "offload": offload},
            "planner": {"dense": {"bucket_size": 300}},
        }
    )
    check_bytes_alone(pool, job, plan(job))


@pytest.mark.parametrize("units", UNITS)
def test_units_are_gathered_ahead_and_reduced_while_a_backward_goes_on(
    pool: Pool, text: Path, units: str
) -> None:
    made = plan(bucketed(text_job(text, 2, {}), prefetch=1, **UNITS[units]))
    for found in pool.run(2, actions_of_a_step, made=made):
        verbs = [(action.verb, action.target) for action in found]
        planned = training_step(made.model.step, made.modes)
        own = ("gather", "reduce", "collect")
        assert verbs == [(a.verb, a.target) for a in planned if a.verb in own]
        last = max(place for place, (verb, _) in enumerate(verbs) if verb == "reduce")
        assert any(verb == "collect" for verb, _ in verbs[:last])


def test_where_parameters_do_not_stay_whole_buckets_are_refused(text: Path) -> None:
    job = text_job(text, 2, {})
    for zero, words in ((3, "3"), ((2, 3), r"\[2, 3\]")):
        replicas = ParallelSection(data_replicate=2) if zero != 3 else UNSET
        refused = msgspec.structs.replace(bucketed(job, zero=zero), parallel=replicas)
        with pytest.raises(InputError, match=f"bucket_size: expected nothing beside .*{words}"):
            plan(refused)


@pytest.mark.parametrize("prefetch", [slow(0), 1])
def test_one_of_the_buckets_may_be_replicated(pool: Pool, text: Path, prefetch: int) -> None:
    job = bucketed(text_job(text, 2, {}), prefetch=prefetch)
    planner = msgspec.structs.replace(job.planner, units={"bucket-1": "replicate"})
    job = msgspec.structs.replace(job, planner=planner)
    kinds = [type(unit.optimizer_state).__name__ for unit in plan(job).units]
    assert kinds.count("Replicate") == 1
    check_curve(pool, job, 2)
    check_step_bytes(pool, job, 2)


@pytest.mark.slow
def test_a_checkpoint_of_modules_goes_on_in_buckets(pool: Pool, tmp_path: Path) -> None:
    saved, out = str(tmp_path / "saved"), tmp_path / "out"
    pool.run(2, go_on, job=bag_job(ROUTED, 2, "adam"), steps=range(3), save=saved)
    job = bag_job(ROUTED, 3, "adam")
    assert reshard(tmp_path / "saved", bucketed(job, 100), out) == 0
    before, after = read_full(saved), read_full(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    wanted = pool.run(3, go_on, job=job, steps=range(3, 5), load=saved)
    for folder in (saved, str(out)):
        found = pool.run(3, go_on, job=bucketed(job, 100), steps=range(3, 5), load=folder)
        for (losses, weights), (their_losses, theirs) in zip(wanted, found, strict=True):
            assert their_losses == pytest.approx(losses, abs=1e-6)
            for name, weight in weights.items():
                torch.testing.assert_close(theirs[name], weight, rtol=1e-5, atol=1e-6)
