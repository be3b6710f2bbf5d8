"""What a Mamba-2 block keeps, by the fused path of its kernels.

Source: Megatron-LM d98e8a64 ``core/ssm/mamba_mixer.py`` and ``mamba_split_conv1d_scan_combined`` of
mamba-ssm, which keeps its whole input and its output and makes the rest again in the backward.
"""

from __future__ import annotations

from published.megatron.attention import FP32, hidden_dropout, linear_input, norm_kept
from published.megatron.description import Run
from published.megatron.kept import BlockMemory, Kept, size

CHUNK = 128
"""Tokens for which the scan keeps one state (``chunk_size`` of the mixer)."""


def mamba(run: Run, quantized: bool) -> BlockMemory:
    """A Mamba-2 block with its norm and the residual sum."""
    shape, width, tokens = run.shape, run.precision.parameter, run.tokens
    mixer = shape.mamba
    assert mixer is not None
    tensor = run.parallel.tensor
    inner = mixer.heads * mixer.head_dim // tensor
    groups = 2 * mixer.groups * mixer.state // tensor
    heads = mixer.heads // tensor
    projected = 2 * inner + groups + heads
    residual = size(run.sequence_tokens * shape.hidden, width)
    states = size(tokens // CHUNK * heads * mixer.head_dim * mixer.state, FP32)
    kept = (
        *norm_kept(run, run.sequence_tokens, shape.hidden, quantized, "input norm"),
        Kept("projection", size(tokens * projected, width)),
        Kept("output of the scan", size(tokens * inner, width)),
        Kept("norm of the output", size(tokens * inner, width)),
        Kept("input of the last projection", size(tokens * inner, linear_input(run, quantized))),
        *hidden_dropout(run, run.sequence_tokens),
    )
    extra = size(tokens * (projected + inner + groups), width) + 2 * states
    return BlockMemory(
        "mamba", residual, kept, extra, 2 * residual + extra + size(tokens * projected, width)
    )
