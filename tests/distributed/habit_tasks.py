"""What people do to a sharded model without thinking, done to ours, to FSDP2's and to a whole one.

A habit is a function of a :class:`World`: it makes a model, has the world shard it, does what users
do and returns what must be equal. The same lines run for every way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import outside_tasks
import torch
import torch.distributed as dist
from outside_tasks import habits_of
from probe_tasks import said
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from worlds import Found, World, apart, grads, net, step, step_in_backward, train, weights, whole

import shardwright as sw
from shardwright.runtime.comm import Comm

FULL = StateDictOptions(full_state_dict=True)

# ---- what a test is called is the name of its habit ----------------------------------------------


def recomputation_wrappers_first(world: World) -> Found:
    model = net()
    for index in (0, 2):
        model[index] = checkpoint_wrapper(model[index])
    world.shard(model)
    train(world, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    own = {name: whole(value) for name, value in model.state_dict().items()}
    full = get_model_state_dict(model, options=FULL)
    other = world.shard(net(1))
    set_model_state_dict(other, dict(full), options=FULL)
    return {**own, **{f"full {n}": v for n, v in full.items()}, **weights(other, "loaded ")}


def only_named_parameters_train(world: World) -> Found:
    model = world.shard(net())
    groups = [{"params": ["2.weight", "2.bias"], "lr": 0.1}]
    train(world, model, torch.optim.AdamW(world.flat(model, groups), weight_decay=0.1))
    return weights(model)


def two_optimizers_over_flat_tensors(world: World) -> Found:
    model = world.shard(net())
    one = torch.optim.SGD(world.flat(model, [{"params": ["0.weight", "0.bias"]}]), lr=0.1)
    two = torch.optim.AdamW(world.flat(model, [{"params": ["2.weight", "2.bias"]}]), lr=0.1)
    for number in range(3):
        step(world, model, number)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def freezing_after_sharding(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.AdamW(world.flat(model), lr=0.1, weight_decay=0.1)
    train(world, model, optimizer, 1)
    model[0].requires_grad_(False)
    train(world, model, optimizer, 2, 1)
    model[0].requires_grad_(True)
    train(world, model, optimizer, 2, 3)
    return weights(model)


def freezing_before_the_optimizer(world: World) -> Found:
    model = world.shard(net())
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(world.flat(model), lr=0.1, weight_decay=0.5)
    train(world, model, optimizer, 3)
    return weights(model)


def _scaled(world: World, parameters: Callable[[nn.Module], Any]) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(parameters(model), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number in range(4):
        optimizer.zero_grad()
        loss = model(world.inputs(number)).square().mean()
        scaler.scale(loss).backward()
        if number == 1 and (world.way == "alone" or not world.rank):
            every = [p.grad for p in model.parameters()]
            parts = [g.to_local() if isinstance(g, DTensor) else g for g in every]
            next(part for part in parts if part.numel()).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    return {**weights(model), "scale": scaler.get_scale()}


def grad_scaler_with_one_bad_rank(world: World) -> Found:
    return _scaled(world, lambda model: model.parameters())


def grad_scaler_over_flat_tensors(world: World) -> Found:
    return _scaled(world, world.flat)


def _clipped(world: World, flat: bool, order: float) -> Found:
    model = world.shard(net())
    given = world.flat(model) if flat else list(model.parameters())
    optimizer = torch.optim.SGD(given, lr=0.1)
    found: Found = {}
    for number in range(2):
        optimizer.zero_grad()
        step(world, model, number)
        over = given if flat and number else list(model.parameters())
        norm = nn.utils.clip_grad_norm_(over, 0.01, norm_type=order)
        found[f"norm {number}"] = whole(norm)
        optimizer.step()
    return {**found, **weights(model)}


def torchs_clipping(world: World) -> Found:
    return _clipped(world, False, 2.0)


def torchs_clipping_over_flat_tensors(world: World) -> Found:
    return _clipped(world, True, 2.0)


def torchs_clipping_by_the_largest(world: World) -> Found:
    return _clipped(world, False, torch.inf)


def clipping_by_value(world: World) -> Found:
    model = world.shard(net())
    step(world, model)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return grads(model)


def large_gradients_in_half(world: World) -> Found:
    model = world.shard(nn.Sequential(nn.Linear(8, 4)), half=True)
    x = torch.ones_like(world.inputs()).float()
    large = 40000.0 if world.size < 4 else 30000.0  # half of what 4 ranks sum goes before the sum
    (model(x).sum(1).mean() * large).backward()
    return {name: gradient.round() for name, gradient in grads(model).items()}


def optimizer_state_by_torchs_calls(world: World) -> Found:
    return _restored(world, lambda model: model.parameters(), full=False)


def full_optimizer_state_by_torchs_calls(world: World) -> Found:
    return _restored(world, lambda model: model.parameters(), full=True)


def _restored(world: World, parameters: Callable[[nn.Module], Any], full: bool) -> Found:
    options = FULL if full else StateDictOptions()
    model = world.shard(net())
    optimizer = torch.optim.AdamW(parameters(model), lr=0.1)
    train(world, model, optimizer, 2)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    found = {
        f"{name} {key}": whole(torch.as_tensor(value))
        for name, entry in saved["state"].items()
        for key, value in entry.items()
    }
    other = world.shard(net(1))
    again = torch.optim.AdamW(parameters(other), lr=0.1)
    set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
    set_optimizer_state_dict(other, again, saved, options=options)
    train(world, other, again, 2, 2)
    return {**found, **weights(other)}


def optimizer_in_backward(world: World) -> Found:
    model = world.shard(net())
    step_in_backward(model, lambda p: torch.optim.AdamW([p], lr=0.1))
    for number in range(3):
        step(world, model, number)
    return {**weights(model), **grads(model)}


def decay_groups_by_dimension(world: World) -> Found:
    model = world.shard(net())
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    train(world, model, torch.optim.AdamW(groups, lr=0.1))
    return {**weights(model), "matrices": len(matrices)}


def sizes_and_counts(world: World) -> Found:
    model = world.shard(net())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {**shapes, "elements": sum(p.numel() for p in model.parameters())}


def lbfgs(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(world.inputs()).square().mean()
        loss.backward()
        if world.way != "alone":
            torch.distributed.all_reduce(total := loss.detach(), group=world.mesh.get_group())
            return total / world.size
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return weights(model)


def muon(world: World) -> Found:
    model = world.shard(net())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    train(world, model, torch.optim.Muon(matrices, lr=0.1))
    return weights(model)


def adafactor(world: World) -> Found:
    model = world.shard(net())
    train(world, model, torch.optim.Adafactor(model.parameters(), lr=0.1))
    return weights(model)


def weights_swapped_for_their_average(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {p: p.detach().clone() for p in model.parameters()}
    found: Found = {}
    for number in range(3):
        optimizer.zero_grad()
        step(world, model, number)
        optimizer.step()
        with torch.no_grad():
            for parameter, mean in average.items():
                mean.lerp_(parameter.detach(), 0.5)
        keep = {p: p.data for p in average}
        for parameter, mean in average.items():
            parameter.data = mean
        with torch.no_grad():
            found[f"evaluated {number}"] = _mean(world, model(world.inputs(9)).square().mean())
        for parameter, data in keep.items():
            parameter.data = data
    found.update({f"average {i}": whole(mean) for i, mean in enumerate(average.values())})
    return {**found, **weights(model)}


def _mean(world: World, value: torch.Tensor) -> torch.Tensor:
    if world.way != "alone":
        torch.distributed.all_reduce(value, group=world.mesh.get_group())
        value = value / world.size
    return value


def averaged_model(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for number in range(3):
        train(world, model, optimizer, 1, number)
        average.update_parameters(model)
    with torch.no_grad():
        out = _mean(world, average(world.inputs(9)).square().mean())
    return {**weights(model), **weights(average.module, "average "), "out": out}


def settings_before_the_root(world: World) -> Found:
    torch.manual_seed(0)
    model = _Own()
    world.unit(model.inner)
    if world.ours:
        sw.get_dstorage(model.inner).set_gradient_divide_factor(1.0)  # type: ignore[union-attr]
    world.unit(model)
    if world.way == "fsdp2":
        for unit in (model, model.inner):
            unit.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    step(world, model)
    scale = world.size if world.way == "alone" else 1
    return {n: None if v is None else v * scale for n, v in grads(model).items()}


class _Own(nn.Module):
    """A root with parameters of its own and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.float64)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x).tanh() * self.scale
        return found


