"""Cross entropy of the next token: of all words, of one rank's words, or by chunks of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from shardwright.models.llama.collectives import all_reduce

Context = Any
CHUNKS = 8  # of tokens in a chunked loss; torchtune's default (num_output_chunks)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats, computed in fp32: logits [B, T, V], targets [B, T] int64."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Logits between ``-cap`` and ``cap``; as they are where it is 0."""
    return torch.tanh(logits / cap) * cap if cap else logits


def parallel_loss(logits: torch.Tensor, targets: torch.Tensor, degree: int) -> torch.Tensor:
    """The same of logits [B, T, V / degree] that are never gathered.

    Per token a maximum, a sum and the target's logit go to the other ranks, as in torch's
    ``loss_parallel``, whose buffers these are. With ``degree`` 1 it computes the loss.
    """
    return _ParallelLoss.apply(logits.float().flatten(0, 1), targets.flatten(), degree)


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    degree: int = 1,
    cap: float = 0.0,
) -> torch.Tensor:
    """The loss of the logits ``hidden`` [B, T, D] times ``weight`` [V, D] transposed, a chunk of
    tokens at a time: their gradients are computed at once, so the logits need not be kept.

    It is what fused linear cross entropies keep: a gradient of each factor.
    """
    return _ChunkedLoss.apply(hidden.flatten(0, 1), weight, targets.flatten(), degree, cap)


def _log_probabilities(logits: torch.Tensor, degree: int) -> torch.Tensor:
    """Of fp32 logits [tokens, words]: what exceeds the log of the sum over all ranks' words."""
    shifted = logits - all_reduce(logits.amax(-1, keepdim=True), degree)
    total = all_reduce(shifted.exp().sum(-1, keepdim=True), degree)
    return shifted - total.log()


def _here(targets: torch.Tensor, words: int) -> torch.Tensor:
    """Targets as columns of this rank; those of other ranks stand at the first."""
    return targets.where(targets < words, 0)[:, None]


class _ParallelLoss(torch.autograd.Function):
    """Keeps the log-probabilities of this rank's words in fp32."""

    @staticmethod
    def forward(
        ctx: Context, logits: torch.Tensor, targets: torch.Tensor, degree: int
    ) -> torch.Tensor:
        found = _log_probabilities(logits, degree)
        ctx.save_for_backward(found, targets)
        picked = all_reduce(found.gather(-1, _here(targets, found.shape[1])), degree)
        return -picked.mean()

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found, targets = ctx.saved_tensors
        at_target = torch.zeros_like(found)
        at_target.scatter_(-1, _here(targets, found.shape[1]), -1.0)
        return (at_target + found.exp()) * (grad / len(targets)), None, None


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients of its inputs, each in the dtype of its input."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        degree: int,
        cap: float,
    ) -> torch.Tensor:
        tokens = len(targets)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        size = -(-tokens // CHUNKS)
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            logits = capped((hidden[part] @ weight.T).float(), cap)
            steepness = 1 - (logits / cap).square_() if cap else None
            found = _log_probabilities(logits, degree)
            del logits
            columns = _here(targets[part], found.shape[1])
            total -= all_reduce(found.gather(-1, columns), degree).sum()
            slope = found.exp_()
            slope.scatter_add_(-1, columns, torch.full_like(columns, -1, dtype=slope.dtype))
            if steepness is not None:
                slope *= steepness
            slope = slope.div_(tokens).to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            grad_weight += slope.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / tokens

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad), grad_weight.mul_(grad), None, None, None
