"""Random modules under random habits, sharded at random, beside the same held whole, in fp64.

Every choice comes from the seed alone, so that each way to hold the model makes the same ones.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from worlds import Found, World, apart, weights, whole

import shardwright as sw
from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Replicate, Shard
from shardwright.runtime.comm import Comm

STEPS = 3
Blocks = Callable[[int], nn.Module]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return found


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cell(x.unsqueeze(1))[0].squeeze(1)
        return found


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, bias=False, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.stack([x, x.sin()], 1)
        found: torch.Tensor = x + self.attention(y, y, y)[0].sum(1)
        return found


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(torch.tanh(self.one(x)))
        return found


class Odd(nn.Module):
    """A scalar, an empty parameter, one that nobody uses, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.unused = nn.Parameter(torch.randn(width))
        self.table = nn.Parameter(torch.randn(3, width))
        self.register_buffer("shift", torch.linspace(0, 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x * self.scale + self.table[torch.arange(len(x)) % 3] + self.shift
        return found


class Convolving(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.inner(x.unsqueeze(1)).mean(1)
        return found


BLOCKS: list[Blocks] = [
    *(Residual, Recurrent, Attending, Tied, Odd, Convolving),
    lambda width: nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)),
]


class Model(nn.Module):
    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        width = choose.randint(2, 9)
        self.width = width
        self.blocks = nn.ModuleList(
            choose.choice(BLOCKS)(width) for _ in range(choose.randint(1, 5))
        )
        self.head = nn.Linear(width, choose.randint(1, 7))
        self.recomputed: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            recomputed = index in self.recomputed
            x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        found: torch.Tensor = self.head(x)
        return found


def _model(seed: int, choose: random.Random, given: str) -> Model:
    torch.manual_seed(seed)
    model = Model(choose).double()
    kind = choose.choice(["none", "none", "wrapped", "called"])
    for index in range(len(model.blocks)):
        if choose.random() < 0.5 and kind == "wrapped":
            model.blocks[index] = checkpoint_wrapper(model.blocks[index])
        elif choose.random() < 0.5 and kind == "called":
            model.recomputed.add(index)
    for name, parameter in model.named_parameters():
        moved_anyway = "flat" in given and name.endswith("unused")
        if choose.random() < 0.1 or moved_anyway:
            parameter.requires_grad_(False)
    return model


def _shard(world: World, model: Model, choose: random.Random) -> None:
    strategy = choose.choice(["flat", "per_param", "param_boundary"])
    options: dict[str, Any] = {
        "shard_strategy": strategy,
        "reshard_after_forward": choose.choice([None, True, False, 1]),
        "prefetch": choose.choice([None, 0, 1, 2]),
    }
    placed: dict[str, Placement | None] = {}
    for name, parameter in model.named_parameters():
        every = [
            *(Shard(0), Shard(max(parameter.dim() - 1, 0)), Owned(choose.randrange(world.size))),
            *(Replicate(), BlockShard(choose.randint(1, 4)), Flat(), None),
        ]
        placed[f"{name.split('.')[-1]} {parameter.dim()}"] = choose.choice(every)
    if choose.random() < 0.4:
        options["shard_placement_fn"] = lambda fqn, p: placed.get(f"{fqn.split('.')[-1]} {p.dim()}")
    units = [block for block in model.blocks if choose.random() < 0.7]
    if world.ours:
        for module in (*units, model):
            sw.fully_shard_flat(module, world.mesh, **options)


GIVEN = ("parameters", "groups", "flat", "flat groups", "one flat")


def _optimizer(world: World, model: Model, choose: random.Random, given: str) -> Any:
    """One over what is ``given``."""
    kind = choose.choice(["sgd", "adamw", "fused", "foreach", "adagrad"])
    names = [name for name, _ in model.named_parameters()]
    parameters: Any = list(model.parameters())
    if "groups" in given:
        shapes = {name: p.ndim for name, p in model.named_parameters()}
        parameters = [
            {"params": [n for n in names if shapes[n] > 1], "weight_decay": 0.1},
            {"params": [n for n in names if shapes[n] <= 1], "weight_decay": 0.0, "lr": 0.02},
        ]
        parameters = [group for group in parameters if group["params"]]
    if given == "groups":
        named = dict(model.named_parameters())
        parameters = [{**g, "params": [named[n] for n in g["params"]]} for g in parameters]
    elif given == "flat groups":
        parameters = world.flat(model, parameters)
    elif "flat" in given and world.ours:
        parameters = sw.optimizer_parameters(model, per_unit=given == "flat")
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.05}
    if kind == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **options)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, **options)
    more = {} if kind == "adamw" else {kind: True}
    return torch.optim.AdamW(parameters, **options, **more)


