"""What reaches into a sharded model from outside of a step: parameters in a loss, activations that
were captured, hooks, writes, states and gradients of whole tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from worlds import Found, World, grads, net, step, step_in_backward, train, weights, whole

import shardwright as sw


class _Scaled(nn.Module):
    """Multiplies with a number inside of its forward, or leaves that to a loss."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8).double()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.inside = inside

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x).tanh() * self.scale
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.logits(x) if self.inside else self.inner(x).tanh()
        return found


def a_temperature_in_the_loss(world: World) -> Found:
    model = world.shard(_Scaled(inside=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        (model(world.inputs(number)) * model.scale.exp()).square().mean().backward()
        optimizer.step()
    return weights(model)


def a_number_used_by_another_method(world: World) -> Found:
    model = world.shard(_Scaled(inside=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        model.logits(world.inputs(number)).square().mean().backward()
        optimizer.step()
    return weights(model)


def a_copy_with_a_temperature_in_the_loss(world: World) -> Found:
    model = world.shard(_Scaled(inside=False))
    found: Found = {}
    for each in (copy.deepcopy(model), model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        (each(world.inputs()) * each.scale.exp()).square().mean().backward()
        optimizer.step()
        found |= weights(each, prefix=f"{len(found)} ")
    return found


def a_number_through_torch_save(world: World) -> Found:
    model = world.shard(_Scaled(inside=True))
    file = io.BytesIO()
    torch.save(model.scale, file)
    file.seek(0)
    return {"scale": torch.load(file).detach()}


def hooks_on_a_number(world: World) -> Found:
    model = world.shard(_Scaled(inside=True))
    model.scale.register_hook(lambda gradient: gradient * 2)
    step(world, model)
    return grads(model)


def optimizer_in_the_backward_of_a_number(world: World) -> Found:
    model = world.shard(_Scaled(inside=True))
    step_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.1))
    for number in range(3):
        step(world, model, number)
    return weights(model)


def optimizer_in_the_backward_of_replicas(world: World) -> Found:
    model = net()
    if world.ours:
        sw.fully_shard_flat(model, world.mesh, (sw.Replicate(),))
    else:
        world.unit(model)
    step_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.1))
    for number in range(3):
        step(world, model, number)
    return weights(model)


def hooks_from_before_sharding(world: World) -> Found:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    world.shard(model)
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


def marks_on_parameters(world: World) -> Found:
    model = net()
    model[0].weight.no_weight_decay = True
    world.shard(model)
    return {name: hasattr(p, "no_weight_decay") for name, p in model.named_parameters()}


def an_optimizer_from_before_sharding(world: World) -> Found:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.shard(model)
    train(world, model, optimizer)
    return weights(model)


def hooks_under_flat_tensors(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(world.flat(model), lr=0.1)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    train(world, model, optimizer)
    return weights(model)


def hooks_on_flat_tensors(world: World) -> Found:
    model = world.shard(net())
    flat = world.flat(model)
    for parameter in flat:
        parameter.register_hook(lambda gradient: gradient * 2)
    train(world, model, torch.optim.SGD(flat, lr=0.1))
    return weights(model)


def _restored(world: World, **options: Any) -> Found:
    alone = net()
    other = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for number in range(2):
        other.zero_grad()
        alone(torch.full((3, 8), number + 1.0).double()).square().mean().backward()
        other.step()
    model = net()
    model.load_state_dict(alone.state_dict())
    world.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    for group in optimizer.param_groups:
        group.update(options)
    train(world, model, optimizer)
    return weights(model)


def a_whole_optimizer_state(world: World) -> Found:
    return _restored(world)


def a_whole_optimizer_state_fused(world: World) -> Found:
    return _restored(world, fused=True)


def whole_gradients_for_a_fused_step(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    for number in range(3):
        step(world, model, number)
        for parameter, gradient in [(p, whole(p.grad)) for p in model.parameters()]:
            parameter.grad = gradient * 2
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def hooks_on_flat_tensors_over_two_backwards(world: World) -> Found:
    model = world.shard(net())
    flat = world.flat(model)
    for parameter in flat:
        parameter.register_hook(lambda gradient: gradient * 2)
    for number in range(2):
        step(world, model, number)
    torch.optim.SGD(flat, lr=0.1).step()
    return weights(model)


def a_counter_that_acts_with_a_temperature_in_the_loss(world: World) -> Found:
    model = world.shard(_Scaled(inside=False))
    calls: list[int] = []
    model.scale.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    (model(world.inputs()) * model.scale.exp()).square().mean().backward()
    return {"calls": float(len(calls))}


class _WithCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4).double()
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) * self.count
        return found


def a_whole_number_as_a_parameter(world: World) -> Found:
    model = _WithCount()
    world.unit(model)
    train(world, model, torch.optim.SGD(model.linear.parameters(), lr=0.1))
    return weights(model)


def a_number_copied_alone(world: World) -> Found:
    model = world.shard(_Scaled(inside=True))
    alone = copy.deepcopy(model.scale)
    (alone * 3).square().backward()
    (alone * 3).square().backward()
    return {"gradient": alone.grad}


class _Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4).double()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.linear(batch["x"])
        return found


