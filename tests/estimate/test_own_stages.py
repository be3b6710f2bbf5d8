"""A pipeline of a user's own module has the stages that a llama's has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.core.footprint import Footprint
from shardwright.estimate.fit import fit
from shardwright.estimate.footprint import footprint
from shardwright.job.job import Job, parse_job

LLAMA = {"layers": 6, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 200, "vocab": 500}
BATCH, LENGTH = 4, 32


@pytest.fixture(autouse=True)
def _beside_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def job_of(
    model: dict[str, Any], parallel: dict[str, Any], cap: str = "1 GiB", **memory: str
) -> Job:
    return parse_job(
        {
            "model": model,
            "cluster": {"world_size": 8, "compute_device": "cpu", "ddr_cap": cap},
            "batch": {"size": BATCH, "sequence": LENGTH},
            "parallel": parallel,
            "memory": {"runtime": "fsdp2", "param_dtype": "fp32", **memory},
        }
    )


def own(function: str, **arguments: Any) -> dict[str, Any]:
    return {"python": f"architectures:{function}", "arguments": arguments}


def stages_of(found: Footprint) -> dict[int, Any]:
    return {
        rank.coordinates["pipeline"]: [(p.phase, p.bytes) for p in rank.phases]
        for rank in found.ranks
    }


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layers", "parallel", "memory"),
    [
        (6, {"pipeline": 2, "schedule": "gpipe"}, {"runtime": "ddp"}),
        (6, {"pipeline": 4}, {"checkpointing": "full"}),
        (4, {"pipeline": 4, "microbatches": 2}, {}),  # the last stage has no block
        (14, {"pipeline": 4}, {"checkpointing": "selective"}),
        (10, {"pipeline": 2, "schedule": "interleaved_1f1b"}, {}),
    ],
)
def test_stages_take_what_those_of_the_same_llama_take(
    layers: int, parallel: dict[str, Any], memory: dict[str, str]
) -> None:
    model = {**LLAMA, "layers": layers}
    known = footprint(job_of({"kind": "llama", **model}, parallel, **memory))
    found = footprint(job_of(own("a_llama", model=model), parallel, **memory))
    assert stages_of(found) == stages_of(known)
    assert found.parameters == known.parameters
    assert len(found.ranks) == parallel["pipeline"]


@pytest.mark.slow
def test_ends_that_are_tied_both_have_the_weight() -> None:
    def weights(tied: bool) -> list[int]:
        job = job_of(own("attended", tied=tied), {"pipeline": 2}, runtime="ddp")
        ranks = footprint(job).ranks
        by_stage = {rank.coordinates["pipeline"]: rank.by_category["weight"] for rank in ranks}
        return [by_stage[0], by_stage[1]]

    assert weights(tied=True) == weights(tied=False)
    assert footprint(job_of(own("attended", tied=True), {"pipeline": 2})).parameters < (
        footprint(job_of(own("attended", tied=False), {"pipeline": 2})).parameters
    )


@pytest.mark.slow
def test_blocks_may_hand_each_other_a_dictionary() -> None:
    stages = {"pipeline": 2, "schedule": "gpipe"}
    carried, plain = (footprint(job_of(own(f), stages)) for f in ("carried", "attended"))
    assert stages_of(carried) == stages_of(plain)


def test_stages_are_cut_over_tensor_ranks_as_well() -> None:
    plan = {"layers.*.up": "colwise", "layers.*.gate": "colwise", "layers.*.down": "rowwise"}
    both = {"pipeline": 2, "tensor": 2, "parallelize_plan": plan}
    whole, cut = (footprint(job_of(own("attended"), p)) for p in ({"pipeline": 2}, both))
    kept = [found.worst.by_category["activation"] for found in (whole, cut)]
    assert kept[1] < kept[0]


def test_experts_divided_by_ranks_keep_what_ranks_that_shard_them_keep() -> None:
    """All but what is gathered: what a refusal of parallel.expert says, told of a llama."""
    mixed = {**LLAMA, "layers": 2, "experts": 8, "experts_per_token": 2}
    model = {"kind": "llama", **mixed}
    apart, alike = (footprint(job_of(model, p)).worst for p in ({"expert": 2}, {}))
    for kind in ("weight", "gradient", "optimizer_state"):
        assert apart.by_category[kind] == pytest.approx(alike.by_category[kind], rel=0.01)
    assert apart.by_category["gathered_weight"] < alike.by_category["gathered_weight"]


@pytest.mark.product  # as it tries tensor degrees: test_tensor_parallel.py
def test_fit_tries_stages_of_a_module() -> None:
    job = job_of(own("attended", depth=12), {}, cap="300 KiB")
    tried = [line for remedy in fit(job).remedies for line in remedy.changes]
    assert any(line.startswith("parallel.pipeline = ") for line in tried)


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        (own("translator"), {"pipeline": 2}, "blocks that repeat in one list of modules"),
        (own("skipping"), {"pipeline": 2}, "blocks that"),
        (own("backwards"), {"pipeline": 2}, "in the order of their list, got 'blocks.1' after"),
        (own("remembering"), {"pipeline": 2}, "got the result of 'words' in a later stage"),
        (own("gated"), {"pipeline": 2}, "got the result of its own forward in a later stage"),
        (
            own("attended"),
            {"pipeline": 8, "chunks": 2, "schedule": "looped_bfs"},
            "at most 8 stages",
        ),
        (own("attended"), {"context": 2}, "parallel.context: .*one rank's share of the sequence"),
    ],
)
def test_what_has_no_stages_is_refused_by_what_is_in_the_way(
    model: dict[str, Any], parallel: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        footprint(job_of(model, parallel))
