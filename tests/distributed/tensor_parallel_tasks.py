"""Units of modules that torch's tensor parallelism has cut, on a grid of two by two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwright.core.errors import UnsupportedError
from shardwright.core.placement import Owned, Replicate
from shardwright.runtime.clip import clip_grad_norm_
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.muon import Muon
from shardwright.runtime.optimizer import optimizer_parameters
from shardwright.runtime.saving import load_checkpoint, save_checkpoint
from shardwright.runtime.state import full_state_dict

STRATEGIES = ("flat", "per_param", "owned")
DIM, HEADS, LENGTH = 8, 4, 8
HABITS = ("frozen", "recomputed", "kept", "evaluated between", "accumulated")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, DIM // HEADS).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.wo(seen.transpose(1, 2).reshape(batch, length, -1))
        return found


class Block(nn.Module):
    """A llama's layer; the second matrix of its MLP has a bias. ``width`` is that of the MLP."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(DIM, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self, blocks: int = 2, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, DIM)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(DIM, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


def net(width: int = 12) -> Net:
    torch.manual_seed(11)
    return Net(width=width)


def parallelize(model: Net, mesh: DeviceMesh, *, sequence: bool) -> None:
    """As TorchTitan does it: columns, then rows, and norms of a part of the sequence each."""
    column, row = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {
        "attention.wq": column,
        "attention.wk": column,
        "attention.wv": column,
        "attention.wo": row,
        "gate": column,
        "up": column,
        "down": row,
    }
    if sequence:
        whole = {
            "input_layouts": (TorchShard(1),),
            "desired_input_layouts": (TorchReplicate(),),
        }
        plan |= {
            "first": SequenceParallel(),
            "second": SequenceParallel(),
            "attention": PrepareModuleInput(**whole),
            "attention.wo": RowwiseParallel(output_layouts=TorchShard(1)),
            "gate": ColwiseParallel(input_layouts=TorchShard(1)),
            "up": ColwiseParallel(input_layouts=TorchShard(1)),
            "down": RowwiseParallel(output_layouts=TorchShard(1)),
        }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)  # type: ignore[arg-type]
    if sequence:
        parallelize_module(
            model,
            mesh,
            {
                "embed": RowwiseParallel(
                    input_layouts=TorchReplicate(), output_layouts=TorchShard(1)
                ),
                "head": ColwiseParallel(
                    input_layouts=TorchShard(1), output_layouts=TorchReplicate()
                ),
            },
        )


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(16, (3, LENGTH), generator=generator)


def loss_of(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(given), given)


def next_token_loss(logits: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())


_GRIDS: dict[tuple[int, ...], DeviceMesh] = {}