def a_leaf_in_the_callers_dictionary(world: World) -> Found:
    model = _Keyed()
    world.unit(model)
    x = world.inputs().requires_grad_()
    batch = {"x": x}
    for _ in range(2):
        model(batch).square().mean().backward()
    return {"same": batch["x"] is x, "seen": x.grad is not None, **grads(model)}


def a_state_after_a_dry_run(world: World) -> Found:
    model = _root_with_its_own(world)
    model(world.inputs())
    nn.init.constant_(model[2].bias, 0.25)
    return {name: whole(value) for name, value in model.state_dict().items()}


def clipping_after_another_forward(world: World) -> Found:
    model = _root_with_its_own(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(world, model)
    model(world.inputs(9))
    clip = sw.clip_grad_norm_ if world.ours else _clip
    norm = clip(model, 0.1)
    optimizer.step()
    model.zero_grad()
    with torch.no_grad():
        model(world.inputs())
    return {"norm": whole(norm), **weights(model)}


def _clip(model: nn.Module, most: float) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), most)


class _Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor], seen: Any) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).tanh()
        losses.append(y.square().mean())
        seen["last"] = y
        return y


class _Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Appends() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        seen = {"first": x}
        for block in self.blocks:
            x = block(x, losses, seen)
        return x.square().mean() + torch.stack(losses).sum() + seen["last"].mean()


def losses_in_the_callers_list(world: World) -> Found:
    model = _Collects()
    for block in model.blocks:
        world.unit(block)
    world.unit(model)
    model(world.inputs()).backward()
    return grads(model)


def _capturing(module: nn.Module) -> dict[str, torch.Tensor]:
    captured: dict[str, torch.Tensor] = {}
    module.register_forward_hook(lambda _, __, output: captured.__setitem__("output", output))
    return captured


def a_loss_on_a_captured_activation(world: World) -> Found:
    model = net()
    captured = _capturing(model[0])
    world.shard(model)
    model(world.inputs())
    captured["output"].square().mean().backward()
    return {name: g for name, g in grads(model).items() if g is not None}


def a_loss_on_an_activation_inside_of_a_unit(world: World) -> Found:
    model = net()
    captured = _capturing(model[0])
    world.unit(model)
    model(world.inputs())
    captured["output"].square().mean().backward()
    return {name: g for name, g in grads(model).items() if g is not None}


class _Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4).double()
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> None:
        self.loss = self.linear(x).square().mean()


def a_forward_that_gives_nothing(world: World) -> Found:
    model = _Leaves()
    world.unit(model)
    model(world.inputs())
    assert model.loss is not None
    model.loss.backward()
    return grads(model)


def a_vectorized_model(world: World) -> Found:
    model = _Bias()
    world.unit(model)
    torch.vmap(model)(world.inputs()).square().mean().backward()
    return grads(model)


def a_vectorized_model_of_units(world: World) -> Found:
    model = world.shard(net())
    torch.vmap(model)(world.inputs()).square().mean().backward()
    return grads(model)


