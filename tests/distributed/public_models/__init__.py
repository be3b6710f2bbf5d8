"""Small models of public architectures, in the style of the libraries that people have them from.

Each says with ``units`` which of its modules are units, with ``batch`` what it is fed, and gives
its loss itself.
"""

from __future__ import annotations

from typing import Any

from . import others, text, vision

MODELS: dict[str, Any] = {
    **{m.__name__: m for m in (text.GPT2, text.Bert, text.Llama, text.T5, text.Mixtral)},
    **{m.__name__: m for m in (text.Mamba, text.LSTM)},
    **{m.__name__: m for m in (vision.ResNet, vision.ViT, vision.ConvNeXt, vision.Swin)},
    **{m.__name__: m for m in (vision.UNet, vision.VAE, vision.CLIP)},
    **{m.__name__: m for m in (others.Wav2Vec2, others.Transformer, others.GAT, others.DLRM)},
}
