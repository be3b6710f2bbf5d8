"""Cross entropy as a compiled kernel: no fp32 logits, only their statistics.

TorchTitan compiles its loss beside the blocks: the cast to fp32, the maximum, the sum and the
target's logit are fused, so the logits are kept as the head made them, with a maximum and a sum in
fp32 for each token, and the backward makes their gradient in their own dtype in one go.
"""

from __future__ import annotations

from typing import Any

import torch

STATISTICS = 2  # numbers in fp32 per token


class _CompiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        statistics = logits.new_empty((STATISTICS, targets.numel()), dtype=torch.float32)
        context.save_for_backward(logits, statistics)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        logits, _ = context.saved_tensors
        return torch.empty_like(logits), None


def compiled_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A stand-in that takes and keeps what the compiled loss does; it computes nothing.

    ``logits`` [B, T, V] in any dtype, ``targets`` [B, T].
    """
    result: torch.Tensor = _CompiledLoss.apply(logits, targets)
    return result