def a_gradient_penalty(world: World) -> Found:
    model = world.shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        x = world.inputs(number).requires_grad_()
        values = model(x).sin()
        (slope,) = torch.autograd.grad(values.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        sum(each.square().mean() for each in (values, slope, bend)).backward()
        optimizer.step()
    return weights(model)


def a_second_derivative_by_torch_func(world: World) -> Found:
    model = world.shard(net())
    rows = world.inputs() if world.way != "alone" else world.inputs()[3 * world.rank :]
    func = torch.func

    def value(row: torch.Tensor) -> torch.Tensor:
        return model(row).square().sum()

    def slope(row: torch.Tensor) -> torch.Tensor:
        return func.jvp(value, (row,), (rows[1],))[1]

    return {"bend": func.hessian(value)(rows[0]), "turn": func.grad(slope)(rows[0])}


class _Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(0, 1, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def _root_with_its_own(world: World) -> nn.Sequential:
    model = net()
    world.unit(model[0])
    world.unit(model)
    return model


def a_part_loaded_after_a_dry_run(world: World) -> Found:
    model = _root_with_its_own(world)
    model(world.inputs())
    model[2].load_state_dict(net(5)[2].state_dict())
    with torch.no_grad():
        model(world.inputs())
    return weights(model)


def weights_drawn_after_a_dry_run(world: World) -> Found:
    model = _root_with_its_own(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(world.inputs())
    torch.manual_seed(3)
    nn.init.normal_(model[2].weight)
    model[2].bias.data.zero_()
    train(world, model, optimizer)
    return weights(model)


def weights_clamped_after_an_evaluation_with_gradients(world: World) -> Found:
    model = _root_with_its_own(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        train(world, model, optimizer, 1, number)
        model(world.inputs(9))
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    return weights(model)


def inference_before_training(world: World) -> Found:
    model = world.shard(net())
    model.to(torch.float32).to(torch.float64)
    with torch.inference_mode():
        model(world.inputs())
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


class _Forces(nn.Module):
    """The gradient of an energy, taken inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.energy = nn.Linear(8, 8).double(), nn.Linear(8, 1).double()
        self.head = nn.Linear(8, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(self.first(x).tanh()).sum()
        (force,) = torch.autograd.grad(energy, x)
        found: torch.Tensor = self.head(force)
        return found


def forces_inside_of_a_forward(world: World) -> Found:
    model = _Forces()
    world.unit(model.first)
    world.unit(model)
    train(world, model, torch.optim.SGD(model.head.parameters(), lr=0.1))
    return weights(model)


class _Initialised(nn.Module):
    """Takes its number from the first data it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.is_new = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_new:
            self.scale.data.copy_(x.detach().abs().mean())
            self.is_new = False
        return x * self.scale


def _initialised(world: World) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8).double(), _Initialised())


def a_number_initialised_by_data(world: World) -> Found:
    model = world.shard(_initialised(world))
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


def a_number_initialised_without_gradients(world: World) -> Found:
    model = _initialised(world)
    world.unit(model)
    with torch.no_grad():
        model(world.inputs(9))
    train(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model)


def an_input_changed_in_place(world: World) -> Found:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    model = world.shard(nn.Sequential(first, second).double())
    x = model[0](world.inputs())
    (x + model[1](x)).square().mean().backward()
    return grads(model)


def weights_of_the_first_rank_sent(world: World) -> Found:
    model = world.shard(net())
    for parameter in model.parameters() if world.way != "alone" else ():
        dist.broadcast(parameter.data, 0, group=world.mesh.get_group())
    return weights(model)


def gradients_summed_by_hand(world: World) -> Found:
    model = world.shard(net())
    step(world, model)
    for parameter in model.parameters() if world.way != "alone" else ():
        dist.all_reduce(parameter.grad, group=world.mesh.get_group())
    return grads(model)


def gradients_of_the_root_by_autograd(world: World) -> Found:
    model = _root_with_its_own(world)
    loss = model(world.inputs()).square().mean()
    (found,) = torch.autograd.grad(loss, model[2].bias)
    return {"bias": found}


def a_later_part_of_a_list_alone(world: World) -> Found:
    torch.manual_seed(0)
    pair = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))
    if world.ours:
        sw.fully_shard_flat(list(pair), world.mesh)
    elif world.way == "fsdp2":
        world.unit(pair[1])
    pair[1](world.inputs()).square().mean().backward()
    return {"gradient": whole(pair[1].weight.grad)}


def habits_of(module: dict[str, Any]) -> dict[str, Callable[[World], Found]]:
    """The habits that are written down in a module."""
    return {
        name: habit
        for name, habit in module.items()
        if callable(habit)
        and getattr(habit, "__annotations__", {}) == {"world": "World", "return": "Found"}
        and not name.startswith("_")
    }


HABITS = habits_of(dict(globals()))
