"""What torch.compile keeps of a block, and takes while it runs.

The block goes through AOTAutograd with Inductor's decompositions and its partitioner, which decides
what backward computes again; no code is generated. In a trace the block then takes what a compiled
one would: results of products, attention and reductions, and what those read. What lies between is
fused into kernels and never stored.
"""

# Why no compiler runs: Inductor's code decides which buffers exist, but takes seconds a block and
# a device. What is kept for the backward is decided before that, by the partitioner, which runs
# on fake tensors; what exists within a pass is what products, attention and reductions write, for
# all that is between them is fused into their kernels. A block that cannot be traced is taken as it
# is without compile, about 7 % of the peak too much: 82.4 GiB became 77.0 for Llama 3.1 8B, FSDP on
# 8 H100, batch 2, sequence 8192, selective checkpointing by operator (pytorch/torchtitan
# benchmarks/llama3_h100_202412_torchtitan.md, table 1). A trace of these blocks alone gives 4.8 GiB
# of the 5.4; the loss was compiled too.

from __future__ import annotations

import gc
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._guards import detect_fake_mode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.work import Work
from shardwright.trace.checkpointing import Applied, Policy, policy
from shardwright.trace.lowering.kernels import Kernels
from shardwright.trace.lowering.lowered import Lowering, alone
from shardwright.trace.work import Fused, Held, tell


@dataclass
class Compiled(Applied):
    """Compiled blocks. ``notes`` names those that could not be traced, which run as they are, and
    ``operators`` what the graphs consist of."""

    notes: list[str] = field(default_factory=list)
    operators: set[str] = field(default_factory=set)


def apply_compile(
    blocks: Sequence[nn.Module],
    checkpointing: str | Policy = "none",
    kernels: Kernels | None = None,
) -> Compiled:
    """Compile blocks in place, each with the checkpointing of its place; ``apply_checkpointing`` is
    not called for them. A block is traced at its first forward under a fake mode, blocks of one
    structure with inputs of one shape once."""
    chosen = policy(checkpointing) if isinstance(checkpointing, str) else checkpointing
    if chosen.kind == "core_attention":
        raise UnsupportedError(
            expected(
                "memory.checkpointing",
                "a policy by operator or block for compiled blocks",
                f"'{chosen.name}'",
                "Use none, full, selective, layers:N, first:N or save:OPERATOR.",
            )
        )
    result = Compiled()
    cache: dict[Any, _Graphs | None] = {}
    for place, block in enumerate(blocks):
        if "forward" in vars(block):
            raise InputError(
                type(block).__name__,
                "a block as it was written",
                "one whose forward was exchanged",
                "Let apply_compile do the checkpointing.",
            )
        here = chosen if chosen.kind != "none" and chosen.turn(place) == 0 else None
        run = _Block(block, here, kernels or Kernels(), cache, result)
        result.exchange(block, run)
    return result


@dataclass(slots=True)
class _Graphs:
    """A block's forward and backward; ``tree`` is the structure of what it returns and ``through``
    says which of it gradients come back through."""

    forward: Fused
    backward: Fused
    through: list[bool]
    tree: Any


