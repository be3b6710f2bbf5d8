"""A plan checkpoints blocks where memory asks for it, takes the fastest way, and says why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from msgspec import UNSET
from plans import plan
from torch import nn

from shardwright.core.errors import InputError, MismatchError, NoPlanError
from shardwright.core.model import ModelSpec
from shardwright.estimate.recordings import described, plan_module
from shardwright.job.job import Job, checkpointing_of, parse_job
from shardwright.job.plan import Plan, sealed
from shardwright.planner import explain, planner

AMPLE = 2**30
SIZES = {"layers": 4, "dim": 32, "heads": 4, "ffn_dim": 64}


def _job(cap: int = AMPLE, planner: dict[str, Any] | None = None, **sections: Any) -> Job:
    document = {
        "model": {"kind": "transformer", **SIZES},
        "batch": {"size": 4, "sequence": 32},
        "cluster": {"preset": "local", "world_size": 2, "ddr_cap": cap},
        "planner": planner or {},
    }
    return parse_job({**document, **sections})


def _with(policy: str, cap: int = AMPLE) -> Job:
    return _job(cap, {"dense": {"checkpointing": [policy]}})


def _peak(made: Plan) -> int:
    return max(totals.peak_bytes for totals in made.ranks)


def _least(policy: str) -> int:
    """Bytes that a plan with a policy needs at least."""
    with pytest.raises(NoPlanError) as caught:
        plan(_with(policy, 2**10))
    return int(str(caught.value).partition("needs most, ")[2].partition(" B")[0].replace(",", ""))


def _policies(made: Plan) -> set[str]:
    return {unit.checkpointing for unit in made.units if unit.name.startswith("layers")}


@pytest.fixture(scope="module")
def free() -> Plan:
    return plan(_job())


@pytest.fixture(scope="module")
def needed() -> dict[str, int]:
    return {policy: _least(policy) for policy in ("none", "selective", "full")}


@pytest.fixture(scope="module")
def short(needed: dict[str, int]) -> Plan:
    """A plan in memory that no plan without checkpointing has room in."""
    return plan(_job(needed["none"] - 1))


@pytest.mark.parametrize("spare", [0, 1, 12345])
def test_nothing_is_checkpointed_where_the_fastest_plan_fits(free: Plan, spare: int) -> None:
    made = plan(_job(_peak(free) + spare))
    assert made.units == free.units
    assert made.search.tried is UNSET
    assert _policies(made) == {"none"}


def test_only_what_may_help_is_recorded() -> None:
    asked = []

    def counted(job: Job) -> ModelSpec:
        asked.append(checkpointing_of(job))
        return described(job)

    planner.plan(_job(), counted)
    assert asked == [("none",)]


def test_a_job_that_fits_only_with_checkpointing_gets_such_a_plan(
    short: Plan, needed: dict[str, int]
) -> None:
    assert _peak(short) < needed["none"]
    assert _policies(short) <= {"selective", "full"}
    blocks = [path for unit in short.units for path in unit.checkpointed]
    assert blocks == [f"layers.{k}" for k in range(SIZES["layers"])]


def test_of_the_policies_that_fit_the_fastest_is_taken(short: Plan) -> None:
    cap, tried = short.job.cluster.ddr_cap, short.search.tried
    assert tried is not UNSET
    assert [each.checkpointing for each in tried] == ["none", "selective", "full"]
    assert tried[0].max_rank_seconds is None
    for each in tried[1:]:
        alone = plan(_with(each.checkpointing, int(cap or 0)))
        assert alone.max_rank_seconds == each.max_rank_seconds
        assert _peak(alone) == each.peak_bytes
        assert short.max_rank_seconds <= alone.max_rank_seconds


def test_checkpointing_is_faster_where_it_saves_what_memory_costs(free: Plan) -> None:
    """One byte less than the fastest plan needs: whatever is chosen is not slower than without
    checkpointing."""
    cap = _peak(free) - 1
    assert plan(_job(cap)).max_rank_seconds <= plan(_with("none", cap)).max_rank_seconds


@pytest.mark.slow
def test_a_refusal_says_what_each_policy_needs(needed: dict[str, int]) -> None:
    with pytest.raises(NoPlanError) as caught:
        plan(_job(needed["full"] - 1))
    message = str(caught.value)
    for policy, nbytes in needed.items():
        assert f"{policy} {nbytes:,} B" in message.partition("Needed by checkpointing: ")[2]


@pytest.mark.slow
def test_a_refusal_names_a_policy_that_the_job_does_not_allow(needed: dict[str, int]) -> None:
    with pytest.raises(NoPlanError, match=r"What would help: .*checkpointing 'full' fits"):
        plan(_with("none", needed["full"]))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("policy", ["none", "full", "layers:2", "save:aten.addmm"])
def test_what_the_job_says_is_kept(policy: str) -> None:
    made = plan(_job(memory={"checkpointing": policy}))
    every = 2 if policy == "layers:2" else 1
    blocks = [f"layers.{k}" for k in range(SIZES["layers"]) if (k + 1) % every == 0]
    found = [path for unit in made.units for path in unit.checkpointed]
    assert found == ([] if policy == "none" else blocks)
    assert made.search.tried is UNSET


def test_what_is_computed_again_costs_seconds_and_saves_bytes() -> None:
    plans = {policy: plan(_with(policy)) for policy in ("none", "layers:2", "full")}
    seconds = [made.max_rank_seconds for made in plans.values()]
    peaks = [_peak(made) for made in plans.values()]
    assert seconds == sorted(set(seconds))
    assert peaks == sorted(set(peaks), reverse=True)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"planner": {"dense": {"checkpointing": ["some"]}}}, "expected one of none, full"),
        ({"planner": {"dense": {"checkpointing": []}}}, r"at least one policy, got \[\]"),
        (
            {
                "planner": {"dense": {"checkpointing": ["none"]}},
                "memory": {"checkpointing": "full"},
            },
            "expected none beside memory.checkpointing 'full'",
        ),
    ],
)
def test_policies_that_cannot_be_chosen_from_are_refused(
    sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=f"job: planner.dense.checkpointing: .*{said}"):
        _job(**sections)


def test_a_model_without_blocks_has_nothing_to_choose() -> None:
    tables = [{"name": "a", "rows": 9, "dim": 16}]
    with pytest.raises(InputError, match="which has no blocks"):
        parse_job({"tables": tables, "planner": {"dense": {"checkpointing": ["full"]}}})


def test_blocks_that_write_buffers_would_write_them_again_in_a_backward() -> None:
    def build() -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(5))
        return nn.Sequential(*blocks)

    with pytest.raises(InputError, match=r"memory.checkpointing: expected 'none' .* as BatchNorm"):
        plan_module(build, torch.randn(4, 8), memory={"checkpointing": "full"})
    assert plan_module(build, torch.randn(4, 8)).search.tried is UNSET


def test_a_checkpointed_unit_says_what_it_saves_and_costs() -> None:
    made, usual = plan(_with("full")), plan(_with("none"))
    found = {
        e.title.partition(": ")[2]: e for e in explain.explain_tensor(made, "layers.0", described)
    }
    saved = found["bytes that checkpointing full saves, beside none"]
    cost = found["seconds that checkpointing full costs, beside none"]
    units = [made_.units[1] for made_ in (made, usual)]
    assert units[0].members == units[1].members
    assert saved.stored > 0
    assert cost.stored == pytest.approx(units[0].seconds - units[1].seconds, rel=1e-9)
    without = [e.title for e in explain.explain_tensor(made, "layers.0")]
    assert not any("beside none" in title for title in without)


@pytest.mark.parametrize(
    ("wanted", "forced"),
    [
        ("replicated", {"units": {"layers": "replicate"}}),
        ("resharded", {"units": {"layers": "shard"}, "dense": {"reshard": True}}),
        ("kept", {"units": {"layers": "shard"}, "dense": {"reshard": False}}),
        ("full", {"dense": {"checkpointing": ["full"]}}),
        ("selective", {"dense": {"checkpointing": ["selective"]}}),
    ],
)
def test_another_way_has_the_numbers_of_the_plan_that_is_forced(
    wanted: str, forced: dict[str, Any]
) -> None:
    fixed = {"layers_per_unit": SIZES["layers"], "prefetch": 0}
    units = {"embed": "replicate", "head": "replicate", "layers": "shard"}
    base = {"units": units, "dense": {**fixed, "reshard": wanted != "resharded"}}
    made = plan(_job(AMPLE, base))
    again = {
        "units": {**units, **forced.get("units", {})},
        "dense": {**base["dense"], **forced.get("dense", {})},
    }
    other = plan(_job(AMPLE, again))
    found = explain.why_not(made, made.units[1].name, wanted, described)
    assert found.seconds == pytest.approx(other.max_rank_seconds, rel=1e-12)
    assert found.replanned is not None
    assert found.replanned.seconds == other.max_rank_seconds
    assert found.missing == 0
    assert f"{_peak(other):,} B" in found.reason


def test_why_not_says_which_limit_another_way_breaks(short: Plan) -> None:
    found = explain.why_not(short, "layers.0", "none", described)
    assert found.verdict == "does not fit"
    assert f"{found.missing:,} B too much" in found.reason
    chosen = explain.why_not(short, "layers.0", "checkpointed", described)
    assert chosen.verdict == "chosen"


def test_a_way_that_a_unit_has_not_is_told_from_one_that_there_is_not(free: Plan) -> None:
    found = explain.why_not(free, "head", "full", described)
    assert (found.verdict, found.reason) == (
        "impossible",
        "full is not possible: it is no part that repeats.",
    )
    with pytest.raises(InputError, match="--why-not of unit 'head': expected one of replicated"):
        explain.why_not(free, "head", "row_wise", described)


def test_a_policy_that_the_job_does_not_allow_is_not_explained() -> None:
    made = plan(_with("full"))
    other = msgspec.structs.replace(made, job=_with("selective"))
    with pytest.raises(MismatchError, match="plan: checkpointing: expected selective, got full"):
        explain.draft_of(sealed(other))


def test_a_refusal_names_activations_where_they_are_most_of_a_peak_and_a_part_where_it_is() -> None:
    for batch, said in (
        (256, "the most at its peak, in backward, are activations with "),
        (1, "its largest part is "),
    ):
        with pytest.raises(NoPlanError) as caught:
            plan(_job(2**16, {"dense": {"checkpointing": ["none"]}}, batch={"size": batch}))
        assert said in str(caught.value)
