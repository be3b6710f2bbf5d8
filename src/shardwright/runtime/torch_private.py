"""The private interfaces of torch that change what happens; docs/architecture.md lists the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward pass has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is running a backward pass, as a recomputed forward does."""
    return bool(torch._C._current_graph_task_id() != -1)


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make ``module.name`` another parameter without registration checks or copies."""
    module._parameters[name] = parameter
