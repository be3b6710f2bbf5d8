"""The arguments of a small GPT, as Megatron-LM's command line names them."""

from __future__ import annotations

from typing import Any

GPT: dict[str, Any] = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "seq-length": 1024,
    "micro-batch-size": 4,
    "global-batch-size": 32,
    "bf16": True,
}
