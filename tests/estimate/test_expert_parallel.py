"""Experts of a user's own module on ranks that have some of them each take what the built-in ones
do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import pytest
import torch

from shardwright.core.errors import InputError, ShardwrightError, UnsupportedError
from shardwright.core.footprint import Footprint
from shardwright.estimate.fit import fit
from shardwright.estimate.parallelize import Routing, cut_experts
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import Job, parse_job

# Of a tied llama all that is in no layer is the root's, as it is of a module.
LLAMA = {
    "layers": 6,
    "dim": 64,
    "heads": 4,
    "vocab": 300,
    "tied_embeddings": True,
    "experts": 8,
    "experts_per_token": 2,
    "expert_ffn_dim": 96,
}
PLAN = {"layers.*.moe.experts": "expert"}


@pytest.fixture(autouse=True)
def beside_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def job_of(model: dict[str, Any], memory: dict[str, Any], parallel: dict[str, Any]) -> Job:
    return parse_job(
        {
            "model": model,
            "cluster": {"world_size": 8, "compute_device": "cpu", "ddr_cap": "8 MiB"},
            "batch": {"size": 4, "sequence": 32},
            "memory": memory,
            "parallel": parallel,
            "train": {"optimizer": "adamw"},
        }
    )


def own(function: str, parallel: dict[str, Any], plan: Any = None, **arguments: Any) -> Job:
    model = {"python": f"architectures:{function}", "arguments": arguments}
    plan = {"1.*.experts": "expert"} if plan is None else plan
    return job_of(model, {"runtime": "fsdp2"}, {"parallelize_plan": plan, **parallel})


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "parallel",
    [
        {"expert": 2},
        {"expert": 4, "routing": "skewed"},
        {"expert": 8},
        {"expert": 4, "routing": "capacity", "capacity_factor": 1.5},
        {"expert": 2, "data_replicate": 2},
        {"expert": 2, "microbatches": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "memory",
    [
        {"runtime": "fsdp2"},
        {"runtime": "fsdp2", "checkpointing": "full"},
        {"runtime": "shardwright", "checkpointing": "selective"},
        {"runtime": "shardwright", "zero": 2},
        {"runtime": "ddp", "param_dtype": "fp32", "reduce_dtype": "fp32"},
    ],
    ids=str,
)
def test_a_llama_given_as_a_module_takes_what_the_llama_does(
    memory: dict[str, Any], parallel: dict[str, Any]
) -> None:
    built_in = estimated(job_of({"kind": "llama", **LLAMA}, memory, parallel))
    model = {"python": "architectures:a_llama", "arguments": {"model": LLAMA}}
    given = estimated(job_of(model, memory, {**parallel, "parallelize_plan": PLAN}))
    assert given.parameters == built_in.parameters
    assert len(given.ranks) == len(built_in.ranks)
    for one, other in zip(given.ranks, built_in.ranks, strict=True):
        assert (one.name, one.ranks) == (other.name, other.ranks)
        assert one.peak_bytes == other.peak_bytes
        assert one.phases == other.phases


@pytest.mark.slow
def test_stages_before_the_last_take_what_those_of_the_llama_do() -> None:
    """The last one's root is a unit that FSDP2 finishes with the backward."""
    parallel = {"expert": 2, "pipeline": 2, "microbatches": 4}
    shape = {**LLAMA, "tied_embeddings": False}
    model = {"python": "architectures:a_llama", "arguments": {"model": shape}}
    jobs = (
        job_of({"kind": "llama", **shape}, {"runtime": "fsdp2"}, parallel),
        job_of(model, {"runtime": "fsdp2"}, {**parallel, "parallelize_plan": PLAN}),
    )
    found = [{rank.name: rank for rank in estimated(job).ranks} for job in jobs]
    assert found[0]["stage 0"].phases == found[1]["stage 0"].phases


def shares(found: Footprint) -> tuple[int, int]:
    return found.worst.by_category["optimizer_state"], found.parameters


