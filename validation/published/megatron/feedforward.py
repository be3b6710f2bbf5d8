"""What feed-forward blocks keep: the dense one and the mixture of experts.

Sources, Megatron-LM d98e8a64: ``core/transformer/mlp.py``, ``core/fusions/fused_bias_*``,
``core/transformer/moe/{experts,router,token_dispatcher,shared_experts}.py``. Tokens are taken to
spread evenly over the experts.
"""

from __future__ import annotations

from published.megatron.attention import (
    FP32,
    hidden_dropout,
    linear_input,
    norm_kept,
)
from published.megatron.description import Experts, Run
from published.megatron.kept import BlockMemory, Kept, size

INDEX = 8
ROUTER_TENSORS = 3
"""fp32 values that the router keeps for each token and expert: logits, scores and the scaled
probabilities (``router.py``, ``moe_utils.py``)."""


def mlp(run: Run, quantized: bool) -> BlockMemory:
    """The dense feed-forward block with its norm and the residual sum."""
    shape, width = run.shape, run.precision.parameter
    inner = shape.ffn // run.parallel.tensor
    tokens, local = run.tokens, run.sequence_tokens
    residual = size(local * shape.hidden, width)
    gathered = size(tokens * shape.hidden, width)
    moving = size(tokens * inner * (3 if shape.gated else 2), width)
    kept = (
        *norm_kept(run, local, shape.hidden, quantized, "pre-mlp norm"),
        *_hidden_layer(run, tokens, inner, quantized, weighted=False, module="mlp"),
        *hidden_dropout(run, local),
    )
    return BlockMemory(
        "mlp",
        residual,
        kept,
        forward_extra=2 * gathered,
        backward_extra=2 * residual + moving + 2 * gathered,
    )


def _hidden_layer(
    run: Run, tokens: int, inner: int, quantized: bool, *, weighted: bool, module: str
) -> tuple[Kept, ...]:
    """What stands between two matrices: the input of the activation, what it keeps inside, and
    its output, which the second matrix takes. ``weighted``: each token times its probability."""
    shape, width = run.shape, run.precision.parameter
    kept = [
        Kept(
            "before the activation",
            size(tokens * inner * (2 if shape.gated else 1), width),
            module or "expert_fc1",
        )
    ]
    if not run.kernels.fused_activation:
        if shape.gated:
            kept.append(Kept("gate after its activation", size(tokens * inner, width), "moe_act"))
        if weighted:
            kept.append(Kept("before the weights", size(tokens * inner, width), "moe_act"))
    kept.append(
        Kept("activation", size(tokens * inner, linear_input(run, quantized)), module or "moe_act")
    )
    return tuple(kept)


def routed_tokens(run: Run, experts: Experts) -> int:
    """Tokens that the experts of a rank get where the routing is even."""
    everywhere = run.sequence_tokens * run.parallel.expert * run.parallel.expert_tensor
    if not run.parallel.sequence:
        everywhere = run.tokens * run.parallel.expert
    routed = everywhere * experts.topk // run.parallel.expert
    if experts.capacity is not None and experts.capacity > 0 and experts.padded:
        routed = int(routed * experts.capacity)
    return routed


def moe(run: Run, quantized: bool) -> BlockMemory:
    """A mixture of experts with its norm, router, exchanges, shared expert and residual sum."""
    shape, width = run.shape, run.precision.parameter
    experts = shape.experts
    assert experts is not None
    local, hidden = run.sequence_tokens, experts.latent or shape.hidden
    routed = routed_tokens(run, experts)
    inner = experts.width // run.parallel.expert_tensor
    residual = size(local * shape.hidden, width)
    kept = [
        *norm_kept(run, local, shape.hidden, False, "pre-mlp norm"),
        Kept("router", size(local * experts.count, ROUTER_TENSORS * FP32)),
        Kept(
            "tokens of the experts",
            size(routed * hidden, linear_input(run, quantized)),
            "expert_fc1",
        ),
        Kept("order of the tokens", size(routed, INDEX + FP32)),
        *_hidden_layer(run, routed, inner, quantized, weighted=True, module=""),
    ]
    if experts.latent:
        kept.append(Kept("tokens in the latent size", size(2 * local * hidden, width)))
    if experts.shared_width:
        kept += _hidden_layer(
            run,
            run.tokens,
            experts.shared_width // run.parallel.tensor,
            quantized,
            weighted=False,
            module="shared_experts",
        )
    kept += hidden_dropout(run, local)
    exchanged = exchange_bytes(run, experts, routed, hidden)
    moving = size(routed * inner * (3 if shape.gated else 2), width)
    return BlockMemory(
        "moe",
        residual,
        tuple(kept),
        forward_extra=exchanged,
        backward_extra=2 * residual + exchanged + moving,
    )


def exchange_bytes(run: Run, experts: Experts, routed: int, hidden: int) -> int:
    """Tokens on their way to the experts or back, in and out at once."""
    width = run.precision.parameter
    if experts.dispatcher == "allgather":
        everywhere = routed * run.parallel.expert // experts.topk
        back = FP32 if experts.fp32_router else width
        return size(everywhere * hidden, width + back) + size(routed * hidden, width)
    return size(2 * routed * hidden, width)


def expert_streams(run: Run) -> bool:
    """Whether a grouped matrix product runs the experts of this rank on several streams."""
    experts = run.shape.experts
    return experts is not None and experts.grouped
