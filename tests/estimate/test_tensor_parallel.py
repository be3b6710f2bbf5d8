"""Modules of a user's own on tensor ranks allocate what torch's ``parallelize_module`` makes of
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import torch.distributed as dist
from live_bytes import Live
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.errors import InputError
from shardwright.estimate.fit import fit
from shardwright.estimate.footprint import footprint
from shardwright.estimate.parallelize import cut
from shardwright.job.job import Job, parse_job
from shardwright.job.parallel import Style

TENSOR, BATCH, LENGTH, WIDTH = 4, 2, 16, 96
IDS = BATCH * LENGTH * 8  # DTensor keeps a masked copy of the tokens, of int64
PLAN: dict[str, Style] = {
    "words": "rowwise",
    "layers.*.queries": "colwise",
    "layers.*.keys": "colwise",
    "layers.*.values": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.gate": "colwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "output": "colwise_rep",
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TENSOR)
    yield init_device_mesh("cpu", (TENSOR,))
    dist.destroy_process_group()


def _by_torch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    styles: dict[Style, Any] = {
        "colwise": ColwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
    }
    plan = {name: styles[style] for name, style in PLAN.items()}
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    return parallelize_module(model, mesh, {**plan, "words": rows})


def _measured(model: nn.Module) -> tuple[int, int, int]:
    """Bytes after the forward, at its peak, and at that of the backward, with gradients made anew;
    the first step fills DTensor's caches."""
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for _ in range(2):
        model.zero_grad()
        with Live() as live:
            logits = model(tokens)
            kept, forward = live.now, live.peak
            value = logits.mean()
            del logits
            live.peak = live.now
            value.backward()
    return kept, forward, live.peak


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bias", [False, True])
def test_a_tensor_rank_allocates_what_torch_s_does(mesh: DeviceMesh, bias: bool) -> None:
    own, torchs = (architectures.Attended(2, 32, 4, bias, tied=False) for _ in range(2))
    cut(own, PLAN, TENSOR, "plan")
    kept, forward, peak = _measured(own)
    assert (kept + IDS, forward + IDS, peak + IDS) == _measured(_by_torch(torchs, mesh))
    shapes = {name: p.shape for name, p in own.named_parameters()}
    for name, parameter in torchs.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        assert local.shape == shapes[name], name


def job_of(tensor: int, plan: object = None, cap: str = "1 MiB", **model: object) -> Job:
    return parse_job(
        {
            "model": {"python": "architectures:attended", "arguments": model},
            "cluster": {"world_size": 8, "compute_device": "cpu", "ddr_cap": cap},
            "batch": {"size": BATCH, "sequence": LENGTH},
            "memory": {"runtime": "fsdp2"},
            "parallel": {"tensor": tensor, "parallelize_plan": PLAN if plan is None else plan},
        }
    )


@pytest.fixture
def beside_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


@pytest.mark.slow
@pytest.mark.usefixtures("beside_the_models")
def test_layers_are_shared_and_what_their_forwards_keep_with_them() -> None:
    whole, cut_up = (footprint(job_of(degree), details=True).worst for degree in (1, 4))
    states = [rank.by_category["optimizer_state"] for rank in (whole, cut_up)]
    assert states[1] == pytest.approx(states[0], rel=0.1)  # of 8 ranks all together
    kept = [rank.by_category["activation"] for rank in (whole, cut_up)]
    assert kept[1] < 0.6 * kept[0]
    assert footprint(job_of(4)).parameters == footprint(job_of(1)).parameters


@pytest.mark.slow
@pytest.mark.usefixtures("beside_the_models")
def test_fit_tries_tensor_degrees_of_a_module_that_says_how() -> None:
    tried = [line for remedy in fit(job_of(1, cap="180 KiB")).remedies for line in remedy.changes]
    assert any(line.startswith("parallel.tensor = ") for line in tried)


@pytest.mark.usefixtures("beside_the_models")
@pytest.mark.parametrize(
    ("plan", "model", "said"),
    [
        ({"layers.*.nope": "colwise"}, {}, "names of layers, got 'layers.*.nope', which is none"),
        ({"layers.*": "colwise"}, {}, "'layers.0': expected a Linear or an Embedding, got Attend"),
        ({"output": "colwise_rep"}, {"tied": True}, "like the one it shares its weight with"),
        ({"words": "colwise", "output": "colwise"}, {"tied": True}, "cut along dim 1"),
        ({}, {}, "parallel.parallelize_plan: expected which layers parallel.tensor cuts"),
    ],
)
def test_a_plan_that_does_not_fit_the_module_names_the_layer(
    plan: dict[str, Style], model: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said.replace("*", r"\*").replace("[", r"\[")):
        footprint(job_of(4, plan, **model))


def test_a_width_that_the_ranks_do_not_divide_is_named() -> None:
    job = job_of(1)
    with pytest.raises(
        InputError, match=r"a weight \[96, 32\] whose dim 0 parallel.tensor divides"
    ):
        cut(architectures.Attended(1, 32, 4, bias=True, tied=False), PLAN, 7, "plan")
    assert job.parallel is not None


def test_a_tied_head_is_cut_with_its_embedding() -> None:
    model = architectures.Attended(1, 32, 4, bias=False, tied=True)
    cut(model, PLAN, TENSOR, "plan")
    assert model.output.weight is model.words.weight
    assert model.output.weight.shape == (WIDTH // TENSOR, 32)
