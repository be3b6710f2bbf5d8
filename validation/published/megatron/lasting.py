"""What a rank has allocated beside its states: workspaces and buffers that stay, and what a fully
sharded runtime gathers."""

from __future__ import annotations

from collections import Counter

from published.megatron.attention import scores
from published.megatron.description import Run
from published.megatron.feedforward import expert_streams
from published.megatron.kept import size
from published.megatron.states import Part
from published.megatron.weights import Weight
from shardwright.core.footprint import Certainty

ENGINE_WORKSPACE = 4 * 2**20
ENGINE_WORKSPACE_HOPPER = 32 * 2**20 + 1024
"""Bytes of Transformer Engine's cuBLAS workspace (``get_cublas_workspace_size_bytes``)."""
ENGINE_STREAMS = 4
"""Streams, each with a workspace, of a grouped matrix product (``get_num_cublas_streams``)."""
OVERLAP_STREAMS = 3
"""Workspaces that overlapped tensor-parallel communication adds (``_NUM_MAX_UB_STREAMS``)."""
CUBLAS_HANDLES = 2
"""Threads that multiply matrices through torch: the forward's and the backward's."""
BOUNDARIES_PER_CHUNK = 2
BOUNDARIES = 1
"""Tensors between stages that stay after an interleaved step, 2 for each virtual stage and 1 more.
Fitted on the rows ``gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_\
overlap_optimizer`` (7 tensors of 4 MiB beside states and workspaces)."""


def lasting_parts(run: Run) -> list[Part]:
    """What stays allocated from the first step on, beside the states."""
    parts = [
        _buffer(
            "cuBLAS workspaces of torch",
            CUBLAS_HANDLES * run.cublas_workspace,
            "one for each thread that multiplies matrices",
        )
    ]
    one = ENGINE_WORKSPACE_HOPPER if run.device.hopper else ENGINE_WORKSPACE
    each = "one for each of the streams"
    if run.kernels.engine or run.shape.experts is not None:
        source = "get_cublas_workspace_size_bytes"
        parts.append(_buffer("cuBLAS workspace of Transformer Engine", one, source))
    if run.kernels.engine and expert_streams(run):
        name = "workspaces of grouped matrix products"
        parts.append(_buffer(name, ENGINE_STREAMS * one, each))
    if run.kernels.engine and run.kernels.user_buffers and run.parallel.tensor > 1:
        name = "workspaces of overlapped communication"
        parts.append(_buffer(name, OVERLAP_STREAMS * one, each))
    shared = _shared_buffer(run)
    if shared:
        source = "GlobalMemoryBuffer: gathered sequence, or scores of local attention"
        parts.append(_buffer("shared buffer of tensor parallelism", shared, source))
    if run.parallel.chunks > 1:
        count = BOUNDARIES_PER_CHUNK * run.parallel.chunks + BOUNDARIES
        tensor = size(run.sequence_tokens * run.shape.hidden, run.precision.parameter)
        source = "fitted, see BOUNDARIES"
        parts.append(_buffer("tensors between stages", count * tensor, source, "assumed"))
    return parts


def _buffer(name: str, nbytes: int, source: str, certainty: Certainty = "modelled") -> Part:
    return Part(name, "buffer", nbytes, certainty, source)


def _shared_buffer(run: Run) -> int:
    width = run.precision.parameter
    gathered = size(run.tokens * run.shape.hidden, width) if run.parallel.sequence else 0
    local = size(scores(run), width) if run.kernels.attention == "local" else 0
    return max(gathered, local)


def gathered_part(run: Run, weights: tuple[Weight, ...]) -> Part:
    """Whole parameters and gradients of two layers and of what stands outside the layers, where
    a fully sharded runtime cuts them."""
    layers: Counter[str] = Counter()
    root = 0
    for weight in weights:
        if weight.name.startswith("layers."):
            layers[".".join(weight.name.split(".")[:2])] += weight.elements
        else:
            root += weight.elements
    pair = 2 * max(layers.values(), default=0) + root
    each = 0
    if run.optimizer.fsdp == "optim_grads_params":
        each += run.precision.parameter
    if run.optimizer.fsdp in ("optim_grads", "optim_grads_params"):
        each += run.precision.gradient
    return Part(
        "gathered parameters and gradients",
        "gathered_weight",
        pair * each,
        "assumed",
        "two layers and the parameters outside the layers",
        stays=False,
    )
