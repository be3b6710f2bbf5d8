"""The fast path for dense optimizers: one flat tensor per unit instead of many small ones."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.core.model import DenseOptimizer
from shardwright.runtime.fully_shard import get_dstorage


def optimizer_parameters(model: nn.Module) -> list[nn.Parameter]:
    """One flat parameter per unit of ``model``; its ``.grad`` is the reduced shard gradient.

    From here on gradients go to these tensors and not to ``model.parameters()``: clear them with
    the optimizer's ``zero_grad``, not the model's. They are shards, so a norm over them is this
    rank's part only. Tables are not among them: they are updated inside their backward. Raises if
    an earlier backward left gradients on ``model.parameters()``.
    """
    storages = [s for s in map(get_dstorage, model.modules()) if s is not None]
    if not storages:
        raise InputError(
            expected("model", "units made by apply or fully_shard_flat", "none", "Shard it first.")
        )
    for storage in storages:
        if storage.optimizer_parameter is None:
            held = next(
                (i.fqn for i in storage.param_infos.values() if storage.has_gradient(i)), ""
            )
            if held:
                raise InputError(
                    expected(
                        "optimizer_parameters",
                        "to be called before the first backward",
                        f"a gradient on {held}",
                        "Call it right after sharding, or clear gradients first.",
                    )
                )
            storage.optimizer_parameter = nn.Parameter(storage.flat)
    return [s.optimizer_parameter for s in storages if s.optimizer_parameter is not None]


def make_optimizer(
    kind: DenseOptimizer, parameters: list[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """The optimizer a plan names for its dense units, in torch's fused form."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate, fused=True)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=learning_rate, fused=True)
    return torch.optim.Adam(parameters, lr=learning_rate, fused=True)
