"""``--why-not`` of dense units: what is said of another way is what a job with it written in it
finds."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
from combinations import rare, slow

from shardwright.core.errors import ShardwrightError
from shardwright.estimate.recordings import described, found_for
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan, UnitPlan
from shardwright.planner import explain
from shardwright.planner.explain import WAYS
from shardwright.planner.planner import written
from shardwright.planner.search.watch import Watch

MIB = 2**20


def _drawn(seed: int) -> dict[str, Any]:
    """A job of a recommender or a language model, some of them short of memory."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4, 8])
    if draw.random() < 0.4:
        model, room = _recommender(draw)
    else:
        model, room = _language_model(draw)
    room = int(room * draw.choice([0.3, 0.6, 1.0, 3.0, 30.0]) * draw.uniform(0.7, 1.3))
    cluster: dict[str, Any] = {"preset": "local", "ddr_cap": room}
    if draw.random() < 0.5:
        cluster = {"preset": "h100-8", "hbm_cap": room}
        if ranks > 3 and draw.random() < 0.3:
            cluster["local_world_size"] = ranks // 2
    return {"cluster": {**cluster, "world_size": ranks}, **model, **_settings(draw)}


def _recommender(draw: random.Random) -> tuple[dict[str, Any], int]:
    dim = draw.choice([8, 16, 32])
    widths = [draw.choice([64, 256, 512]), draw.choice([64, 256, 1024]), draw.choice([32, 128])]
    model = {
        "kind": "dlrm",
        "dense_features": draw.choice([4, 13]),
        "bottom": [widths[0], dim],
        "top": [*widths[1:], 1],
    }
    tables = [
        {"name": f"t{n}", "rows": draw.choice([100, 5_000, 50_000]), "dim": dim}
        for n in range(draw.randint(2, 5))
    ]
    batch = {"size": draw.choice([16, 128])}
    return {"model": model, "tables": tables, "batch": batch}, 12 * MIB


def _language_model(draw: random.Random) -> tuple[dict[str, Any], int]:
    layers, heads = draw.randint(2, 5), draw.choice([2, 4])
    dim = heads * draw.choice([8, 16])
    model = {"kind": "transformer", "layers": layers, "dim": dim, "heads": heads}
    model["vocab"] = draw.choice([256, 1000])
    batch = {"size": draw.choice([1, 4]), "sequence": draw.choice([8, 32])}
    return {"model": model, "batch": batch}, (layers * dim * dim * 12 + 2000 * dim) * 16


def _settings(draw: random.Random) -> dict[str, Any]:
    """What a job says of its units."""
    dense: dict[str, Any] = {}
    memory: dict[str, Any] = {"param_dtype": "fp32"}
    if draw.random() < 0.4:
        dense["checkpointing"] = draw.choice([["none"], ["none", "full"], ["selective"]])
    if draw.random() < 0.3:
        dense["prefetch"] = draw.choice([0, 1])
    memory["zero"] = draw.choice([3, 3, 2, 1, "auto"])
    memory["offload"] = draw.choice(["none", "none", "auto", "all"])
    if memory["zero"] in (1, 2) and draw.random() < 0.4:
        dense["bucket_size"] = draw.choice([2_000, 20_000, "auto"])
    section = {"memory": memory} if draw.random() < 0.7 else {}
    if not section:
        dense.pop("bucket_size", None)
    planner = {"dense": dense, "units": {}}
    return {**section, "planner": planner, "train": {"optimizer": draw.choice(["sgd", "adamw"])}}


def _with(document: dict[str, Any], made: Plan, unit: UnitPlan, wanted: str) -> dict[str, Any]:
    """The job with what is wanted written in it, as its documentation says."""
    job = copy.deepcopy(document)
    planner, dense = job["planner"], job["planner"]["dense"]
    if wanted in ("checkpointed", "none", "selective", "full"):
        dense["checkpointing"] = ["selective", "full"] if wanted == "checkpointed" else [wanted]
        return job
    size, stages = made.model.bucket_size, ("zero1", "zero2", "zero3", "hsdp", "hfsdp")
    if wanted not in stages:  # buckets are units of one size at one stage, modules have none
        dense.pop("bucket_size", None)
        dense |= {"bucket_size": size} if size else {}
        if size:
            job["memory"]["zero"] = made.job.memory.zero
    place = {"replicated": "replicate", "offloaded": "offload"}.get(wanted, "shard")
    for each in made.model.units:
        if set(each.members) <= set(unit.members):
            planner["units"][each.name] = place
    if wanted in ("resharded", "kept"):
        dense["reshard"] = wanted == "resharded"
    if wanted in stages:
        memory = job.setdefault("memory", {"param_dtype": "fp32"})
        memory["zero"] = [2, 3] if wanted == "hfsdp" else int(wanted[-1]) if "ze" in wanted else 3
        dense.pop("bucket_size", None)
        dense |= {"bucket_size": size} if size and wanted in ("zero1", "zero2") else {}
        replicas = made.grid.replicas
        if wanted in ("hsdp", "hfsdp") and replicas == 1:
            local, ranks = job["cluster"].get("local_world_size"), made.world_size
            hosts = ranks // local if local else 1
            divisors = (n for n in range(2, ranks) if ranks % n == 0)
            replicas = hosts if hosts > 1 else next(divisors)
        if replicas > 1:
            job["parallel"] = {"data_replicate": replicas}
    return job


def _seconds(document: dict[str, Any]) -> float | None:
    """Of a plan, without the ways out that a refusal tries; None where there is none."""
    try:
        found = found_for(parse_job(document), Watch())
    except ShardwrightError:
        return None
    return None if found.draft is None else found.seconds


def asked(seeds: range, most: int) -> tuple[int, list[Any]]:
    """How many answers were compared, at most ``most``, and which differ from planning anew."""
    compared, wrong = 0, list[Any]()
    for seed in seeds:
        document = _drawn(seed)
        try:
            free = found_for(parse_job(document), Watch())
        except ShardwrightError:
            continue
        if free.draft is None:
            continue
        made = written(free, Watch())
        draw = random.Random(~seed)
        for unit, wanted in itertools.product(draw.sample(made.units, 1), draw.sample(WAYS, 4)):
            found = explain.why_not(made, unit.name, wanted, described)
            if found.replanned is None:
                assert found.verdict in ("chosen", "impossible")
                continue
            said, alone = found.replanned.seconds, _seconds(_with(document, made, unit, wanted))
            compared += 1
            if said != alone:
                wrong.append((seed, unit.name, wanted, found.verdict, said, alone))
        if compared >= most:
            break
    return compared, wrong


@pytest.mark.parametrize(("first", "most"), [(0, 6), slow(100, 8), rare(100, 20)])
def test_a_replanned_answer_is_that_of_a_job_with_the_way_written_in_it(
    first: int, most: int
) -> None:
    compared, wrong = asked(range(first, 1_000), most)
    assert compared >= most
    assert wrong == []
