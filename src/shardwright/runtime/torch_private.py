"""The private torch interfaces the project uses, all of them, in one place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward pass has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make ``module.name`` another parameter without registration checks or copies."""
    module._parameters[name] = parameter