def _clip(world: World, model: Model, how: str) -> list[float]:
    if how == "by value":
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        return []
    if how == "none":
        return []
    if how == "ours" and world.ours:
        return [sw.clip_grad_norm_(model, 0.1).item()]
    order = torch.inf if how == "largest" else 2.0
    return [float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order)))]


def trial(world: World, seed: int) -> Found:
    """Train one random model under random habits."""
    choose = random.Random(seed)
    given = choose.choice(GIVEN)
    flat = "flat" in given
    model = _model(seed, choose, given)
    _shard(world, model, choose)
    optimizer = _optimizer(world, model, choose, given)
    clip = choose.choice(["none", "none", "ours", "torch", "largest", "by value"])
    micro, held = choose.randint(1, 2), choose.random() < 0.5
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=choose.random() < 0.3)
    averaging, swapping = choose.random() < 0.3, choose.random() < 0.5
    freezing = -1 if flat or choose.random() < 0.7 else choose.randrange(len(model.blocks))
    clearing, copying = choose.random() < 0.5, choose.random() < 0.15
    reloading, evaluating = choose.random() < 0.3, choose.random() < 0.3
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    norms: list[float] = []
    for step in range(STEPS):
        for number in range(micro):
            if world.ours and held and micro > 1:
                model.set_requires_gradient_sync(number == micro - 1)  # type: ignore[operator]
            x = world.inputs(10 * step + number, model.width)
            scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        norms += _clip(world, model, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=clearing)
        if averaging:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    average[name].lerp_(parameter.detach(), 0.5)
        if evaluating:
            with torch.no_grad():
                model(world.inputs(99, model.width))
        if freezing >= 0:
            model.blocks[freezing].requires_grad_(step == 1)
        if step == 0 and copying:
            model, optimizer = _copied(model)
            average = {n: average[n] for n, _ in model.named_parameters()}
        if step == 1 and reloading:
            model.load_state_dict({n: whole(v) for n, v in model.state_dict().items()})
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if averaging and swapping and not flat:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(average[name])
    found = {**weights(model), "norms": norms}
    return {**found, **{f"average {n}": whole(v) for n, v in average.items()}}


def _copied(model: Model) -> tuple[Model, Any]:
    """A copy that is trained on with an optimizer of its own."""
    made = copy.deepcopy(model)
    return made, torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)


def differing(mesh: DeviceMesh, seeds: Iterable[int], tolerance: float = 1e-9) -> list[str]:
    """The seeds whose trial differs, or raises, and how."""
    found = []
    for seed in seeds:
        Comm(mesh).forget()
        true = trial(World(mesh, "alone"), seed)
        try:
            mine = trial(World(mesh, "flat"), seed)
        except Exception as error:
            found.append(f"{seed}: {type(error).__name__}: {error}"[:300])
            continue
        off = {n: apart(mine[n], true[n]) for n in true}
        far = {n: value for n, value in off.items() if not value <= tolerance}
        if far or set(mine) != set(true):
            found.append(f"{seed}: {far}"[:300])
    return found
