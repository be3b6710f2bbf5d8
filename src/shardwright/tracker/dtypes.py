"""torch's dtypes by the names of ``core/tensor.py``, and back."""

from __future__ import annotations

import torch

from shardwright.core.tensor import ELEMENT_BYTES, TORCH_NAMES

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, TORCH_NAMES.get(name, name)) for name in ELEMENT_BYTES
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