def grid(*sizes: int) -> DeviceMesh:
    """(shard, tensor), or (replicate, shard, tensor); made once."""
    if sizes not in _GRIDS:
        names = ("replicate", "shard", "tensor")[-len(sizes) :]
        _GRIDS[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _GRIDS[sizes]


def sharded(mesh: DeviceMesh, strategy: str, *, sequence: bool) -> Net:
    model = net()
    parallelize(model, mesh["tensor"], sequence=sequence)
    own = mesh["replicate", "shard"] if mesh.ndim == 3 else mesh["shard"]
    options: dict[str, Any] = {"shard_strategy": strategy}
    if strategy == "owned":
        options = {"shard_placement_fn": lambda fqn, p: Owned(len(fqn) % own.size(own.ndim - 1))}
    for layer in model.layers:
        fully_shard_flat(layer, own, **options)
    fully_shard_flat(model, own, **options)
    return model


def trained(
    mesh: DeviceMesh, strategy: str, sequence: bool, optimizer: str, sizes: tuple[int, ...]
) -> tuple[float, float, float]:
    """The largest difference of a loss, a norm and a weight from one process, over three steps."""
    whole = grid(*sizes)
    parts = whole.size() // whole.size(whole.ndim - 1)
    own = whole.get_rank() // whole.size(whole.ndim - 1)
    model, reference = sharded(whole, strategy, sequence=sequence), net()
    make: Any = {
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        "muon": lambda m: Muon([p for p in m.parameters() if p.ndim == 2], lr=0.05),
    }[optimizer]
    one, other = make(model), make(reference)
    losses, norms = 0.0, 0.0
    for step in range(3):
        one.zero_grad()
        other.zero_grad()
        loss = loss_of(model, tokens(own, step))
        loss.backward()
        true = torch.zeros(())
        for part in range(parts):
            found = loss_of(reference, tokens(part, step))
            (found / parts).backward()
            true = found.detach() if part == own else true
        losses = max(losses, abs(loss.item() - true.item()))
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item()
        ours = (
            clip_grad_norm_(model, 0.5)
            if step % 2
            else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        )
        norms = max(norms, abs(float(ours) - norm))
        one.step()
        other.step()
    found = full_state_dict(model)
    weights = reference.state_dict()
    assert set(found) == set(weights)
    return losses, norms, max((found[n] - weights[n]).abs().max().item() for n in weights)


def habitual(mesh: DeviceMesh, habit: str, strategy: str) -> float:
    """The largest difference of a weight from one process after three steps with a habit of users;
    a rank of two has 7 columns of an MLP, so shards of a part are uneven."""
    whole = grid(2, 2)
    own = whole["shard"].get_local_rank()
    model, reference = net(14), net(14)
    parallelize(model, whole["tensor"], sequence=True)
    for block in [*model.layers, *reference.layers] if habit == "frozen" else []:
        # After parallelize_module: SequenceParallel of torch 2.13 makes a norm trainable again.
        block.first.weight.requires_grad_(False)  # type: ignore[union-attr]
        block.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    options: dict[str, Any] = {
        "shard_strategy": strategy,
        "reshard_after_forward": habit != "kept",
    }
    for i, layer in enumerate(model.layers):
        if habit == "recomputed":
            model.layers[i] = layer = checkpoint_wrapper(layer)
        fully_shard_flat(layer, whole["shard"], **options)
    storage = fully_shard_flat(model, whole["shard"], **options)
    one, other = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for m in (model, reference)
    )
    for step in range(3):
        one.zero_grad()
        other.zero_grad()
        batches = [step]
        if habit == "accumulated":
            batches.append(step + 20)
            with storage.no_sync():
                loss_of(model, tokens(own, step + 20)).backward()
        if habit == "evaluated between":
            with torch.inference_mode():
                loss_of(model, tokens(own, step + 50))
        loss_of(model, tokens(own, step)).backward()
        for batch in batches:
            for part in range(2):
                (loss_of(reference, tokens(part, batch)) / 2).backward()
        one.step()
        other.step()
    weights = reference.state_dict()
    found = {
        n.replace("_checkpoint_wrapped_module.", ""): t for n, t in full_state_dict(model).items()
    }
    return max((found[n] - weights[n]).abs().max().item() for n in weights)


