"""Saving and loading in one process: what optimizers keep, and what stays out of a checkpoint."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import checkpoint_cases
import pytest
import torch
from torch import nn, optim

import shardwright as sw
from shardwright.runtime.checkpoint import read_full
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.optimizer_state import fresh_state

OPTIMIZERS: dict[str, Any] = {
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {}),
    "adam amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamax": (optim.Adamax, {}),
    "adamw fused": (optim.AdamW, {"fused": True}),
    "adamw tensor": (optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "asgd": (optim.ASGD, {"maximize": True}),
    "nadam": (optim.NAdam, {"foreach": True}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "rprop": (optim.Rprop, {}),
    "sgd": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd without state": (optim.SGD, {}),
}


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def make(name: str, model: nn.Module) -> optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    found: optim.Optimizer = kind(model.parameters(), **copy.deepcopy(options))
    return found


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_elements_goes_on_as_it_was(name: str, tmp_path: Path) -> None:
    model, other = network(1), network(2)
    optimizer, fresh = make(name, model), make(name, other)
    train(model, optimizer, 3)
    sw.save_checkpoint(tmp_path, model, optimizer, step=3)
    sw.load_checkpoint(tmp_path, other, fresh)
    assert train(other, fresh, 2) == train(model, optimizer, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_made_without_touching_parameters_hooks_or_schedulers(name: str) -> None:
    model = network(1)
    with torch.no_grad():
        model[0].weight.fill_(float("inf"))  # what memory after to_empty may be
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(name, model)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    optim.lr_scheduler.StepLR(optimizer, 1)
    state = fresh_state(optimizer, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not getattr(optimizer, "_opt_called", False)
    for group, was in zip(optimizer.param_groups, settings, strict=True):
        assert all(group[key] == value for key, value in was.items())
    twin = network(1)
    reference = make(name, twin)
    train(twin, reference, 1)
    for parameter, true in zip(model.parameters(), twin.parameters(), strict=True):
        found = {n: torch.as_tensor(v) for n, v in state[parameter].items()}
        wanted = {n: torch.as_tensor(v) for n, v in reference.state[true].items() if v is not None}
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype)


def test_optimizers_whose_state_is_not_by_element_are_refused_by_name(tmp_path: Path) -> None:
    model = network(1)
    optimizer = optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(sw.UnsupportedError) as refused:
        sw.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert str(refused.value).startswith(
        "state 'row_var' of 0.weight: expected a number or a tensor of the parameter's shape, got "
    )
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_that_cannot_make_its_state_says_so(tmp_path: Path) -> None:
    model = network(1)
    saved = optim.SGD(model.parameters(), momentum=0.5)
    train(model, saved, 1)
    sw.save_checkpoint(tmp_path, model, saved, step=1)
    with pytest.raises(sw.UnsupportedError, match=r"optimizer LBFGS: expected to take a step on"):
        sw.load_checkpoint(tmp_path, model, optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("how", ["saved", "loaded"])
def test_keep_spares_what_another_run_saved_or_loaded_last_as_long_as_it_lives(
    tmp_path: Path, how: str
) -> None:
    own, other = network(1), network(2)
    sw.save_checkpoint(tmp_path, other if how == "saved" else own, step=1)
    sw.save_checkpoint(tmp_path, own, step=2)
    if how == "loaded":
        sw.load_checkpoint(tmp_path, other, step=1)
    for step in (5, 6):
        sw.save_checkpoint(tmp_path, own, step=step, keep=1)
    assert complete_steps(tmp_path) == [1, 6]
    del other
    gc.collect()
    sw.save_checkpoint(tmp_path, own, step=7, keep=1)
    assert complete_steps(tmp_path) == [7]


def test_a_model_that_is_gone_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    model = network(1)
    for step in range(3):
        sw.save_checkpoint(tmp_path, model, step=step)
    sw.load_checkpoint(tmp_path, model)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_settings_come_back_and_what_carries_a_step_out_does_not(tmp_path: Path) -> None:
    model = network(1)
    optimizer = optim.AdamW(model.parameters(), lr=0.5, betas=(0.7, 0.8), fused=True)
    optim.lr_scheduler.StepLR(optimizer, 1)
    sw.save_checkpoint(tmp_path, model, optimizer, step=0)
    fresh = optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    rate = fresh.param_groups[0]["lr"]
    sw.load_checkpoint(tmp_path, model, fresh)
    group = fresh.param_groups[0]
    assert group["lr"] is rate
    assert rate.item() == 0.5
    assert group["betas"] == (0.7, 0.8)
    assert group["initial_lr"] == 0.5
    assert group["fused"] is None
    assert group["foreach"] is False


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("betas", [0.9, 1.5], "a finite number from 0 to 1, got 1.5"),
        ("betas", [0.9, -0.1], "a finite number from 0 to 1, got -0.1"),
        ("betas", [0.9], r"2 numbers as \[0.9, 0.999\], got \[0.9\]"),
        ("betas", "high", r"2 numbers as \[0.9, 0.999\], got 'high'"),
        ("lr", -1.0, "a finite number from 0 to inf, got -1.0"),
        ("lr", float("inf"), "a finite number from 0 to inf, got None"),  # JSON has none
        ("eps", True, "float as 1e-08, got True"),
        ("amsgrad", 1, "bool as False, got 1"),
    ],
)
def test_a_setting_that_no_optimizer_has_is_refused_before_anything_is_filled(
    tmp_path: Path, key: str, value: Any, wanted: str
) -> None:
    model = network(1)
    sw.save_checkpoint(tmp_path, model, optim.Adam(model.parameters()), step=0)

    def edit(found: dict[str, Any]) -> None:
        found["scalars"]["optimizer"][0][key] = value

    checkpoint_cases.forge(tmp_path / "step-0", 0, edit)
    other = network(2)
    before = copy.deepcopy(other.state_dict())
    text = rf"optimizer.param_groups\[0\]\['{key}'\]: expected {wanted}\. Another checkpoint has"
    with pytest.raises(sw.MismatchError, match=text):
        sw.load_checkpoint(tmp_path, other, optim.Adam(other.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_parameter_that_took_no_step_has_no_state_afterwards(tmp_path: Path) -> None:
    model, other = network(1), network(2)
    model[2].bias.grad = None
    model[2].bias.requires_grad_(False)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 2)
    model[2].bias.requires_grad_(True)
    sw.save_checkpoint(tmp_path, model, optimizer, step=2)
    fresh = optim.Adam(other.parameters())
    train(other, fresh, 1)
    sw.load_checkpoint(tmp_path, other, fresh)
    assert other[2].bias not in fresh.state
    assert train(other, fresh, 2) == train(model, optimizer, 2)


def test_buffers_that_are_not_persistent_stay_out(tmp_path: Path) -> None:
    model = network(1)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    sw.save_checkpoint(tmp_path, model, step=1, extra=None)
    assert sorted(read_full(tmp_path)) == sorted(model.state_dict())


def test_a_smaller_dtype_is_asked_for(tmp_path: Path) -> None:
    model, half = network(1), network(2).bfloat16()
    sw.save_checkpoint(tmp_path, model, step=1)
    with pytest.raises(
        sw.MismatchError, match=r"0\.weight: expected a dtype that holds every value"
    ):
        sw.load_checkpoint(tmp_path, half)
    sw.load_checkpoint(tmp_path, half, allow_smaller_dtype=True)
    assert torch.equal(half[0].weight, model[0].weight.bfloat16())


def test_what_is_not_json_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(sw.InputError, match=r"scalars\.extra\.when: expected text, a finite"):
        sw.save_checkpoint(tmp_path, network(1), step=1, extra={"when": object()})


def test_the_newest_checkpoint_is_loaded_unless_a_step_is_given(tmp_path: Path) -> None:
    model = network(1)
    for step in (1, 2, 3):
        sw.save_checkpoint(tmp_path, model, step=step, extra=[step], keep=2)
    assert sw.load_checkpoint(tmp_path, model).extra == [3]
    assert sw.load_checkpoint(tmp_path, model, step=2).extra == [2]
    with pytest.raises(sw.InputError, match="step-1: expected a readable folder"):
        sw.load_checkpoint(tmp_path, model, step=1)
