"""Estimates beside what trackers see of whole steps, of torch's FSDP2 and of our runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from memory_truth import Training, fake_group, fsdp_mem_tracker, mesh_of, our_tracker
from tiny_configs import FAMILIES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from shardwright.core.footprint import RankMemory
from shardwright.core.llama import LlamaShape
from shardwright.estimate.unplanned import estimated as footprint
from shardwright.estimate.unplanned import sharding
from shardwright.heap.machine import Sharding
from shardwright.job.job import Job, degrees_of, memory_of, parse_job
from shardwright.models.llama import Llama
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.optimizer import optimizer_parameters
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.trace.checkpointing import apply_checkpointing
from shardwright.tracker.memory import MemoryTracker
from shardwright.tracker.private import fsdp2_holds_all_reduced
from shardwright.tracker.tensors import DTYPES

MODEL = {
    "kind": "llama",
    "layers": 2,
    "dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 200,
    "vocab": 500,
}
VALIDATION = Path(__file__).parents[2] / "validation" / "cpu-2-cores"
HAS_BUFFERS = hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
LOSS_BYTES = 8  # the loss and its gradient: a program's own names say when they go
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "three inputs of reduce-scatters, logits in fp32": {
        "cluster": {"world_size": 4},
        "memory": {"fp32_logits": True, "fsdp2": {"reduce_scatter_max_input_buffers": 3}},
    },
    "uneven ranks, every block again": {
        "cluster": {"world_size": 7},
        "memory": {"checkpointing": "full"},
    },
    "fp32, some blocks again, kept whole": {
        "model": {"layers": 5},
        "memory": {
            "param_dtype": "fp32",
            "checkpointing": "layers:3",
            "reshard_after_forward": False,
        },
    },
    "tied, replicas, sums in bf16": {
        "model": {"tied_embeddings": True},
        "parallel": {"data_replicate": 2},
        "memory": {"reduce_dtype": "bf16", "checkpointing": "selective"},
    },
    "replicas, the second microbatch's sums held": {
        "cluster": {"world_size": 12},
        "batch": {"size": 2},
        "parallel": {"data_replicate": 4, "microbatches": 2},
        "memory": {"param_dtype": "fp32"},
    },
    "experts, all freed": {
        "model": {"experts": 4, "experts_per_token": 2},
        "cluster": {"world_size": 24},
        "memory": {"reshard_after_forward": True},
    },
    "microbatches, large weights, few tokens": {
        "model": {"vocab": 9000, "ffn_dim": 2000},
        "batch": {"size": 2, "sequence": 4},
        "parallel": {"microbatches": 2},
    },
}


def job_of(
    sections: dict[str, dict[str, Any]] | None = None,
    model: dict[str, Any] = MODEL,
    **memory: Any,
) -> Job:
    """A small llama on the CPU's kernels, changed as told."""
    document: dict[str, dict[str, Any]] = {
        "model": model,
        "cluster": {"world_size": 4},
        "batch": {"size": 2, "sequence": 48},
        "memory": {"runtime": "fsdp2", "lowering": "cpu", **memory},
    }
    for name, section in (sections or {}).items():
        document[name] = {**document.get(name, {}), **section}
    return parse_job(document)


def estimated(job: Job) -> RankMemory:
    (rank,) = footprint(job).ranks
    return rank


