"""What a tracker does not do, and says so in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from tracker_nets import Net, words

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.tracker.memory import MemoryTracker


class Chooses(nn.Module):
    """What comes out depends on the values that come in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()


def test_trackers_do_not_nest() -> None:
    with (
        MemoryTracker(),
        pytest.raises(InputError, match=r"^MemoryTracker: expected one at a time, got one inside"),
        MemoryTracker(Net()),
    ):
        pass
    with MemoryTracker():  # and the one that was refused is not in the way
        pass


def test_a_tracker_is_used_once() -> None:
    tracker = MemoryTracker()
    with tracker:
        pass
    with pytest.raises(InputError, match=r"expected a new one, .* Make another\."), tracker:
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "^model: expected a torch.nn.Module, got int"),
        ({"model": Net(), "optimizer": "adam"}, "^optimizer: expected a torch.optim.Optimizer"),
        ({"granularity": 0}, "^granularity: expected 1 byte or more, got 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MemoryTracker(**arguments)


def test_compiled_modules_are_refused_by_name() -> None:
    model = Net()
    model.blocks[1].compile(backend="eager")
    before = torch.UntypedStorage.resize_
    with (
        pytest.raises(UnsupportedError, match=r"^module 'blocks.1': .* without torch.compile\.$"),
        MemoryTracker(model),
    ):
        pass
    assert torch.UntypedStorage.resize_ is before
    assert not nn.modules.module._global_forward_hooks


def test_sizes_that_are_not_known_are_refused() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    with mode:
        model = Net()
    batch = mode.from_tensor(words())
    asked = (
        r"expected tensors of known size, got .* bytes \(made before\)\. Give .* static shapes\.$"
    )
    with (
        mode,
        pytest.raises(UnsupportedError, match=rf"^MemoryTracker: {asked}"),
        MemoryTracker(model, inputs=batch),
    ):
        pass


def test_a_module_that_makes_sizes_that_are_not_known_is_named() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    with mode:
        model, batch = nn.Sequential(Chooses()), torch.ones(4)
    with (
        mode,
        pytest.raises(UnsupportedError, match=r"^module '0': .* bytes \(by aten.nonzero\)\."),
        MemoryTracker(model),
    ):
        model(batch)
