"""``fit`` on jobs, with estimates from one formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from shardwright.core.errors import InputError, NoPlanError
from shardwright.core.footprint import Fit, Footprint, RankMemory, StepTime
from shardwright.estimate.fit import fit
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, memory_of, parallel_of, parse_job

MIB, GIB = 2**20, 2**30
KEPT = {"none": 8, "core_attention": 7, "selective": 4, "full": 1}  # KiB of a token
OPTIMIZERS = {"adamw": 16, "adamw_8bit": 10}  # GiB on one rank


def job(**sections: dict[str, Any]) -> Job:
    widths = {"layers": 2, "dim": 64, "heads": 4, "vocab": 256}
    document = {
        "model": {"kind": "llama", **widths},
        "cluster": {"preset": "h100-8"},
        "batch": {"size": 2, "sequence": 1024},
        "parallel": {"data_shard": -1},
    }
    return parse_job(document | sections)


def estimates(capacity: int = 4 * GIB) -> Callable[[Job], Footprint]:
    """States that ranks share, and tokens that tensor ranks share."""

    def footprint(job: Job) -> Footprint:
        section, degrees = memory_of(job), parallel_of(job)
        world = job.cluster.world_size or 8
        tokens = job.batch.size * job.batch.sequence * KEPT[section.policy] * 1024
        states = 0 if section.offload != "none" else OPTIMIZERS[job.train.optimizer] * GIB // world
        peak = states + tokens // degrees.tensor
        rank = RankMemory(
            "all ranks",
            world,
            {},
            peak,
            "backward",
            {"optimizer_state": states, "activation": peak - states},
            {},
            (),
        )
        return Footprint("llama", 1, world, {}, {}, (rank,), capacity, assumptions=("a formula",))

    return footprint


def found(*, capacity: int = 4 * GIB, **sections: dict[str, Any]) -> Fit:
    return fit(job(**sections), estimates(capacity))


def test_each_policy_fits_its_own_batch() -> None:
    sizes = {row.checkpointing: row.largest_batch.size for row in found().policies}
    known = {"none": 256, "core_attention": 292, "selective": 512, "full": 2048}
    assert sizes == {"as planned": 256, **known}


def test_the_longest_sequence_fits_and_one_step_more_does_not() -> None:
    longest = found().longest_sequence
    assert longest is not None
    needs = [2 * tokens * 8 * 1024 + 2 * GIB for tokens in (longest.size, longest.size + 128)]
    assert needs[0] <= 4 * GIB < needs[1]


def test_the_fewest_ranks_hold_the_job() -> None:
    assert found().fewest_ranks == 5


def test_ranks_go_up_by_whole_groups() -> None:
    assert found(parallel={"tensor": 2}).fewest_ranks == 6


def test_a_fixed_degree_of_sharding_is_varied_too() -> None:
    fixed = {"data_shard": 8}
    assert found(parallel=fixed, cluster={"hbm_cap": "4 GiB"}).fewest_ranks == 5


def test_hosts_that_do_not_fill_up_are_forgotten() -> None:
    assert found(cluster={"preset": "h100-8", "local_world_size": 4}).fewest_ranks == 5


def test_without_a_capacity_nothing_is_estimated() -> None:
    def never(job: Job) -> Footprint:
        raise AssertionError("estimated")

    with pytest.raises(InputError, match=r"job: cluster: expected a capacity.*cluster\.hbm_cap"):
        fit(job(cluster={"world_size": 8}, memory={"runtime": "fsdp2"}), never)


def test_a_job_that_fits_needs_no_way_out() -> None:
    assert found().remedies == ()


def test_the_job_as_it_is_may_not_fit_while_a_smaller_batch_does() -> None:
    answer = found(batch={"size": 1000, "sequence": 1024})
    assert answer.own.estimate.verdict == "does not fit"
    assert answer.own.largest_batch.size == 256
    assert answer.remedies == ()


LARGE = {"size": 2, "sequence": 2**20}
FSDP2 = {"runtime": "fsdp2"}


def test_ways_out_were_tried_and_those_that_fit_come_first() -> None:
    answer = found(batch=LARGE)
    assert answer.own.largest_batch.size == 0
    verdicts = [remedy.estimate.verdict for remedy in answer.remedies]
    assert verdicts == sorted(verdicts, key=lambda verdict: verdict != "fits")
    assert answer.remedies[0].changes == ("memory.checkpointing = full",)
    assert answer.remedies[0].estimate.verdict == "fits"
    assert answer.remedies[0].longer == UNSET  # nobody said a step's seconds


def test_a_way_out_says_what_it_costs_in_time() -> None:
    def timed(job: Job) -> Footprint:
        """Half of the sequence has half of the tokens, in no more than a step is shorter."""
        seconds = 1.25 if memory_of(job).policy == "full" else 1.0
        tokens, world = job.batch.size * job.batch.sequence, job.cluster.world_size or 8
        time = StepTime(seconds, seconds, seconds, {}, tokens * world, 1, 1.0, world, "a formula")
        return msgspec.structs.replace(estimates()(job), time=time)

    longer = {each.changes: each.longer for each in fit(job(batch=LARGE), timed).remedies}
    assert longer["memory.checkpointing = full",] == pytest.approx(0.25)
    assert longer[f"batch.sequence = {2**19}",] == pytest.approx(1)


def test_what_does_not_help_is_not_named() -> None:
    answer = found(batch=LARGE, memory=FSDP2)
    changes = {change for remedy in answer.remedies for change in remedy.changes}
    assert any("parallel.tensor" in change for change in changes)
    assert not any("memory.loss" in change or "reduce_dtype" in change for change in changes)


def test_changes_are_joined_where_none_is_enough_alone() -> None:
    cluster = {"hbm_cap": "1 GiB"}
    answer = found(batch=LARGE, cluster=cluster, memory=FSDP2, capacity=GIB + GIB // 8)
    together = {"memory.checkpointing = full", "memory.offload = all"}
    (joined,) = (remedy for remedy in answer.remedies if together <= set(remedy.changes))
    assert joined.estimate.verdict == answer.remedies[0].estimate.verdict == "fits"
    assert len(answer.remedies[0].changes) > 1


def test_pairs_of_what_helps_most_are_tried_where_none_is_enough_alone() -> None:
    def footprint(job: Job) -> Footprint:
        """24 GiB of states that tensor ranks share, 24 GiB of tokens that checkpointing spares."""
        section, world = parallel_of(job), job.cluster.world_size or 8
        states = 24 * GIB // section.tensor // section.pipeline
        kept = 24 * GIB // (8 if memory_of(job).policy == "full" else 1)
        kinds: dict[Any, int] = {"optimizer_state": states, "activation": kept}
        rank = RankMemory("all ranks", 8, {}, states + kept, "step", kinds, {}, ())
        return Footprint("llama", 1, world, {}, {}, (rank,), 7 * GIB)

    answer = fit(job(memory=FSDP2), footprint)
    assert answer.fewest_ranks == 0
    fits = [each.changes for each in answer.remedies if each.estimate.verdict == "fits"]
    pair = {"parallel.tensor = 8 (data_shard = 1)", "memory.checkpointing = full"}
    assert pair in map(set, fits)
    assert all(len(changes) > 1 for changes in fits)
    pairs = {frozenset(each.changes) for each in answer.remedies if len(each.changes) == 2}
    assert len(pairs) == sum(len(each.changes) == 2 for each in answer.remedies)
    degrees = {"parallel.tensor = 8", "parallel.pipeline = 8 (data_shard = 1)"}
    assert degrees not in pairs  # there are not 64 ranks
    assert answer.estimates <= 40


def test_two_degrees_say_once_how_far_data_is_shared() -> None:
    answer = found(batch={"size": 1, "sequence": 2**22}, memory=FSDP2, capacity=GIB // 4)
    sharing = [each for each in answer.remedies if str(each.changes).count("data_shard") > 1]
    assert not sharing


def test_nothing_is_named_that_the_job_s_runtime_does_not_run() -> None:
    cluster = {"hbm_cap": "1 GiB"}
    ours = found(batch=LARGE, cluster=cluster, capacity=GIB // 8)
    changes = {change for remedy in ours.remedies for change in remedy.changes}
    assert "memory.checkpointing = full" in changes
    assert "memory.offload = all" in changes
    assert "train.optimizer = adamw_8bit" in changes
    refused = ("parallel.tensor", "parallel.pipeline", "memory.offload = states")
    assert not any(change.startswith(refused) for change in changes)


@pytest.mark.parametrize(
    ("zero", "named"),
    [
        (1, {"memory.zero = 3", "memory.zero = [2, 3]"}),
        (3, {"memory.zero = [2, 3]"}),
        ([2, 3], set()),
    ],
)
def test_states_that_replicas_have_alike_may_be_shared_among_them(
    zero: Any, named: set[str]
) -> None:
    def footprint(job: Job) -> Footprint:
        """12 GiB of states, whole gradients of 1 GiB below stage 3, 1 GiB of whole parameters."""
        section, degrees = memory_of(job), parallel_of(job)
        states = 12 * GIB // (8 if section.twice else 8 // degrees.data_replicate)
        kinds: dict[Any, int] = {"optimizer_state": states}
        whole = GIB if section.stage < 3 else 0
        rank = RankMemory("all ranks", 8, {}, states + whole + GIB, "step", kinds, {}, ())
        return Footprint("llama", 1, 8, {}, {}, (rank,), 3 * GIB)

    answer = fit(job(parallel={"data_replicate": 2}, memory={"zero": zero}), footprint)
    changes = {change for remedy in answer.remedies for change in remedy.changes}
    assert {change for change in changes if "zero" in change} == named
    if named:
        assert answer.remedies[0].changes == ("memory.zero = [2, 3]",)
        assert answer.remedies[0].estimate.verdict == "fits"


def test_one_copy_is_not_told_to_share_among_replicas() -> None:
    answer = found(batch=LARGE, capacity=GIB // 8)
    assert not any("zero" in change for each in answer.remedies for change in each.changes)


EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn_dim": 64}


def _of_experts(job: Job) -> Footprint:
    """40 GiB of experts that only their own degree divides, and 40 GiB that all ranks share."""
    section, world = parallel_of(job), job.cluster.world_size or 8
    peak = 40 * GIB // section.expert + 40 * GIB // world
    kinds: dict[Any, int] = {"weight": peak}
    rank = RankMemory("ranks with experts", 8, {}, peak, "step", kinds, {}, ())
    return Footprint("llama", 1, world, {}, {}, (rank,), 6 * GIB)


def test_experts_are_divided_on_more_ranks_where_those_there_are_do_not_do() -> None:
    model = {"kind": "llama", "layers": 2, "dim": 64, "heads": 4, "vocab": 256, **EXPERTS}
    answer = fit(job(model=model, memory=FSDP2), _of_experts)
    assert answer.fewest_ranks == 0
    assert answer.remedies[0].changes == ("parallel.expert = 8", "64 ranks")
    assert answer.remedies[0].estimate.verdict == "fits"
    ours = fit(job(model=model), _of_experts)
    assert not any("expert" in change for each in ours.remedies for change in each.changes)


def test_more_ranks_are_named_where_they_are_enough() -> None:
    answer = found(cluster={"hbm_cap": "1 GiB"}, capacity=GIB, batch={"size": 1, "sequence": 4096})
    assert answer.own.largest_batch.size == 0
    assert answer.fewest_ranks
    named = {change for remedy in answer.remedies for change in remedy.changes}
    assert f"parallel.data_shard = {answer.fewest_ranks} ({answer.fewest_ranks} ranks)" in named


def test_every_variant_is_estimated_once_and_shown() -> None:
    seen: list[Job] = []
    lines: list[str] = []

    def counting(job: Job) -> Footprint:
        seen.append(job)
        return estimates()(job)

    answer = fit(job(), counting, lines.append)
    assert len(seen) == answer.estimates == len(lines) + 1 <= 40
    assert lines[0].startswith("estimate 2: ")
    assert len({repr(each) for each in seen}) == len(seen)


@pytest.mark.slow
def test_a_llama_that_can_be_planned_is_planned_for_each_size() -> None:
    document: dict[str, Any] = {
        "model": {"kind": "llama", "layers": 2, "dim": 32, "heads": 4, "vocab": 64},
        "cluster": {"preset": "local", "world_size": 2, "ddr_cap": "2 MiB"},
        "batch": {"size": 1, "sequence": 64},
        "memory": {"param_dtype": "fp32"},
    }
    heard: list[float] = []
    answer = fit(parse_job(document), hear=lambda watch: heard.append(watch.elapsed))
    size = answer.own.largest_batch.size
    assert heard
    plan(parse_job(document | {"batch": {"size": size, "sequence": 64}}))
    with pytest.raises(NoPlanError):
        plan(parse_job(document | {"batch": {"size": size + 1, "sequence": 64}}))


def test_a_batch_that_cannot_be_planned_does_not_fit() -> None:
    tables = [{"name": "a", "rows": 100, "dim": 16, "optimizer": "sgd"}]

    def planned(job: Job) -> Footprint:
        if job.batch.size > 70:
            raise NoPlanError("no plan found that fits")
        return estimates()(parse_job({"model": {"kind": "llama"}, "batch": {"size": 1}}))

    answer = fit(parse_job({"tables": tables, "batch": {"size": 64}}), planned)
    assert [row.checkpointing for row in answer.policies] == ["none"]
    assert answer.own.largest_batch.size == 70
    assert answer.longest_sequence is None
