"""A job as a snippet for FSDP2 divides, shards and steps a llama as the job says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.job.engines.layout import layout_of
from shardwright.job.exported import exported
from shardwright.job.job import Job, parse_job
from shardwright.models.llama import Llama

WORLD, RANK, LENGTH = 8, 5, 16
WIDTHS = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 72, "vocab": 96}
EXPERTS = {"experts": 4, "expert_ffn_dim": 24, "moe_layers": [1]}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


def job(parallel: dict[str, Any], memory: dict[str, Any], widths: dict[str, Any]) -> Job:
    memory = {"runtime": "fsdp2", "implementation": "foreach", "param_dtype": "bf16"} | memory
    return parse_job(
        {
            "model": {"kind": "llama"} | WIDTHS | widths,
            "cluster": {"world_size": WORLD},
            "batch": {"size": 2, "sequence": LENGTH},
            "parallel": {"microbatches": 2} | parallel,
            "memory": memory,
        }
    )


def plain(model: nn.Module) -> dict[str, DTensor]:
    """Its parameters by the names that they have without checkpoint wrappers."""
    found: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        found[name.replace("_checkpoint_wrapped_module.", "")] = parameter
    return found


def units_of(model: nn.Module) -> list[tuple[nn.Module, ...]]:
    """Modules that FSDP2 gathers together."""
    states = {id(state): state for state in map(_get_module_fsdp_state, model.modules()) if state}
    return [state._modules for state in states.values()]


def share(rows: int, ranks: int, place: int) -> int:
    """Rows of one of the ranks that share so many, as torch.chunk deals them out."""
    each = -(-rows // ranks)
    return max(0, min(rows, each * (place + 1)) - each * place)


# Of logits that are no DTensor any more; the loss of a snippet changes nothing in place.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("parallel", "memory", "widths"),
    [
        ({}, {}, {}),
        ({"data_replicate": 2}, {"checkpointing": "full"}, {"tied_embeddings": True}),
        ({}, {"checkpointing": "selective", "reshard_after_forward": False}, EXPERTS),
        ({"tensor": 2}, {"checkpointing": "layers:2", "loss": "parallel"}, {}),
        ({}, {"checkpointing": "first:2"}, {}),
        ({"tensor": 2, "data_replicate": 2}, {"checkpointing": "save:aten.mm"}, {}),
        ({"tensor": 2, "sequence": False}, {"checkpointing": "selective"}, {}),
    ],
)
def test_a_snippet_places_parameters_as_its_job_says(
    parallel: dict[str, Any], memory: dict[str, Any], widths: dict[str, Any]
) -> None:
    asked = job(parallel, memory, widths)
    layout = layout_of(asked)
    degrees, shape = layout.degrees, layout.shape
    assert isinstance(shape, LlamaShape)
    snippet: dict[str, Any] = {}
    exec(exported(asked, "fsdp2"), snippet)
    mesh = snippet["mesh_of"]("cpu")
    assert mesh.size() == degrees.world_size == WORLD
    model = snippet["parallelize"](Llama(shape, sequence=LENGTH), mesh)

    # Tensor ranks are neighbours, then the ranks that share a copy.
    place = RANK // degrees.tensor % degrees.shards
    local = LocalShape(tensor=degrees.tensor, sequence_parallel=degrees.sequence)
    here = Llama(shape, local, sequence=LENGTH, device="meta")
    wanted = {
        name: (share(len(part), degrees.shards, place), *part.shape[1:])
        for name, part in here.named_parameters()
    }
    found = plain(model)
    assert {name: tuple(part.to_local().shape) for name, part in found.items()} == wanted
    clean = {part: name for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    groups = {
        tuple(name.replace("._checkpoint_wrapped_module", "") for name in each)
        for each in ([clean[part] for part in unit] for unit in units_of(model))
    }
    ends = set() if shape.tied_embeddings else {("tok_embeddings",), ("norm", "output")}
    blocks = {(f"layers.{layer}",) for layer in range(shape.layers)}
    assert groups == blocks | ends | {("",)}

    optimizer = snippet["optimizer_of"](model)
    tokens = torch.zeros(layout.samples, LENGTH, dtype=torch.int64)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append({name for name, part in found.items() if part.grad is not None})
    )
    snippet["step"](model, optimizer, [(tokens, tokens)] * degrees.microbatches)
    assert seen == [set(wanted)]
