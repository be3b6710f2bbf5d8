"""Random jobs run on ranks take the weights, gradients and states of their estimate to the byte,
and its peak."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import probe_tasks
import pytest
import rehearsal_tasks as tasks
from combinations import rare, slow
from pool import Pool

from shardwright.core.footprint import PhasePeak
from shardwright.core.timeline import Kind
from shardwright.estimate.rehearsal import among
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import parallel_of, parse_job

# Until a thread of gloo lets a buffer of FSDP2's go, it counts: rarely, and in first steps.
TRIES = 3
QUICK, DAILY = 0, {3, 7, 8, 13, 16}  # which have every runtime, stage, dtype and kind of model
CASES = 18


def document(seed: int) -> dict[str, Any]:
    """A llama or a module under a runtime, a stage, dtypes, a policy and an optimizer."""
    pick = random.Random(seed).choice
    heads = pick([2, 4])
    llama: dict[str, Any] = {
        "kind": "llama",
        "layers": pick([1, 2, 5]),
        "dim": heads * pick([16, 24]),
        "heads": heads,
        "ffn_dim": pick([72, 128]),
        "vocab": pick([257, 1000]),
        **pick([{}, {"tied_embeddings": True}, {"experts": 4, "experts_per_token": 2}]),
    }
    own = {"python": f"own_models:{pick(['adapted', 'deep', 'dropping'])}"}
    runtime = pick(["shardwright", "shardwright", "fsdp2"])
    memory = {
        "runtime": runtime,
        "zero": pick([1, 2, 3]) if runtime == "shardwright" else 3,
        "checkpointing": pick(["none", "full", "selective", "core_attention", "layers:2"]),
        "param_dtype": pick(["bf16", "fp32"]),
        "reduce_dtype": pick(["bf16", "fp32"]),
    }
    return {
        "model": pick([llama, llama, {"kind": "python", **own}]),
        "data": {"python": "own_models:batches_of_adapted"},
        "cluster": {"world_size": pick([2, 3, 4])},
        "batch": {"size": pick([1, 3]), "sequence": pick([16, 65])},
        "memory": memory,
        "train": {"optimizer": pick(["adam", "adamw", "sgd", "sgd_momentum", "adagrad"])},
    }


@pytest.mark.parametrize(
    "seed",
    [n if n == QUICK else slow(n) if n in DAILY else rare(n) for n in range(CASES)],
)
def test_a_random_job_takes_what_its_estimate_says(pool: Pool, seed: int) -> None:
    given = document(seed)
    if given["model"]["kind"] == "llama":
        del given["data"]
    _check_as_estimated(pool, given)


@pytest.mark.parametrize(
    ("memory", "optimizer"),
    [
        *(({"zero": 2}, "adamw"), slow({"zero": 1}, "adamw_8bit"), slow({"zero": 3}, "adagrad")),
        slow({"runtime": "fsdp2"}, "adamw"),
        *(slow({"zero": zero}, "adamw") for zero in (3, 1)),
        *(slow({"zero": zero}, "adamw_8bit") for zero in (3, 2)),
        slow({"runtime": "fsdp2"}, "adagrad"),
    ],
    ids=str,
)
def test_what_gets_no_gradient_is_rehearsed_as_it_is_counted(
    pool: Pool, memory: dict[str, Any], optimizer: str
) -> None:
    """Without gradient and states: in layers, beside them, and one that nothing runs, of which a
    stage of ZeRO makes no copy for computing."""
    idle = 0 if memory.get("zero", 3) < 3 else 1
    eight = optimizer == "adamw_8bit"
    _check_as_estimated(
        pool,
        {
            "model": {
                "python": "own_models:spared",
                "arguments": {"width": 96 if eight else 32, "idle": idle, "single": eight},
            },
            "data": {"python": "own_models:batches_of_adapted"},
            "cluster": {"world_size": 2},
            "memory": memory,
            "train": {"optimizer": optimizer},
        },
    )


@pytest.mark.parametrize(
    ("zero", "optimizer", "layers"),
    [
        slow([2, 3], "sgd_momentum", 1),
        slow([2, 3], "adamw_8bit", 2),
        *(rare([2, 3], "adamw", 5), rare(3, "adamw_8bit", 2)),
    ],
    ids=str,
)
def test_replicas_are_rehearsed_as_they_are_counted(
    pool: Pool, zero: Any, optimizer: str, layers: int
) -> None:
    """With a pair of stages gradients and states are cut over replicas as well."""
    pool.run(4, probe_tasks.make_grids)
    model = {"kind": "llama", "layers": layers, "dim": 72, "heads": 4, "ffn_dim": 100, "vocab": 257}
    _check_as_estimated(
        pool,
        {
            "model": model,
            "cluster": {"world_size": 4},
            "batch": {"size": 2, "sequence": 33},
            "parallel": {"data_replicate": 2},
            "memory": {"zero": zero},
            "train": {"optimizer": optimizer},
        },
    )


@pytest.mark.parametrize(
    ("memory", "shape"),
    [
        slow({"checkpointing": "selective"}, {}),
        rare({"param_dtype": "fp32"}, {"tied_embeddings": True}),
        rare({"checkpointing": "full"}, {"experts": 4, "experts_per_token": 2}),
    ],
    ids=str,
)
def test_replicas_beside_fsdp2_are_rehearsed_on_a_mesh_of_both(
    pool: Pool, memory: dict[str, Any], shape: dict[str, Any]
) -> None:
    pool.run(4, probe_tasks.make_grids)
    given = {
        "model": {"kind": "llama", "layers": 3, "dim": 72, "heads": 4, "vocab": 257, **shape},
        "cluster": {"world_size": 4},
        "batch": {"size": 2, "sequence": 33},
        "parallel": {"data_replicate": 2},
        "memory": {"runtime": "fsdp2", **memory},
        "train": {"optimizer": "adamw"},
    }
    assert parallel_of(among(parse_job(given), 4)).data_replicate == 2
    _check_as_estimated(pool, given)


@pytest.mark.slow
def test_logits_in_fp32_and_more_inputs_of_reduce_scatters_are_counted_as_they_run(
    pool: Pool,
) -> None:
    model = {"kind": "llama", "layers": 4, "dim": 96, "heads": 4}
    memory = {"runtime": "fsdp2", "param_dtype": "bf16", "checkpointing": "full"}
    usual = {"model": model, "cluster": {"world_size": 2}, "memory": memory}
    for words, batch, key in (
        (5000, {"size": 2, "sequence": 33}, {"fp32_logits": True}),
        (257, {"size": 1, "sequence": 8}, {"fsdp2": {"reduce_scatter_max_input_buffers": 4}}),
    ):
        plain = {**usual, "model": {**model, "vocab": words}, "batch": batch}
        given = {**plain, "memory": {**memory, **key}}
        peaks = [estimated(parse_job(each)).worst.peak_bytes for each in (plain, given)]
        assert peaks[1] > peaks[0]
        _check_as_estimated(pool, given)


@pytest.mark.parametrize(
    ("order", "param_dtype"),
    [
        *(slow("few twice", "bf16"), slow("a a b b", "fp32")),
        *(rare("loop", dtype) for dtype in ("fp32", "bf16")),
        *(rare(*case) for case in (("few twice", "fp32"), ("a a b b", "bf16"))),
    ],
)
def test_units_called_several_times_are_summed_once_under_fsdp2(
    pool: Pool, order: str, param_dtype: str
) -> None:
    """Autograd hands the gradients of all calls over in the backward of the first one."""
    _check_as_estimated(
        pool,
        {
            "model": {"python": "own_models:called", "arguments": {"order": order, "width": 32}},
            "data": {"python": "own_models:batches_of_adapted"},
            "cluster": {"world_size": 2},
            "memory": {"runtime": "fsdp2", "param_dtype": param_dtype},
            "train": {"optimizer": "adam"},
        },
    )


@pytest.mark.parametrize("zero", [2, slow(3), slow([2, 3])], ids=str)
def test_buffers_of_a_sum_have_one_name(pool: Pool, zero: Any) -> None:
    """On gloo they travel as an all-to-all does; what each rank sums then is an exchange."""
    replicas = 2 if zero == [2, 3] else 1
    if replicas > 1:
        pool.run(4, probe_tasks.make_grids)
    given = {
        "model": {"kind": "llama", "layers": 1, "dim": 72, "heads": 4, "vocab": 3001},
        "cluster": {"world_size": 2 * replicas},
        "batch": {"size": 1, "sequence": 8},
        "parallel": {"data_replicate": replicas},
        "memory": {"zero": zero, "param_dtype": "fp32"},
    }
    job = among(parse_job(given), 2 * replicas)
    predicted = _at_peak(estimated(job).worst.phases)
    measured = [_at_peak(each.phases) for each in pool.run(2 * replicas, tasks.seen, job=job)]
    kinds: tuple[Kind, ...] = ("reduce_scatter", "all_gather", "communication")
    assert predicted.by_category["reduce_scatter"] > 0.1 * predicted.bytes
    for kind in kinds:
        assert max(each.by_category.get(kind, 0) for each in measured) == (
            predicted.by_category.get(kind, 0)
        ), kind


def _at_peak(phases: Iterable[PhasePeak]) -> PhasePeak:
    return max(phases, key=lambda phase: phase.bytes)


def _check_as_estimated(pool: Pool, given: dict[str, Any]) -> None:
    job = among(parse_job(given), given["cluster"]["world_size"])
    predicted = estimated(job).worst
    for _ in range(TRIES):
        ranks = pool.run(given["cluster"]["world_size"], tasks.seen, job=job)
        measured = max(each.peak.bytes for each in ranks)
        if measured == pytest.approx(predicted.peak_bytes, rel=0.01):
            break
    assert measured == pytest.approx(predicted.peak_bytes, rel=0.01)
    phases = [phase for rank in ranks for phase in rank.phases]
    kept: tuple[Kind, ...] = ("weight", "optimizer_state", "buffer")
    for kind in kept:
        assert _most(phases, kind) == _most(predicted.phases, kind), kind
    sums: tuple[Kind, ...] = ("gradient", "unreduced_gradient")
    last = [phase for phase in phases if phase.phase == "step"]
    foreseen = [phase for phase in predicted.phases if phase.phase == "step"]
    assert _most(last, *sums) == _most(foreseen, *sums)


def _most(phases: Iterable[PhasePeak], *kinds: Kind) -> int:
    return max(sum(phase.by_category.get(kind, 0) for kind in kinds) for phase in phases)