def buffers_in_the_whole_state(world: World) -> Found:
    torch.manual_seed(0)
    model = world.shard(_Own())
    if world.ours:
        return dict(sw.full_state_dict(model))
    return {name: whole(value) for name, value in model.state_dict().items()}


def a_parameter_is_replaced(world: World) -> Found:
    model = world.shard(net())
    model[2].weight = nn.Parameter(torch.ones(4, 8, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(world, model, optimizer)
    return weights(model)


def a_module_is_replaced(world: World) -> Found:
    model = world.shard(net())
    torch.manual_seed(3)
    model[2] = nn.Linear(8, 4).double().requires_grad_(False)
    train(world, model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    return {name: whole(value) for name, value in model.state_dict().items()}


def a_module_that_trains_is_added(world: World) -> Found:
    model = world.shard(net())
    model[2] = nn.Sequential(model[2], nn.Linear(4, 4).double())
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


def gradients_of_inputs_only(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x = world.inputs().requires_grad_()
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    optimizer.step()
    mine = found[3 * world.rank : 3 * world.rank + 3] if world.way == "alone" else found
    return {"input": mine, **grads(model), **weights(model)}


def weights_change_between_the_passes(world: World) -> Found:
    model = world.shard(net())
    loss = model(world.inputs()).square().mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    loss.backward()
    return grads(model)


def the_roots_weights_change_between_the_passes(world: World) -> Found:
    model = world.shard(_Own())
    own = model.scale
    loss = model(world.inputs()).square().mean()
    with torch.no_grad():
        own.mul_(2.0)
    loss.backward()
    return grads(model)


def a_backward_of_weights_before_a_step(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    older = model(world.inputs()).square().mean()
    older.backward(retain_graph=True)
    optimizer.step()
    step(world, model, 1)
    older.backward()
    return grads(model)


def recomputation_in_every_other_step(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        optimizer.zero_grad()
        x = world.inputs(number).requires_grad_()
        if number % 2:
            for module in model:
                x = checkpoint(module, x, use_reentrant=True)
        else:
            x = model(x)
        x.square().mean().backward()
        optimizer.step()
    return weights(model)


class _Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x).tanh()
        return x


def another_order_every_step(world: World) -> Found:
    model = _Ordered()
    for block in model.blocks:
        world.unit(block)
    found: Found = {}
    for number, order in enumerate(([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0], [1, 1, 0], [0, 3])):
        model.order = order
        model.zero_grad()
        step(world, model, number)
        found.update({f"{number} {name}": value for name, value in grads(model).items()})
    return {name: value for name, value in found.items() if value is not None}


def accumulation_by_the_module(world: World) -> Found:
    model = world.shard(net())
    for number in range(3):
        if world.way != "alone":
            model.set_requires_gradient_sync(number == 2)
        step(world, model, number)
    return grads(model)


def accumulation_under_no_sync(world: World) -> Found:
    model = world.shard(net())
    for number in range(3):
        alone = world.way == "alone" or number == 2
        with nullcontext() if alone else model.no_sync():
            step(world, model, number)
    return grads(model)


def a_penalty_on_weights(world: World) -> Found:
    model = world.shard(net())
    loss = model(world.inputs()).square().mean()
    loss.backward()
    sum((p.detach() ** 2).sum() for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)
    return grads(model)


def weights_drawn_by_init(world: World) -> Found:
    torch.manual_seed(0)
    model = world.shard(net(4))
    torch.manual_seed(7)
    for layer in (model[0], model[2]):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.kaiming_normal_(layer.weight)
        nn.init.orthogonal_(layer.weight)
        layer.reset_parameters()
        nn.init.zeros_(layer.bias)
    model.apply(lambda m: nn.init.trunc_normal_(m.weight) if isinstance(m, nn.Linear) else None)
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


def from_the_meta_device(world: World) -> Found:
    with torch.device("meta"):
        model = net()
    world.shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(11)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


def tied_after_sharding(world: World) -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    world.unit(model)
    model[2].weight = model[0].weight
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


def an_empty_parameter(world: World) -> Found:
    model = net()
    model[0].none = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
    world.shard(model)
    train(world, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return weights(model)


def complex_parameters(world: World) -> Found:
    class Wave(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(x.to(torch.complex128)).abs()
            return found

    torch.manual_seed(0)
    model = nn.Sequential(Wave(8, 6, dtype=torch.complex128), nn.Linear(6, 4).double())
    world.shard(model)
    train(world, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return weights(model)


class Answer:
    """What a model of a user's own returns."""

    def __init__(self, value: torch.Tensor, more: Mapping[str, torch.Tensor]) -> None:
        self.value, self.more = value, more


class _Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8).double()
        self.bias = nn.Parameter(torch.ones(8).double())

    def forward(self, x: torch.Tensor) -> Answer:
        y = self.inner(x)
        return Answer(y + self.bias, {"penalty": y.square().mean()})


def outputs_of_a_class_of_ones_own(world: World) -> Found:
    model = world.shard(_Answering())
    answer = model(world.inputs())
    (answer.value.square().mean() + answer.more["penalty"]).backward()
    return grads(model)


class _Stashing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.auxiliary = y.square().mean()
        return y


def an_auxiliary_loss_alone(world: World) -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(_Stashing(8, 8), nn.Linear(8, 4)).double()
    world.shard(model)
    model(world.inputs())
    model[0].auxiliary.backward()
    return grads(model)


def an_auxiliary_loss_of_the_last_of_three_modules_of_a_unit(world: World) -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Stashing(8, 8) for _ in "abc")).double()
    world.unit(list(model))
    model(world.inputs())
    model[2].auxiliary.backward()
    return grads(model)


class _Keeping(nn.Linear):
    def forward(self, x: torch.Tensor) -> None:
        self.loss = super().forward(x).square().mean()


def a_loss_kept_by_a_forward_that_returns_nothing(world: World) -> Found:
    torch.manual_seed(0)
    model = _Keeping(8, 4).double()
    world.unit(model)
    for number in range(3):
        model(world.inputs(number))
        model.loss.backward()
    return grads(model)


def gradients_by_torch_func(world: World) -> Found:
    model = world.shard(net())

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    found = torch.func.grad(loss)(world.inputs())
    mine = found[3 * world.rank : 3 * world.rank + 3] if world.way == "alone" else found
    return {"input": mine}


def copied_and_trained_apart(world: World) -> Found:
    model = world.shard(net())
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = copy.deepcopy(model)
    train(world, other, torch.optim.SGD(other.parameters(), lr=0.1), 2, 5)
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, 8)
    return {**weights(model), **weights(other, "copy ")}


def a_learning_rate_for_each_group(world: World) -> Found:
    model = world.shard(net())
    groups = [
        {"params": ["0.weight", "2.weight"], "lr": 0.1, "weight_decay": 0.2},
        {"params": ["0.bias"], "lr": 0.3},
        {"params": ["2.bias"], "lr": 0.0},
    ]
    optimizer = torch.optim.AdamW(world.flat(model, groups))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for number in range(3):
        train(world, model, optimizer, 1, number)
        schedule.step()
    return {**weights(model), "rates": [group["lr"] for group in optimizer.param_groups]}


def functional_call_with_own_parameters(world: World) -> Found:
    model = world.shard(net())
    named = dict(model.named_parameters())
    torch.func.functional_call(model, named, (world.inputs(),)).square().mean().backward()
    return grads(model)


def full_state_from_one_rank(world: World) -> Found:
    model = world.shard(net())
    full = net(3).state_dict() if not world.rank or world.way == "alone" else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.way != "alone")
    set_model_state_dict(model, full, options=options)
    return weights(model)


def the_methods_of_fsdp2(world: World) -> Found:
    model = world.shard(net())
    if world.way != "alone":
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
        model.set_is_last_backward(True)
        model.set_requires_all_reduce(True)
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[2].set_modules_to_backward_prefetch([model[0]])
        handle = model[2].unshard(async_op=True)
        handle.wait()
        model[2].reshard()
        model.unshard()
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    if world.way != "alone":
        for unit in (model[0], model[2], model):
            unit.reshard()
    return weights(model)


class _RowWise(torch.optim.Optimizer):
    """Adagrad with one number for each row."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.pow(2).mean(dim=1)
                total = self.state[p].setdefault("sum", torch.zeros_like(rows)).add_(rows)
                p.addcdiv_(p.grad, total.sqrt().add(1e-8).unsqueeze(1), value=-group["lr"])


def a_row_wise_optimizer(world: World) -> Found:
    model = world.shard(net())
    train(world, model, _RowWise([p for p in model.parameters() if p.ndim == 2]))
    return weights(model)


def zeroed_without_none(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad(set_to_none=False)
        step(world, model, number)
        optimizer.step()
    return weights(model)


def gradients_written_by_hand(world: World) -> Found:
    model = world.shard(net())
    step(world, model)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2 + parameter.detach().sign()
    step(world, model, 1)
    found = grads(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {**found, **weights(model)}


HABITS = habits_of(dict(globals())) | outside_tasks.HABITS

OF_ALL = {"full_state_from_one_rank"}  # torch's broadcast is one of all ranks there are


_TRUE: dict[tuple[str, int, int], Found] = {}  # of habits, ranks there are and this one


def furthest(mesh: DeviceMesh, habit: str, way: str) -> dict[str, float] | str:
    """What differs from the whole model and by how much, or the error that said no."""
    key = habit, mesh.size(), mesh.get_local_rank()
    if key not in _TRUE:
        alone: Found = {}
        said(lambda: alone.update(HABITS[habit](World(mesh, "alone"))))
        _TRUE[key] = alone
    true, found = _TRUE[key], {}
    error = said(lambda: found.update(HABITS[habit](World(mesh, way))))
    if not true or not found:
        return error
    assert set(found) == set(true), (sorted(found), sorted(true))
    differences = {name: apart(found[name], true[name]) for name in true}
    return {name: value for name, value in differences.items() if not value <= 1e-9}


def several(mesh: DeviceMesh, habits: Sequence[str], way: str) -> dict[str, dict[str, float] | str]:
    """What :func:`furthest` finds of each of the ``habits`` that these ranks can have."""
    found = {}
    for habit in habits:
        if habit in OF_ALL and mesh.size() < dist.get_world_size():
            continue
        Comm(mesh).forget()
        found[habit] = furthest(mesh, habit, way)
    return found
