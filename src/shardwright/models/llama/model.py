"""A Llama-style decoder, the whole of it or the part that one rank holds, and the cross entropy of
its next token: of all words, of one rank's words, or by chunks of tokens.
"""

# One class for the whole model and for what one rank of any mesh holds: a part that was written
# again for the estimate would drift from the model that runs. Names of parameters are Meta's, so a
# plan, a checkpoint and TorchTitan call a tensor alike. Modules that a rank does not have are not
# made.

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardwright.core.llama import (
    LlamaShape,
    LocalShape,
    check_local,
    check_shape,
    is_trained,
)
from shardwright.models.llama.attention import Attention, LatentAttention, Rotation, rotations
from shardwright.models.llama.experts import MixtureOfExperts
from shardwright.models.llama.layers import (
    TOKENS,
    Context,
    Device,
    Embedding,
    FeedForward,
    Linear,
    all_reduce,
    capped,
    dropped,
    enter,
    gather_alike,
    has_data,
    norm,
)
from shardwright.models.llama.megatron import (
    MegatronAttention,
    MegatronExperts,
    MegatronLatent,
    MegatronMLP,
    vocab_loss,
)
from shardwright.models.llama.products import columns
from shardwright.models.start import Started, generator_of

NOTHING = (".lora_b.weight", ".b1", ".b2", ".b3")  # begin as 0, as other biases
DEVIATION = 0.02  # of starting weights, as in GPT-2 and Llama
WHOLE = LocalShape()
FURTHER = 0.1  # of a loss of further tokens; Megatron-LM's default (--mtp-loss-scaling-factor)
CHUNKS = 8  # of tokens in a chunked loss; torchtune's default (num_output_chunks)