class _Block:
    """A block's forward in place of its own."""

    def __init__(
        self,
        block: nn.Module,
        chosen: Policy | None,
        kernels: Kernels,
        cache: dict[Any, _Graphs | None],
        result: Compiled,
    ) -> None:
        self.block, self.original = block, block.forward
        self.chosen, self.kernels, self.cache, self.result = chosen, kernels, cache, result

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        state = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        leaves, tree = tree_flatten((arguments, keywords))
        tensors = [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return self.original(*arguments, **keywords)
        # Layers of one structure share their graphs: AOTAutograd takes far longer than a forward of
        # the block, and a model has dozens alike.
        key = (_structure(self.block), self.chosen, str(tree), *map(_shape, tensors))
        if key not in self.cache:
            self.cache[key] = self._trace(state, leaves, tree)
            gc.collect()  # what tracing leaves in cycles must not go while a step is recorded
        graphs = self.cache[key]
        if graphs is None:
            return self.original(*arguments, **keywords)
        outputs = _CompiledRun.apply(graphs, *tensors)
        return tree_unflatten(list(outputs), graphs.tree)

    def _trace(self, state: dict[str, Tensor], leaves: list[Any], tree: Any) -> _Graphs | None:
        try:
            return _graphs(self, state, leaves, tree)
        except Exception as error:  # AOTAutograd fails in as many ways as models are written
            reason = str(error).strip().partition("\n")[0]
            self.result.notes.append(
                f"{type(self.block).__name__} could not be traced for torch.compile and is counted"
                f" without it ({type(error).__name__}: {reason})"
            )
            return None


def _structure(block: nn.Module) -> tuple[Any, ...]:
    """Its modules, and which of them run as something else, in fp8 for example."""
    changed = (name for name, module in block.named_modules() if "forward" in vars(module))
    return repr(block), *changed


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _graphs(run: _Block, state: dict[str, Tensor], leaves: list[Any], tree: Any) -> _Graphs:
    names, places = list(state), [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    found: dict[str, Any] = {}

    def call(*tensors: Tensor) -> Any:
        values = list(leaves)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            values[place] = tensor
        arguments, keywords = tree_unflatten(values, tree)
        with _reparametrize_module(run.block, dict(zip(names, tensors, strict=False))):
            result = run.original(*arguments, **keywords)
        outputs, found["tree"] = tree_flatten(result)
        found["through"] = [isinstance(o, Tensor) and o.requires_grad for o in outputs]
        return outputs

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if run.chosen is not None:
            _tag(joint, run.chosen, options["num_fwd_outputs"])
        # dynamo marks parameters and buffers: they are there anyway, so that keeping one is free
        free = {**options, "static_lifetime_input_indices": list(range(len(names)))}
        found["graphs"] = _partition(joint, inputs, free)
        return found["graphs"]

    tensors = [*state.values(), *(leaves[place] for place in places)]
    with ExitStack() as stack:
        stack.enter_context(alone())
        mode = detect_fake_mode(tensors)
        if mode is not None:
            stack.enter_context(mode)
        # graphs keep what they were traced with, which is not to be what a step made
        fresh = [torch.empty_like(t).requires_grad_(t.requires_grad) for t in tensors]
        # a compiler takes the norm apart, and fuses it better than its kernel
        here = Kernels(run.kernels.device, run.kernels.attention, "composite", "composite")
        stack.enter_context(Lowering(here, inner=False))
        aot_function(
            call, _nothing, _nothing, partition_fn=partition, decompositions=_decompositions()
        )(*fresh)
    forward, backward = found["graphs"]
    inner = run.kernels.device == "cuda"
    graphs = _Graphs(Fused(forward, inner), Fused(backward, inner), found["through"], found["tree"])
    kept = [node.name for node in graphs.forward.outputs[len(graphs.through) :]]
    taken = [node.name for node in graphs.backward.inputs[: len(kept)]]
    if kept != taken or len(graphs.backward.inputs) != len(kept) + sum(graphs.through):
        raise UnsupportedError("what forward keeps is not what backward begins with")
    run.result.operators |= graphs.forward.operators | graphs.backward.operators
    return graphs


def _partition(joint: fx.GraphModule, inputs: Any, options: dict[str, Any]) -> Any:
    """torch's partition, but that a random operator that is computed again does not have its
    generator's state carried along: a few bytes, and operators that a trace cannot run. Inductor
    takes out before what does nothing, so that a result and its alias are not kept both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch uses what it deprecates
        from torch._inductor.fx_passes.post_grad import remove_noop_ops  # a second to import

    remove_noop_ops(joint.graph)
    asked = partitioners.has_recomputable_rng_ops
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    try:
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)
    finally:
        partitioners.has_recomputable_rng_ops = asked


def _nothing(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """A compiler that leaves a graph as it is."""
    return gm


def _decompositions() -> dict[Any, Any]:
    from torch._inductor.decomposition import select_decomp_table  # a second to import

    return dict(select_decomp_table())


def _tag(joint: fx.GraphModule, chosen: Policy, outputs: int) -> None:
    """Say of every operator of the forward whether it is kept, as checkpointing inside a compiled
    region does."""
    keep = chosen.keeps()
    backward = {
        node
        for node in joint.graph.nodes
        if node.op == "placeholder" and node.name.startswith("tangents")
    }
    results = next(node for node in joint.graph.nodes if node.op == "output").args[0][:outputs]
    forward, ahead = set(), [node for node in results if isinstance(node, fx.Node)]
    # Only what results are made of belongs to the forward: the joint graph also has operators that
    # serve the backward alone.
    while ahead:
        node = ahead.pop()
        if node not in forward:
            forward.add(node)
            ahead.extend(node.all_input_nodes)
    for node in joint.graph.nodes:
        if backward.intersection(node.all_input_nodes):
            backward.add(node)
        if node.op != "call_function" or node in backward or node not in forward:
            continue
        node.meta["ac_graph_id"] = 0
        schema = getattr(node.target, "_schema", None)
        kept = schema is not None and keep(schema.name)
        source = node.args[0] if node.target is operator.getitem else None
        # A part of a tuple is no result of its own: kept or not as what it is taken from.
        if source is not None:
            node.meta["recompute"] = source.meta["recompute"]
        else:
            node.meta["recompute"] = (
                CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
            )


class _CompiledRun(torch.autograd.Function):
    """A compiled block in a trace: takes and frees what its graphs do."""

    @staticmethod
    def forward(context: Any, graphs: _Graphs, *tensors: Tensor) -> Any:
        inputs: list[Held] = list(tensors)
        produced = graphs.forward.run(inputs)
        context.graphs, count = graphs, len(graphs.through)
        outputs, kept = produced[:count], produced[count:]
        context.save_for_backward(*kept)
        pairs = zip(outputs, graphs.through, strict=True)
        context.mark_non_differentiable(
            *(o for o, through in pairs if isinstance(o, Tensor) and not through)
        )
        return tuple(outputs)

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        through = zip(grads, context.graphs.through, strict=True)
        inputs: list[Held] = [*context.saved_tensors, *(grad for grad, yes in through if yes)]
        clear = getattr(context, "maybe_clear_saved_tensors", None)
        if clear is not None:  # as AOTAutograd's own function frees what it has used
            clear()
        del grads, through
        return (None, *context.graphs.backward.run(inputs))


STATISTICS = 2  # of a compiled loss: numbers in fp32 per token


class _CompiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        statistics = logits.new_empty((STATISTICS, targets.numel()), dtype=torch.float32)
        context.save_for_backward(logits, statistics)
        tell(logits, Work(1, 0, logits.numel() * logits.element_size()))
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        logits, _ = context.saved_tensors
        tell(logits, Work(1, 0, 2 * logits.numel() * logits.element_size()))
        return torch.empty_like(logits), None


def compiled_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy as a compiled kernel: no fp32 logits, only their statistics.

    TorchTitan compiles its loss beside the blocks: the cast to fp32, the maximum, the sum and the
    target's logit are fused, so the logits are kept as the head made them, with a maximum and a sum
    in fp32 for each token, and the backward makes their gradient in their own dtype in one go. This
    stand-in takes and keeps as much and computes nothing. ``logits`` [B, T, V] in any dtype,
    ``targets`` [B, T].
    """
    return _CompiledLoss.apply(logits, targets)
