"""A module's step as a recording."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.recording import Recording
from shardwright.trace.checks import Untraceable
from shardwright.trace.module import (
    TracedModule,
    held_tensors,
    record,
    recorded_units,
    storage_bytes,
)

WIDTH = 4


class Two(nn.Module):
    """Two layers, a buffer, and a tensor as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(WIDTH))
        self.plain = [torch.zeros(2 * WIDTH)]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.second(self.first(x)) + self.kept + self.plain[0][:WIDTH]
        return x if scale is None else x * scale


def recorded(**changes: object) -> Recording:
    with FakeTensorMode():
        module, x = Two(), torch.zeros(3, WIDTH)
        found = changes.pop("module", None)
        units = {"first": [module.first], "": [module]}
        subject = TracedModule(module, (x,), units, loss=torch.Tensor.sum)
        if callable(found):
            found(module)
        return record(TracedModule(**{**_fields(subject), **changes}))


def _fields(subject: TracedModule) -> dict[str, object]:
    return {name: getattr(subject, name) for name in subject.__slots__}


def test_pieces_follow_the_units_through_forward_and_backward() -> None:
    assert [(piece.point, piece.unit) for piece in recorded().pieces] == [
        ("begin", ""),
        ("enter", ""),
        ("enter", "first"),
        ("leave", "first"),
        ("leave", ""),
        ("finish", ""),
        ("loss", ""),
        ("backward", ""),
        ("enter_backward", ""),
        ("enter_backward", "first"),
    ]


def test_every_parameter_is_in_one_unit_and_its_gradient_is_recorded() -> None:
    found = recorded()
    tensors = {unit.name: [t.fqn for t in unit.tensors] for unit in found.units}
    assert tensors == {
        "first": ["first.weight", "first.bias"],
        "": ["second.weight", "second.bias"],
    }
    touches = [t for piece in found.pieces for t in piece.touches if t.what == "gradient"]
    assert {t.name for t in touches} == {
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    }


def test_all_that_is_taken_and_no_gradient_is_freed() -> None:
    live: dict[int, int] = {}
    for touch in (touch for piece in recorded().pieces for touch in piece.touches):
        if touch.what == "take":
            live[touch.slot] = touch.nbytes
        else:
            live.pop(touch.slot)
    assert live == {}


def test_buffers_are_registered_ones_and_plain_tensors_and_inputs_what_is_given() -> None:
    found = recorded()
    assert found.buffers == 4 * (WIDTH + 2 * WIDTH)
    assert found.inputs == 4 * 3 * WIDTH


def test_a_tensor_that_the_loss_holds_is_an_input() -> None:
    with FakeTensorMode():
        targets = torch.zeros(3, WIDTH)
        module, x = nn.Linear(WIDTH, WIDTH), torch.zeros(3, WIDTH)
        subject = TracedModule(
            module, (x,), {"": [module]}, loss=lambda result: (result - targets).square().mean()
        )
        assert record(subject).inputs == 2 * 4 * 3 * WIDTH


def test_inputs_may_be_given_by_name() -> None:
    with FakeTensorMode():
        module = Two()
        x, scale = torch.zeros(3, WIDTH), torch.zeros(3, WIDTH)
        found = record(
            TracedModule(module, (x,), {"": [module]}, torch.Tensor.sum, keywords={"scale": scale})
        )
    assert found.inputs == 2 * 4 * 3 * WIDTH


def test_frozen_parameters_are_gathered_and_get_no_gradient() -> None:
    found = recorded(module=lambda module: module.first.weight.requires_grad_(False))
    assert [unit.frozen for unit in found.units if unit.frozen] == [("first.weight",)]
    assert [t.fqn for t in found.units[0].tensors] == ["first.weight", "first.bias"]
    names = {t.name for piece in found.pieces for t in piece.touches if t.what == "gradient"}
    assert "first.weight" not in names


def test_a_shared_parameter_belongs_to_the_first_unit_that_has_it() -> None:
    module = Two()
    module.second.weight = module.first.weight
    first, root = recorded_units(module, {"first": [module.first], "": [module]})
    assert [t.fqn for t in first.tensors] == ["first.weight", "first.bias"]
    assert [t.fqn for t in root.tensors] == ["second.bias"]


def test_storages_count_once() -> None:
    x = torch.zeros(WIDTH)
    assert storage_bytes([x, x[:2], torch.zeros(1)]) == 4 * (WIDTH + 1)
    assert sum(t.numel() for t in held_tensors(Two())) == 2 * (WIDTH * WIDTH + WIDTH) + 3 * WIDTH


def test_a_module_that_fails_is_named_and_left_as_it_was() -> None:
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 1, WIDTH))
        with pytest.raises(Untraceable) as failed:
            record(TracedModule(module, (torch.zeros(3, WIDTH),), {"": [module]}, torch.Tensor.sum))
    assert failed.value.path == "1"
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