def seen(job: Job) -> int:
    """The peak as torch's tracker sees it; ours with torch 2.11, whose counts what FSDP2 freed."""
    if torch.__version__ >= "2.12":
        return fsdp_mem_tracker(job).peak
    return our_tracker(job, one_module=True).result().peak.bytes


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fsdp2_takes_what_was_estimated_as_torchs_tracker_sees_it(case: str) -> None:
    job = job_of(CASES[case])
    if memory_of(job).fsdp2_settings.reduce_scatter_max_input_buffers > 1 and not HAS_BUFFERS:
        pytest.skip(f"FSDP2 of torch {torch.__version__} keeps one input of reduce-scatters")
    truth = seen(job)
    assert abs(estimated(job).peak_bytes - truth) <= LOSS_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp2_takes_what_was_estimated_of_a_hugging_face_config(
    family: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
    job = job_of(model={"hf_config": str(config)})
    truth = seen(job)
    assert abs(estimated(job).peak_bytes - truth) <= LOSS_BYTES


@pytest.mark.slow
def test_fsdp2_takes_what_was_estimated_as_our_tracker_sees_it_in_every_phase() -> None:
    job = job_of({"model": {"layers": 4}})
    grouped = our_tracker(job).result()  # norm and output are two modules of one group
    for phase in estimated(job).phases:
        seen = next(each for each in grouped.phases if each.phase == phase.phase)
        assert abs(phase.bytes - seen.bytes) <= LOSS_BYTES


@contextmanager
def _ours(job: Job, strategy: str, prefetch: int) -> Iterator[Training]:
    """The job under our runtime on a fake group, wrapped as :func:`memory_truth.training` does."""
    section, batch, shape = memory_of(job), job.batch, job.model.shape
    kept = section.reshard_after_forward
    assert isinstance(shape, LlamaShape)
    with fake_group(job.cluster.world_size or 1):
        mesh = mesh_of(job)
        with FakeTensorMode():
            model: Any = Llama(shape, sequence=batch.sequence)
            apply_checkpointing(list(model.layers.values()), section.policy)
            units: list[Any] = [*model.layers.values(), model]
            if not shape.tied_embeddings:
                units = [model.tok_embeddings, [model.norm, model.output], *units]
            for unit in units:
                fully_shard_flat(
                    unit,
                    mesh,
                    shard_strategy=strategy,
                    prefetch=prefetch,
                    reshard_after_forward=None if kept == "default" else kept,
                    zero=section.zero if section.zero != "auto" else section.stage,
                    precision=MixedPrecision(
                        DTYPES[section.param_dtype], DTYPES[section.reduce_dtype]
                    ),
                )
            parameters = optimizer_parameters(model, per_unit=True)
            optimizer = torch.optim.AdamW(parameters, foreach=True)
            size = (batch.size, batch.sequence)
            tokens, targets = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
            yield Training(model, optimizer, (tokens, targets))


OURS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "one rank": {"cluster": {"world_size": 1}},
    "every block again, fp32": {"memory": {"checkpointing": "full", "param_dtype": "fp32"}},
    "tied, replicas": {
        "model": {"tied_embeddings": True},
        "parallel": {"data_replicate": 2},
    },
    "gradients and states cut over replicas too": {
        "parallel": {"data_replicate": 2},
        "memory": {"zero": [2, 3]},
    },
    "kept whole, sums in bf16": {
        "memory": {"reshard_after_forward": False, "reduce_dtype": "bf16"},
    },
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("case", "strategy", "prefetch"),
    [
        ("plain", "flat", 1),
        ("plain", "per_param", 0),
        ("one rank", "flat", 0),
        ("every block again, fp32", "per_param", 1),
        ("tied, replicas", "flat", 1),
        ("gradients and states cut over replicas too", "flat", 1),
        ("kept whole, sums in bf16", "per_param", 1),
    ],
)
def test_our_runtime_takes_what_was_estimated(
    case: str, strategy: str, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(OURS[case], runtime="shardwright")

    def cut(*arguments: Any) -> Sharding:
        found = sharding(*arguments)
        return msgspec.structs.replace(found, flat=strategy == "flat", prefetch=prefetch)

    monkeypatch.setattr("shardwright.estimate.unplanned.sharding", cut)
    with _ours(job, strategy, prefetch) as run:
        run.step()
        run.step()  # from the second on the order is known that prefetching follows
        with MemoryTracker(run.model, run.optimizer, run.batch) as tracker:
            run.step()
    seen = {phase.phase: phase.bytes for phase in tracker.result().phases}
    # our runtime casts the inputs of a unit after it began to gather it, a recording before
    cast = 2 * job.batch.sequence * 16 // 2 * 2
    for phase in estimated(job).phases:
        assert abs(phase.bytes - seen[phase.phase]) <= LOSS_BYTES + cast


@pytest.mark.slow
def test_checkpointing_policies_of_an_8b_model_take_what_torchs_tracker_saw() -> None:
    seen = json.loads((VALIDATION / "memory.json").read_text())["policies"]  # a minute each
    truth = {name: seen[name]["truth_mib"] for name in ("none", "selective", "full")}
    model = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
    sections = {
        "model": {**model, "vocab": 128256},
        "cluster": {"world_size": 8},
        "batch": {"size": 1, "sequence": 8192},
    }
    found = {
        name: estimated(job_of(sections, checkpointing=name, param_dtype="bf16")).peak_bytes
        for name in truth
    }
    assert {name: round(size / 2**20, 1) for name, size in found.items()} == truth


def test_more_shards_never_take_more() -> None:
    for runtime in ("fsdp2", "shardwright"):
        jobs = [
            job_of({"model": {"vocab": 512}, "cluster": {"world_size": world}}, runtime=runtime)
            for world in (1, 2, 4, 8)  # which divide every matrix: nothing is padded
        ]
        peaks = [estimated(job).peak_bytes for job in jobs]
        assert peaks == sorted(peaks, reverse=True)


def test_zero_1_shares_states_and_ddp_nothing() -> None:
    ddp = estimated(job_of(runtime="ddp")).by_category
    zero = estimated(job_of(runtime="ddp", zero=1)).by_category
    assert zero["weight"] == ddp["weight"]
    assert zero["optimizer_state"] < ddp["optimizer_state"] / 2


@pytest.mark.parametrize("memory", [{"runtime": "ddp"}, {"runtime": "ddp", "zero": 1}, {}])
def test_modules_weigh_together_what_the_rank_keeps(memory: dict[str, Any]) -> None:
    (rank,) = footprint(job_of(**memory), details=True).ranks
    whole = next(module for module in rank.modules if not module.name)
    assert whole.parameters == rank.by_category["weight"]


def test_uneven_routing_shows_the_median_and_one_rank_in_a_hundred_if_asked() -> None:
    skewed = {"routing": "skewed", "expert": 4}
    model = {"experts": 8, "experts_per_token": 2}

    def classes(**parallel: Any) -> dict[str, tuple[int, int]]:
        sections = {"model": model, "parallel": {**skewed, **parallel}}
        ranks = footprint(job_of({**sections, "cluster": {"world_size": 200}})).ranks
        return {rank.name: (rank.ranks, rank.peak_bytes) for rank in ranks}

    both, median = classes(), classes(expert_load="p50")
    name = "median of experts"
    assert set(both) == {"99th percentile of experts", name}
    assert both["99th percentile of experts"][0] == 2
    assert median == {name: (200, both[name][1])}


def test_without_a_pipeline_every_microbatch_is_reduced_and_in_one_the_last() -> None:
    found = {
        (runtime, stages): _sharding(runtime, stages)
        for runtime in ("fsdp2", "shardwright")
        for stages in (1, 2)
    }
    assert {key: each.reduces for key, each in found.items()} == {
        ("fsdp2", 1): "each",
        ("fsdp2", 2): "end",
        ("shardwright", 1): "each",
        ("shardwright", 2): "last",
    }
    assert [each.reshard_after_forward for each in found.values()] == [True, False, True, False]


def _sharding(runtime: str, stages: int) -> Sharding:
    job = job_of({"parallel": {"pipeline": stages}}, runtime=runtime)
    return sharding(memory_of(job), degrees_of(job, 4), False)


def test_fsdp2_keeps_the_head_unless_all_is_to_be_freed() -> None:
    for wanted, kept in (("default", {"", "head"}), (True, {""})):
        job = job_of(reshard_after_forward=wanted)
        assert sharding(memory_of(job), degrees_of(job, 4), False).kept == kept


def _names(**sections: dict[str, Any]) -> list[tuple[str, int]]:
    experts = {"experts": 4, "experts_per_token": 2, "expert_ffn_dim": 64}
    document = {
        "model": MODEL | experts,
        "memory": {"runtime": "fsdp2"},
        "batch": {"size": 1, "sequence": 16},
        **sections,
    }
    return [(each.name, each.ranks) for each in footprint(parse_job(document)).ranks]


def test_ranks_that_get_experts_where_others_get_none_are_called_so() -> None:
    assert _names(cluster={"world_size": 4}) == [("all ranks", 4)]
    assert _names(cluster={"world_size": 6}) == [("ranks with experts", 4)]
    replicas = {"data_replicate": 2, "data_shard": 6}
    assert _names(cluster={"world_size": 12}, parallel=replicas) == [("ranks with experts", 8)]
    shared = {"expert": 4}
    assert _names(cluster={"world_size": 8}, parallel=shared) == [("all ranks", 8)]


def test_ranks_whose_experts_receive_more_are_not_called_all_ranks() -> None:
    skewed = {"expert": 4, "routing": "skewed"}
    names = {name for name, _ in _names(cluster={"world_size": 8}, parallel=skewed)}
    assert names == {"99th percentile of experts", "median of experts"}


def _in_microbatches(number: int, size: int, **memory: Any) -> RankMemory:
    """The fullest rank of a llama whose batch of ``size`` is so many microbatches."""
    job = {
        "model": {"kind": "llama", "layers": 2, "dim": 32, "heads": 2, "ffn_dim": 32, "vocab": 64},
        "cluster": {"world_size": 2},
        "batch": {"size": size, "sequence": 16},
        "parallel": {"microbatches": number},
        "memory": {"param_dtype": "fp32", **memory},
    }
    return footprint(parse_job(job), details=True).worst


def test_a_module_saves_what_one_microbatch_leaves() -> None:
    one, several = (_in_microbatches(number, 2 * number) for number in (1, 3))
    saved = {module.name: module.saved for module in one.modules}
    assert sum(saved.values()) > 0
    assert {module.name: module.saved for module in several.modules} == saved


def test_gradients_of_zero_1_are_whole_between_microbatches() -> None:
    (forward,) = (p for p in _in_microbatches(2, 4, zero=1).phases if p.phase == "forward")
    assert forward.by_category["unreduced_gradient"] == forward.by_category["weight"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"memory": {"runtime": "ddp", "zero": 1}}, "memory.zero = 1 shares nothing"),
        (
            {
                "cluster": {"world_size": 2},
                "parallel": {"data_replicate": 2},
                "memory": {"runtime": "ddp", "zero": 1},
            },
            "memory.zero = 1 shares nothing: parallel.data_shard is 1",
        ),
        (
            {
                "cluster": {"world_size": 4},
                "parallel": {"data_replicate": 2},
                "memory": {"runtime": "fsdp2"},
            },
            f"the backward ends (torch {torch.__version__}, found here)"
            if fsdp2_holds_all_reduced()
            else f"one unit long (torch {torch.__version__}, found here)",
        ),
        (
            {
                "cluster": {"world_size": 4},
                "parallel": {"data_replicate": 2},
                "memory": {"runtime": "fsdp2", "fsdp2": {"holds_all_reduced": False}},
            },
            "one unit long (memory.fsdp2.holds_all_reduced)",
        ),
        (
            {"parallel": {"pipeline": 2}},
            "the last stage keeps no results",
        ),
    ],
)
def test_what_an_estimate_takes_for_granted_is_said(keys: dict[str, Any], said: str) -> None:
    stages = keys.get("parallel", {}).get("pipeline", 1)
    document = {
        "model": {"kind": "llama", "layers": 2, "dim": 32, "heads": 2, "vocab": 64},
        "cluster": {"preset": "h100-8", "world_size": stages},
        "batch": {"size": 2, "sequence": 16},
    }
    assert any(said in note for note in footprint(parse_job(document | keys)).assumptions)