def beside_fsdp2(
    mesh: DeviceMesh, how: str, strategy: str
) -> tuple[list[float], list[float], float]:
    """Our losses, FSDP2's, and the largest difference of a weight after three steps on the same
    tensor-parallel model: computed in bfloat16, or with compiled layers."""
    whole = grid(2, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses: list[list[float]] = []
    weights = []
    for ours in (True, False):
        model = net()
        parallelize(model, whole["tensor"], sequence=True)
        for layer in model.layers if how == "compiled" else ():
            layer.compile(backend="aot_eager")
        for unit in (*model.layers, model):
            if ours:
                precision = policy if how == "bfloat16" else None
                fully_shard_flat(unit, whole["shard"], shard_strategy=strategy, precision=precision)
            else:
                precision = policy if how == "bfloat16" else MixedPrecisionPolicy()
                fully_shard(unit, mesh=whole["shard"], mp_policy=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses.append([])
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, tokens(whole["shard"].get_local_rank(), step))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        found = full_state_dict(model) if ours else model.state_dict()
        weights.append(
            {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}
        )
    worst = max((weights[0][n] - weights[1][n]).abs().max().item() for n in weights[1])
    return losses[0], losses[1], worst


def from_meta(mesh: DeviceMesh, strategy: str) -> list[str]:
    """Tensors of a model from the meta device that have other values than those of one process."""
    whole = grid(2, 2)
    with torch.device("meta"):
        model = Net()
    parallelize(model, whole["tensor"], sequence=True)
    for unit in (*model.layers, model):
        fully_shard_flat(unit, whole["shard"], shard_strategy=strategy)
    model.to_empty(device="cpu")
    reference = Net()
    for each in (model, reference):
        torch.manual_seed(7)
        for module in each.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    found = full_state_dict(model)
    return [name for name, t in reference.state_dict().items() if not torch.equal(found[name], t)]


class Stage(nn.Module):
    """The first block with the embedding, or the second with the head."""

    def __init__(self, model: Net, *, first: bool) -> None:
        super().__init__()
        self.embed = model.embed if first else None
        self.layers = model.layers[:1] if first else model.layers[1:]
        self.head = None if first else model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def piped(mesh: DeviceMesh, sizes: tuple[int, int, int], strategy: str) -> tuple[float, float]:
    """The largest difference of a loss and a weight from one process where torch pipelines two
    stages, each on a grid of shards x tensor-parallel ranks."""
    whole = grid(*sizes)  # the first dimension is that of stages
    pipe, own = whole["replicate"].get_local_rank(), whole["shard"].get_local_rank()
    model, reference = net(), net()
    if sizes[2] > 1:
        parallelize(model, whole["tensor"], sequence=False)
    part, other = Stage(model, first=pipe == 0), Stage(reference, first=pipe == 0)
    for unit in (*part.layers, part):
        fully_shard_flat(unit, whole["shard"], shard_strategy=strategy)
    group = whole["replicate"].get_group()

    stage = PipelineStage(part, pipe, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 3, loss_fn=next_token_loss)
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (part, reference))
    losses = 0.0
    for step in range(3):
        one.zero_grad()
        two.zero_grad()
        found: list[torch.Tensor] = []
        given = tokens(own, step)
        if pipe == 0:
            schedule.step(given)
        else:
            schedule.step(target=given, losses=found)
        for shard in range(sizes[1]):
            true = loss_of(reference, tokens(shard, step))
            (true / sizes[1]).backward()
            if found and shard == own:
                mean = torch.stack(found).mean()
                losses = max(losses, abs(mean.item() - true.item()))
        one.step()
        two.step()
    weights = full_state_dict(part)
    assert set(weights) == set(other.state_dict())
    return losses, max((weights[n] - t).abs().max().item() for n, t in other.state_dict().items())


def saved(mesh: DeviceMesh, strategy: str, folder: str) -> tuple[bool, bool, bool]:
    """Whether a checkpoint and a state_dict give a parallel model its values and states again, and
    whether a model without any parallelism reads the same."""
    whole = grid(2, 2)
    models = []
    for start in (0, 1):
        model = sharded(whole, strategy, sequence=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if start:
            load_checkpoint(Path(folder), model, optimizer)
        for step in range(start * 2, 4):
            optimizer.zero_grad()
            loss_of(model, tokens(whole["shard"].get_local_rank(), step)).backward()
            optimizer.step()
            if step == 1:
                save_checkpoint(Path(folder), model, optimizer, step=2)
        models.append(full_state_dict(model))
    one, other = models
    again = all(torch.equal(one[name], other[name]) for name in one)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    third = sharded(whole, strategy, sequence=True)
    third.load_state_dict(state)
    full = full_state_dict(third)
    plain, early = net(), sharded(whole, strategy, sequence=True)
    load_checkpoint(Path(folder), plain, mesh=mesh)  # of no parallelism at all
    load_checkpoint(Path(folder), early)
    read = full_state_dict(early)
    return (
        again,
        all(torch.equal(full[name], one[name]) for name in one),
        all(torch.equal(read[name], value) for name, value in plain.state_dict().items()),
    )


def refused(mesh: DeviceMesh) -> list[str]:
    """What is said of an uneven part, of replicas of a part, of flat tensors over parts, and of a
    frozen part that would stay whole."""
    two = grid(2, 2)
    said = []
    cases: list[tuple[int, dict[str, Any], bool]] = [
        (5, {}, False),
        (4, {"placements": (Replicate(),)}, False),
        (4, {}, True),
        (4, {"zero": 1}, False),
    ]
    for rows, options, flat in cases:
        layer = nn.Linear(3, rows, bias=False).requires_grad_("zero" not in options)
        parallelize_module(layer, two["tensor"], ColwiseParallel())
        try:
            fully_shard_flat(layer, two["shard"], **options)
            if flat:
                optimizer_parameters(layer)
        except UnsupportedError as error:
            said.append(str(error))
    return said
