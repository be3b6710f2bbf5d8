"""A moving average of weights, of modules as they are, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.core.errors import InputError, MismatchError
from shardwright.runtime.model_parts import average_weights


def test_parameters_move_by_what_does_not_stay_and_buffers_are_copied() -> None:
    average, model = (nn.BatchNorm1d(3) for _ in range(2))
    nn.init.constant_(model.weight, 5.0)
    model.running_mean = torch.full((3,), 7.0)
    average_weights(average, model, 0.75)
    assert average.weight.tolist() == [2.0] * 3
    assert average.running_mean is not None
    assert average.running_mean.tolist() == [7.0] * 3
    average_weights(average, model, 0.0)
    assert average.weight.equal(model.weight)
    assert average.weight.requires_grad


@pytest.mark.parametrize(
    ("model", "decay", "said"),
    [
        (nn.Linear(2, 3), 0.5, r"weight: expected the same part .* got \[3, 2\] in one"),
        (nn.Linear(2, 2, bias=False), 0.5, "bias: expected a weight of both models, got one of"),
        (nn.Linear(2, 2), 1.5, "decay: expected a share from 0 to 1, got 1.5"),
    ],
)
def test_models_that_differ_and_shares_that_are_none_are_refused(
    model: nn.Module, decay: float, said: str
) -> None:
    average = nn.Linear(2, 2)
    before = average.weight.clone()
    with pytest.raises((InputError, MismatchError), match=said):
        average_weights(average, model, decay)
    assert average.weight.equal(before)
