"""A model of Hugging Face's ``transformers``, by its own code, from its ``config.json``. A function
for ``[model] python``, which needs ``transformers`` installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def build(
    batch: int, sequence: int, config: dict[str, Any]
) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """The class that ``config`` names first among its ``architectures``, on the tensors that it
    asks for: ids [batch, sequence], of both sides where it has a decoder, or images [batch,
    channels, size, size]. Parameters are fp32, as those of our models: what they are computed in is
    the job's to say. Its loss is the mean cross entropy of all its logits."""
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    its = kind.config_class.from_dict({**config, "use_cache": False})
    return kind(its).float(), _inputs(kind, its, (batch, sequence)), loss


def _inputs(kind: Any, its: Any, size: tuple[int, int]) -> dict[str, Tensor]:
    if kind.main_input_name == "pixel_values":
        return {"pixel_values": torch.zeros(size[0], its.num_channels, *2 * (its.image_size,))}
    names = ["input_ids", *(["decoder_input_ids"] if its.is_encoder_decoder else [])]
    return {name: torch.zeros(size, dtype=torch.int64) for name in names}


def loss(result: Any) -> Tensor:
    """Of every output [..., classes] whose name ends in ``logits``, in fp32; any target stands for
    the right one."""
    found = [value.flatten(0, -2).float() for name, value in result.items() if "logits" in name]
    each = [cross_entropy(logits, logits.new_zeros(len(logits)).long()) for logits in found]
    return torch.stack(each).sum()
