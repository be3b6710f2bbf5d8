from __future__ import annotations

import importlib

import pytest
import torch

from shardwright.core.errors import InputError
from shardwright.core.optimizers import MADE, OPTIMIZERS
from shardwright.runtime.optimizer import make_optimizer


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_is_made_of_its_class_with_its_settings(name: str) -> None:
    made, row = make_optimizer(name, _parameters(), 0.5), OPTIMIZERS[name]
    module, _, kind = row.make.partition(":")
    assert type(made) is getattr(importlib.import_module(module), kind)
    assert dict(row.settings).items() <= made.defaults.items()
    assert made.defaults["lr"] == 0.5


@pytest.mark.parametrize("name", ["lion", "muon", "adamw_8bit_torchao", "none"])
def test_what_cannot_be_made_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=rf"train\.optimizer: expected one of sgd, .*'{name}'"):
        make_optimizer(name, _parameters(), 0.5)


@pytest.mark.parametrize(
    ("implementation", "flags"),
    [(None, (True, False)), ("foreach", (False, True)), ("for_loop", (False, False))],
)
def test_a_step_is_fused_unless_something_else_is_asked_for(
    implementation: str | None, flags: tuple[bool, bool]
) -> None:
    made = make_optimizer("adam", _parameters(), 0.5, implementation)
    assert (made.defaults["fused"], made.defaults["foreach"]) == flags


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_step_changes_every_value_of_any_dtype(
    name: str, dtype: torch.dtype, grouped: bool
) -> None:
    """torch 2.13's fused SGD leaves whole vectors of halves as they were."""
    weight = torch.nn.Parameter(torch.ones(101, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    make_optimizer(name, [{"params": [weight]}] if grouped else [weight], 0.5).step()
    assert (weight != 1).all()
