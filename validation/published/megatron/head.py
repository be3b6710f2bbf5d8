"""The end of the model: final norm, output layer, loss, and the prediction layers before them.

Sources, Megatron-LM d98e8a64: ``core/tensor_parallel/cross_entropy.py`` (the logits are copied to
fp32 and become probabilities in place, which stay for the backward), ``core/fusions``,
``core/transformer/multi_token_prediction.py``, ``core/tensor_parallel/layers.py``.
"""

from __future__ import annotations

from published.megatron.attention import FP32, norm_kept
from published.megatron.description import Run
from published.megatron.kept import BlockMemory, Kept, size


def logits(run: Run) -> int:
    """Elements of the logits of a micro-batch on this rank."""
    return run.tokens * (run.shape.vocab // run.parallel.tensor)


def head(run: Run, depths: int) -> BlockMemory:
    """Final norm, output layer and loss, with the probabilities of ``depths`` predictions kept.

    In the backward the gradient leaves the loss in fp32 and is cast before the probabilities go;
    then come the gradients of the weight and of the input.
    """
    shape, width = run.shape, run.precision.parameter
    elements, residual = logits(run), size(run.sequence_tokens * shape.hidden, width)
    earlier = depths * size(elements, max(loss_width(run), width))
    peak = size(elements, width + loss_width(run) + loss_copy(run)) + earlier
    wide = size(run.tokens * shape.hidden, width)
    gradient = size(shape.vocab // run.parallel.tensor * shape.hidden, width)
    if run.kernels.fused_weight_gradient:
        gradient = 0
    if run.kernels.deferred_embedding:
        peak += (run.microbatches - 1) * (size(elements, width) + wide)
    forward = peak + attention_mask(run)
    backward = max(peak, earlier + size(elements, width) + gradient + 2 * wide)
    kept = norm_kept(run, run.sequence_tokens, shape.hidden, False, "final norm")
    return BlockMemory("head", residual, kept, forward, backward)


def loss_width(run: Run) -> int:
    """Bytes per logit that the loss keeps beside the logits: their fp32 copy. Logits in fp32 are
    overwritten, and so are those of Transformer Engine's loss."""
    if run.kernels.fused_loss == "te" or run.precision.compute == "fp32":
        return 0
    return FP32


def loss_copy(run: Run) -> int:
    """Bytes per logit of a further fp32 copy: the compiled native loss makes the probabilities,
    and their gradient, in fresh memory (said in ``core/fusions/fused_cross_entropy.py``)."""
    return FP32 if run.kernels.fused_loss == "native" else 0


def attention_mask(run: Run) -> int:
    """The mask that the data loader makes, alive while a micro-batch runs forward."""
    if not run.kernels.attention_mask:
        return 0
    return run.micro_batch * run.sequence * run.sequence // run.parallel.context


def embedding(run: Run) -> BlockMemory:
    """The embedding keeps its ids and the mask of its dropout; its output is the first input."""
    kept = [Kept("token ids", size(2 * run.tokens, 8))]
    if run.kernels.hidden_dropout:
        kept.append(Kept("embedding dropout mask", run.sequence_tokens * run.shape.hidden))
    extra = 2 * size(run.tokens * run.shape.hidden, run.precision.parameter)
    return BlockMemory("embedding", 0, tuple(kept), extra, extra)


def prediction_input(run: Run) -> BlockMemory:
    """What a prediction layer makes of the hidden state and the next token: two norms, their
    concatenation, and a projection back to one hidden size."""
    shape, width, local = run.shape, run.precision.parameter, run.sequence_tokens
    one = size(local * shape.hidden, width)
    kept = (
        Kept("embedded next tokens", one),
        Kept("concatenated norms", 2 * one),
        Kept("token ids", size(2 * run.tokens, 8)),
    )
    return BlockMemory("prediction", one, kept, 2 * one, 4 * one)
