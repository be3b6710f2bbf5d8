"""How Megatron-LM is set, free of torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class MegatronSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How Megatron-LM is set, as far as memory follows from it, by the names of its arguments.

    Attributes:
        attention_backend: of Transformer Engine: ``"fused"`` (cuDNN's, which it takes by itself on
            Hopper), ``"flash"``, ``"unfused"``; or ``"local"``, without it
        masked_softmax_fusion: one kernel for the softmax of attention that is not fused
        bias_activation_fusion: one kernel for gate and activation, or for bias and activation
        rms_norm_fusion: one kernel for an RMSNorm, not operators in fp32
        gradient_accumulation_fusion: products add gradients of weights to the buffer themselves
        cross_entropy_loss_fusion: ``"none"``, ``"native"``, ``"te"``
        parallel_output: of its GPTModel, which ``pretrain_gpt.py`` gives no other value: each
            tensor rank computes the loss of its own words; ``false``, as in other trainers of such
            layers: logits are gathered, and the loss is torch's
        create_attention_mask_in_dataloader: of all pairs of tokens, a byte each
        fp8_format, fp8_param_gather: ``"hybrid"``, ``"e4m3"``: products of Transformer Engine in 8
            bits, of copies of the weights that stay, by rows and by columns (as on Hopper); or of
            weights that are gathered so, and have no others
        deterministic_mode: sums of experts' rows keep them for their backward
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: the first
            stage, or the last, has a layer less
    """

    attention_backend: Literal["fused", "flash", "unfused", "local"] = "fused"
    masked_softmax_fusion: bool = True
    bias_activation_fusion: bool = True
    rms_norm_fusion: bool = True
    gradient_accumulation_fusion: bool = True
    cross_entropy_loss_fusion: Literal["none", "native", "te"] = "none"
    parallel_output: bool = True
    create_attention_mask_in_dataloader: bool = True
    fp8_format: Literal["none", "hybrid", "e4m3"] = "none"
    fp8_param_gather: bool = False
    deterministic_mode: bool = False
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    @property
    def ends(self) -> tuple[int, int]:
        """What embedding and head weigh, in layers, where layers are dealt out to stages."""
        embedding = int(self.account_for_embedding_in_pipeline_split)
        return embedding, int(self.account_for_loss_in_pipeline_split)