class LlamaBlock(nn.Module):
    """Attention, then an MLP or experts, each after a norm, perhaps before another one, and added
    to the stream."""

    def __init__(
        self,
        shape: LlamaShape,
        local: LocalShape,
        layer: int,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        attention: type[nn.Module] = MegatronAttention if local.megatron else Attention
        if shape.kv_lora_rank:
            attention = MegatronLatent if local.megatron else LatentAttention
        self.attention = attention(shape, local, device, dtype)
        if shape.is_moe(layer):
            experts = MegatronExperts if local.megatron else MixtureOfExperts
            self.moe = experts(shape, local, device, dtype)
        else:
            feed_forward = MegatronMLP if local.megatron else FeedForward
            self.feed_forward = feed_forward(shape, local, device, dtype)
        for name in ("attention_norm", "ffn_norm", "post_attention_norm", "post_ffn_norm"):
            has = shape.post_norms or not name.startswith("post")
            setattr(self, name, norm(shape, shape.dim, device, dtype) if has else None)
        self.dropout = shape.dropout or 0.0
        self.is_moe = shape.is_moe(layer)

    def forward(self, x: Tensor, cos: Rotation, sin: Rotation) -> Tensor:
        """This rank's part of the stream [B, T, D], cosines and sines [T, head_dim / 2]."""
        found = self.attention(self.attention_norm(x), cos, sin)
        if self.post_attention_norm is not None:
            found = self.post_attention_norm(found)
        x = x + dropped(self, found)
        found = (self.moe if self.is_moe else self.feed_forward)(self.ffn_norm(x))
        if self.post_ffn_norm is not None:
            found = self.post_ffn_norm(found)
        return x + dropped(self, found)


class FurtherBlock(LlamaBlock):
    """A block behind the last one, for one token more, as Megatron-LM has it
    (``core/transformer/multi_token_prediction.py``)."""

    def __init__(
        self,
        shape: LlamaShape,
        local: LocalShape,
        layer: int,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(shape, local, layer, device, dtype)
        self.local = local
        self.enorm, self.hnorm, self.norm = (
            norm(shape, shape.dim, device, dtype) for _ in range(3)
        )
        wide = shape.dim // local.tensor
        self.eh_proj = Linear(2 * shape.dim, wide, bias=False, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, cos: Rotation, sin: Rotation, following: Tensor | None = None
    ) -> Tensor:
        """This rank's part of the stream and of the embedding of the tokens that follow."""
        assert following is not None, "it is called with what follows"
        both = torch.cat((self.enorm(following), self.hnorm(x)), -1)
        (wide,) = columns(both, (self.eh_proj,), self.local)
        wide = gather_alike(wide, -1, self.local.tensor)
        # A part of what was gathered, which stays as long as it does.
        wide = wide.narrow(TOKENS, 0, x.shape[TOKENS])
        return self.norm(super().forward(wide, cos, sin))


class Llama(Started):
    """Embedding, blocks, norm, head; with a ``local`` shape only what one rank holds of them.

    Tokens [B, T] give logits [B, T, V]. T is this rank's sequence (the whole one over
    ``local.context``); a stage that is not the first takes its part of the stream instead, one that
    is not the last gives it. ``sequence`` is the longest T, for which positions are prepared.
    Blocks for further tokens are the last stage's, which then embeds tokens, too.
    Parameters have ``dtype`` and stay unset on the meta device and under fake tensors.
    """

    cos: Rotation
    sin: Rotation

    def __init__(
        self,
        shape: LlamaShape,
        local: LocalShape = WHOLE,
        *,
        sequence: int = 2048,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_shape(shape)
        check_local(shape, local)
        self.shape, self.local, self.seed = shape, local, seed
        self.embeds = local.first or bool(local.last and shape.further)
        if self.embeds:
            self.tok_embeddings = Embedding(shape, local, device, dtype)
        # By number and not as a list: a stage's first layer keeps the name that it has in the whole
        # model.
        self.layers = nn.ModuleDict(
            {
                str(layer): LlamaBlock(shape, local, layer, device, dtype)
                for layer in local.layer_range(shape)
            }
        )
        if local.last:
            self.norm = norm(shape, shape.dim, device, dtype)
            behind = range(shape.layers, shape.layers + shape.further)
            if behind:
                assert local.megatron, "other runtimes refuse them"
                blocks = (FurtherBlock(shape, local, layer, device, dtype) for layer in behind)
                self.mtp = nn.ModuleList(blocks)
            self.output = Linear(
                shape.dim, local.vocab(shape), bias=False, device=device, dtype=dtype
            )
        self._tie()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_trained(shape, name))
        self.sequence = sequence
        self.set_positions(device)
        # Not on the meta device and not under fake tensors, where a trace must not see anything
        # drawn.
        if all(has_data(parameter) for parameter in self.parameters()):
            self.reset_parameters()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens or a stream in, logits or a stream out. With blocks for further tokens ``targets``
        [B, T] too, and what logits are made of out: of every block, [(1 + blocks) B, T, D]."""
        if self.local.first:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if not self.local.last or targets is None:
            return self.head(x) if self.local.last else x
        streams = [self.norm(x)]
        for number, block in enumerate(self.mtp):
            following = self.tok_embeddings(targets.roll(-number, TOKENS))
            streams.append(block(streams[-1], self.cos, self.sin, following))
        return torch.cat(streams)

    def head(self, x: Tensor) -> Tensor:
        """The stream [B, T, D] -> logits [B, T, V]; of one rank's words where the loss is parallel,
        and none yet but what they are made of, [B, T, D], where it is chunked."""
        local = self.local
        if local.megatron and local.loss != "chunked":
            return self._logits(self.norm(x))
        x = enter(self.norm(x), local)
        if local.loss == "chunked":
            return x
        logits = capped(self.output(x), self.shape.logit_cap)
        if not local.own_words:
            logits = gather_alike(logits, -1, local.tensor)
        return logits.float() if local.fp32_logits else logits

    def loss(self, found: Tensor, targets: Tensor) -> Tensor:
        """The loss of what :meth:`forward` gave, by the kind of loss of the local shape. Logits in
        fp32 stay as long as it: steps name them, ``logits = model(tokens)``, until they return."""
        if self.local.loss == "chunked":
            cap = self.shape.logit_cap
            return chunked_loss(found, self.output.weight, targets, self.local.tensor, cap)
        if self.shape.further:
            return self._further_loss(found, targets)
        if not self.local.own_words:
            result = loss(found, targets)
        elif self.local.megatron:
            return vocab_loss(found, targets, self.local)
        else:
            result = parallel_loss(found, targets, self.local.tensor)
        if self.local.fp32_logits:
            # Held by the loss as a step's own name holds them: until the loss itself is gone.
            vars(result)["logits"] = found
        return result

    def _further_loss(self, found: Tensor, targets: Tensor) -> Tensor:
        """The loss, and so much of the mean of those of further tokens, which come first."""
        streams, blocks = found.chunk(1 + self.shape.further), self.shape.further
        losses = []
        for ahead in (*range(1, 1 + blocks), 0):
            logits, following = self._logits(streams[ahead]), targets.roll(-ahead, TOKENS)
            if self.local.own_words:
                losses.append(vocab_loss(logits, following, self.local, ahead))
            else:
                losses.append(loss(logits, following))
            del logits
        *further, own = losses
        return own + FURTHER / blocks * sum(further, own.new_zeros(()))

    def _logits(self, x: Tensor) -> Tensor:
        logits = columns(x, (self.output,), self.local, narrow=False)[0]
        return logits if self.local.own_words else gather_alike(logits, -1, self.local.tensor)

    def reset_parameters(self) -> None:
        """Starting values of parameters and positions, such as after ``to_empty``, which unties."""
        self._tie()
        super().reset_parameters()
        # Buffers too: after to_empty they are as unset as parameters.
        if self.cos is not None:
            self.set_positions(self.cos.device)

    def set_positions(self, device: Device) -> None:
        """Have the positions, which are buffers, on ``device``; parameters stay where they are."""
        cos = sin = None
        if not self.shape.positions:
            turned, theta = self.shape.turned_dim, self.shape.rope_theta
            cos, sin = rotations(self.sequence, turned, theta, device)
        # Not saved: they follow from sequence and theta, and a checkpoint of another length would
        # not load.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def store_frozen(self, dtype: torch.dtype) -> None:
        """Have what is frozen in ``dtype``: nothing is added to it that would need more."""
        for parameter in self.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)

    def _tie(self) -> None:
        # Between the first and the last stage of a pipeline nothing is tied: each has a copy of its
        # own.
        if self.shape.tied_embeddings and self.embeds and self.local.last:
            self.output.weight = self.tok_embeddings.weight

    def _start(self, fqn: str) -> Tensor:
        """Norms are 1, biases 0, weights normal; what is added to the stream is smaller."""
        shape = tuple(self.get_parameter(fqn).shape)
        if len(shape) == 1 or fqn.endswith(NOTHING):
            return torch.full(shape, 1.0 if fqn.endswith("norm.weight") else 0.0)
        deviation = DEVIATION
        if fqn.endswith(("attention.wo.weight", ".w2.weight", ".w2")):
            deviation /= math.sqrt(2 * self.shape.layers)
        return torch.empty(shape).normal_(0.0, deviation, generator=generator_of(self.seed, fqn))


# ---- losses --------------------------------------------------------------------------------------


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, computed in fp32: logits [B, T, V], targets [B, T] int64."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parallel_loss(logits: Tensor, targets: Tensor, degree: int) -> Tensor:
    """The same of logits [B, T, V / degree] that are never gathered.

    Per token a maximum, a sum and the target's logit go to the other ranks, as in torch's
    ``loss_parallel``, whose buffers these are. With ``degree`` 1 it computes the loss.
    """
    return _ParallelLoss.apply(logits.float().flatten(0, 1), targets.flatten(), degree)


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, degree: int = 1, cap: float = 0.0
) -> Tensor:
    """The loss of the logits ``hidden`` [B, T, D] times ``weight`` [V, D] transposed, a chunk of
    tokens at a time: their gradients are computed at once, so the logits need not be kept.

    It is what fused linear cross entropies keep: a gradient of each factor.
    """
    return _ChunkedLoss.apply(hidden.flatten(0, 1), weight, targets.flatten(), degree, cap)


def _log_probabilities(logits: Tensor, degree: int) -> Tensor:
    """Of fp32 logits [tokens, words]: what exceeds the log of the sum over all ranks' words."""
    shifted = logits - all_reduce(logits.amax(-1, keepdim=True), degree)
    total = all_reduce(shifted.exp().sum(-1, keepdim=True), degree)
    return shifted - total.log()


def _here(targets: Tensor, words: int) -> Tensor:
    """Targets as columns of this rank; those of other ranks stand at the first."""
    return targets.where(targets < words, 0)[:, None]


class _ParallelLoss(torch.autograd.Function):
    """Keeps the log-probabilities of this rank's words in fp32."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, targets: Tensor, degree: int) -> Tensor:
        found = _log_probabilities(logits, degree)
        ctx.save_for_backward(found, targets)
        picked = all_reduce(found.gather(-1, _here(targets, found.shape[1])), degree)
        return -picked.mean()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        found, targets = ctx.saved_tensors
        # A second tensor of the size of the logits, since torch's loss_parallel makes one.
        at_target = torch.zeros_like(found)
        at_target.scatter_(-1, _here(targets, found.shape[1]), -1.0)
        return (at_target + found.exp()) * (grad / len(targets)), None, None


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients of its inputs, each in the dtype of its input, but of a frozen weight."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        degree: int,
        cap: float,
    ) -> Tensor:
        tokens = len(targets)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        size = -(-tokens // CHUNKS)
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            logits = capped((hidden[part] @ weight.T).float(), cap)
            steepness = 1 - (logits / cap).square_() if cap else None
            found = _log_probabilities(logits, degree)
            # Gone before the slope is made, which takes the place of the log-probabilities.
            del logits
            columns = _here(targets[part], found.shape[1])
            total -= all_reduce(found.gather(-1, columns), degree).sum()
            # In place, for nothing is kept of a chunk: the gradient of its logits is softmax minus
            # one at the target.
            slope = found.exp_()
            slope.scatter_add_(-1, columns, torch.full_like(columns, -1, dtype=slope.dtype))
            if steepness is not None:
                slope *= steepness
            slope = slope.div_(tokens).to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / tokens

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad)
        return grad_hidden.mul_(grad), grad_weight, None, None, None
