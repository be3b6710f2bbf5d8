"""A fused cross-entropy: the gradient of the logits replaces them in the forward pass.

As Liger's kernel does it: nothing of the size of the logits is allocated, and the logits, which now
hold their gradient, are what is kept. Its fused linear variant goes further and is the model's own
choice, not a replacement of a function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("shardwright::fused_cross_entropy", mutates_args=("logits",))
def fused_cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, mean: bool) -> Tensor:
    """The loss in fp32; ``logits`` (rows x classes) become their gradient."""
    wide = logits.float()
    reduction = "mean" if mean else "sum"
    loss = torch.nn.functional.cross_entropy(
        wide, target, ignore_index=ignore_index, reduction=reduction
    )
    grad = wide.softmax(-1)
    kept = target != ignore_index
    grad[torch.arange(len(target)), target.clamp(min=0)] -= 1.0
    grad *= kept[:, None] / (kept.sum() if mean else 1)
    logits.copy_(grad)
    return loss


@fused_cross_entropy.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, mean: bool) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=logits.device)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, target: Tensor, ignore_index: int, mean: bool
    ) -> Tensor:
        held = logits.detach()
        loss: Tensor = fused_cross_entropy(held, target, ignore_index, mean)
        context.save_for_backward(held)
        return loss

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        (held,) = context.saved_tensors
        return held.mul_(grads[0]), None, None, None


def cross_entropy(
    input: Tensor,  # noqa: A002 - torch's name, which callers may write
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """torch's function of this name, fused; None for all but rows of logits, class numbers, and a
    mean or a sum."""
    plain = weight is None and label_smoothing == 0.0 and size_average is None and reduce is None
    rows = input.dim() == 2 and not target.is_floating_point()
    if not (plain and rows and reduction in ("mean", "sum")):
        return None
    loss: Tensor = _CrossEntropy.apply(input, target, ignore_index, reduction == "mean")
    return loss