def test_places_of_experts_go_out_and_come_back() -> None:
    whole, apart = (estimated(own("placed", {"expert": degree})) for degree in (1, 4))
    assert shares(apart) == pytest.approx(shares(whole), rel=0.01)
    gathered = [rank.by_category["gathered_weight"] for rank in (whole.worst, apart.worst)]
    assert gathered[1] < gathered[0]
    # two exchanges a layer, and what is laid side by side for experts and back
    bytes_of_places = 8 * (4 * 32 // 4) * 32 * 2
    more = apart.worst.by_category["activation"] - whole.worst.by_category["activation"]
    assert 0 <= more <= 6 * 4 * bytes_of_places


def test_results_of_places_are_those_of_the_whole_where_ranks_are_alike() -> None:
    """Each of two ranks would send the same: what comes back has the shape of what was sent."""
    model = architectures.Placed(8, 4)
    (path,) = cut_experts(model, {"experts": "expert"}, Routing(2), "plan")
    assert path == "experts"
    assert [tuple(p.shape) for p in model.experts.parameters()] == [(2, 8, 16), (2, 16, 8)]
    assert type(model.experts).__name__ == "Stacked"
    assert isinstance(model.experts, architectures.Stacked)
    x = torch.zeros(2, 16, 8)
    assert model(x).shape == x.shape


@pytest.mark.parametrize(
    ("job", "kind", "said"),
    [
        (
            lambda: own("placed", {"expert": 2}, plan={"1.*.router": "expert"}),
            InputError,
            "'1.0.router': expected a module whose parameters are all \\[experts, ...\\], got a L",
        ),
        (
            lambda: own("listed", {"expert": 2}, plan={"*.experts": "expert"}),
            InputError,
            "got a ModuleList of 4. Stack their weights, or leave parallel.expert out",
        ),
        (
            lambda: own("placed", {"expert": 2}, plan={"1.*.other": "expert"}),
            InputError,
            "expected names of layers, got '1..*.other', which is none",
        ),
        (
            lambda: own("placed", {"expert": 8}, experts=4),
            InputError,
            "expected a degree that divides its 4 experts, got parallel.expert 8",
        ),
        (
            lambda: own("placed", {"expert": 2}, plan={"1.*.router": "colwise"}),
            InputError,
            "which modules parallel.expert cuts, got none. Such as",
        ),
        (
            lambda: own("placed", {"expert": 2}, plan={"1.*.router": "colwise"}),
            InputError,
            '{ "layers.*.moe.experts" = "expert" }',
        ),
        (
            lambda: own(
                "placed",
                {"expert": 2, "tensor": 2},
                plan={"1.*.router": "colwise_rep", "1.*.experts": "expert"},
            ),
            InputError,
            "parallel.expert: expected 1 beside parallel.tensor of a module of your own, got 2",
        ),
        (lambda: own("placed", {"context": 2}), InputError, "Only a llama is divided by it. Give"),
    ],
)
def test_what_is_no_stack_of_experts_is_refused_in_a_line(
    job: Any, kind: type[ShardwrightError], said: str
) -> None:
    with pytest.raises(kind, match=said) as refused:
        estimated(job())
    assert "\n" not in str(refused.value)


def test_experts_that_are_given_something_else_are_refused_in_a_line() -> None:
    experts = architectures.Stacked(8, 4)
    model = torch.nn.Sequential(torch.nn.Identity(), experts)
    cut_experts(model, {"1": "expert"}, Routing(2), "plan")
    with pytest.raises(InputError, match=r"experts that are given and give rows .*got float32 .8."):
        model(torch.zeros(8))


def test_compiled_experts_on_ranks_of_their_own_are_refused() -> None:
    job = own("placed", {"expert": 2})
    with pytest.raises(
        UnsupportedError, match=r"memory.compile: expected false for a model with ex"
    ):
        estimated(
            job_of(
                {"python": "architectures:placed"},
                {"runtime": "fsdp2", "compile": True},
                {"expert": 2, "parallelize_plan": {"1.*.experts": "expert"}},
            )
        )
    assert estimated(job).verdict in ("fits", "does not fit")


@pytest.mark.slow
def test_fit_proposes_expert_ranks_where_the_job_says_how() -> None:
    job = job_of(
        {"python": "architectures:placed", "arguments": {"depth": 8, "experts": 64}},
        {"runtime": "ddp"},
        {"parallelize_plan": {"1.*.experts": "expert"}},
    )
    named = {line for remedy in fit(job).remedies for line in remedy.changes}
    assert any(text.startswith("parallel.expert = ") for text in named), named
