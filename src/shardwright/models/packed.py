"""Rows of bytes: every row with a scale and an offset of its own, for inference.

An entry is read as scale * q + offset. ``int8`` has a byte for each entry, then scale and offset in
fp32; ``int4`` has two entries in a byte, the even one low, then both in fp16: as PyTorch's
``quantized.embedding_bag_*_rowwise_offsets`` and FBGEMM's kernels have them. No entry is further
than half a scale from what it was, but for the rounding of reading it in fp32; what a row has least
of and most of are the ends of its range.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import PACKED, packed_bytes

_MOST = {"int8": torch.finfo(torch.float32).max, "int4": torch.finfo(torch.float16).max}
_READ = {
    "int8": torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    "int4": torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
}


def packed(rows: torch.Tensor, kind: str, where: str) -> torch.Tensor:
    """Rows [N, D] of any floating dtype -> bytes [N, ``packed_bytes``]; InputError, naming
    ``where``, for what is not finite, or beyond fp16 in ``int4``."""
    count, dim = rows.shape
    found = rows.new_empty(count, packed_bytes(dim, kind), dtype=torch.uint8)
    if not count:
        return found
    exact = rows.double()
    least, most = exact.amin(1), exact.amax(1)
    if not bool((torch.maximum(most, -least) <= _MOST[kind]).all()):
        wanted = f"numbers up to {_MOST[kind]:.6g} for kind '{kind}'"
        worst = exact.abs().max().item()
        raise InputError(expected(where, wanted, f"{worst:.6g}"))
    steps, ends = 2 ** PACKED[kind].bits - 1, PACKED[kind].ends
    dtype = torch.float32 if kind == "int8" else torch.float16
    offset = _rounded(least, dtype, up=False)
    scale = _rounded((most - offset.double()) / steps, dtype, up=True)
    size = torch.where(scale > 0, scale, 1).double().unsqueeze(1)
    steps_of = ((exact - offset.double().unsqueeze(1)) / size).round_().clamp_(0, steps)
    values = steps_of.to(torch.uint8)
    if kind == "int4":
        values = functional.pad(values, (0, dim % 2)).view(count, -1, 2)
        values = values[:, :, 0] | values[:, :, 1] << 4
    found[:, :-ends] = values
    found[:, -ends:] = torch.stack([scale, offset], 1).view(torch.uint8)
    return found


def _rounded(values: torch.Tensor, dtype: torch.dtype, *, up: bool) -> torch.Tensor:
    """Doubles [N] as the nearest numbers of ``dtype`` that are not below them, or not above."""
    found = values.to(dtype)
    wrong = found.double() < values if up else found.double() > values
    if not bool(wrong.any()):
        return found
    bits = found.view(torch.int32 if dtype == torch.float32 else torch.int16)
    away = (found > 0) if up else (found < 0)  # the next number's bits are larger
    smallest = torch.ones_like(bits) if up else torch.ones_like(bits) | torch.iinfo(bits.dtype).min
    moved = torch.where(found == 0, smallest, torch.where(away, bits + 1, bits - 1))
    return torch.where(wrong, moved, bits).view(dtype)


def unpacked(rows: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """Bytes [..., B] -> rows [..., D] in fp32."""
    ends = PACKED[kind].ends
    values, tail = rows[..., :-ends], rows[..., -ends:].contiguous()
    if kind == "int4":
        values = torch.stack([values & 15, values >> 4], -1).flatten(-2)[..., :dim]
    scale, offset = tail.view(torch.float32 if kind == "int8" else torch.float16).float().unbind(-1)
    return torch.addcmul(offset.unsqueeze(-1), values.float(), scale.unsqueeze(-1))


def looked_up(rows: torch.Tensor, ids: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """Rows [..., D] in fp32 of ``ids`` [...], which are all there."""
    if ids.device.type != "cpu":
        return unpacked(rows[ids], kind, dim)
    flat = ids.reshape(-1)
    bags = torch.arange(len(flat) + 1)  # one id in each, which is read in one pass
    found = _READ[kind](rows, flat, bags, False, 0, False, None, None, include_last_offset=True)
    return found[:, :dim].view(*ids.shape, dim)
