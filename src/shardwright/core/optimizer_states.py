"""What an optimizer may keep for a tensor: whole averages, factors, numbers, and codes of 8 bits.

Averages of 8 bits are those of Dettmers et al., 8-bit Optimizers via Block-wise Quantization: a
code per element, and for each block of elements the largest magnitude in it, its scale.
"""

# Element counts are given as functions of a tensor, not as one number, because what a rank holds
# is a piece of a tensor: a factor of rows depends on its shape, and whether a tensor is quantized
# on its size.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from shardwright.core.tensor import TensorSpec, element_bytes


class ShardStretch(TensorSpec, frozen=True):
    """A flat tensor that an optimizer is given: of large tensors alone, whose averages are
    ``quantized``, or of others. No rank has more than ``longest`` elements of it."""

    quantized: bool = False
    longest: int = 0


class Elements(NamedTuple):
    """Elements of tensors that train: those whose averages are whole, those that are quantized, and
    the blocks of these; numbers, or amounts that explain themselves."""

    whole: Any
    quantized: Any
    blocks: Any


def whole(tensor: TensorSpec) -> int | None:
    """As many elements as the tensor."""
    return tensor.numel


def single(tensor: TensorSpec) -> int | None:
    """One number for the tensor."""
    return 1


def rows(tensor: TensorSpec) -> int | None:
    """One number for each row of the last dimension; of vectors nothing."""
    return _factor(tensor, -1)


def columns(tensor: TensorSpec) -> int | None:
    """One number for each column of the last two dimensions; of vectors nothing."""
    return _factor(tensor, -2)


def vector(tensor: TensorSpec) -> int | None:
    """All elements of a vector or a scalar; of matrices nothing."""
    return tensor.numel if len(tensor.shape) < 2 else None


def _factor(tensor: TensorSpec, dim: int) -> int | None:
    if len(tensor.shape) < 2:
        return None
    return tensor.numel // tensor.shape[dim] if tensor.numel else 0


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One tensor of state; ``elements`` is None of a tensor that it is not kept for.

    Without a ``dtype`` it is the optimizer's. ``when`` is a setting that it is kept with. In the
    place "kernel" it is on the device where a fused kernel reads it, else on the host.
    """

    name: str
    elements: Callable[[TensorSpec], int | None] = whole
    dtype: str = ""
    when: str = ""
    place: Literal["device", "host", "kernel"] = "device"


COUNTER = OptimizerState("step", single, "fp32", place="kernel")  # an fp32 tensor per parameter

# torchao/optim/adam.py and bitsandbytes/optim/optimizer.py: tensors of fewer elements keep whole
# states. torchao keeps them as well where the blocks do not divide the tensor.
MIN_8BIT_ELEMENTS = 4096
BLOCK_ELEMENTS = 256  # early bitsandbytes: 2048
CODES = 256  # fp32 values; torchao has its own with every state
SCALE = "_scale"  # what the name of a block's scale ends with


def is_large(numel: int) -> bool:
    """Whether a tensor of ``numel`` elements is worth to be quantized."""
    return numel >= MIN_8BIT_ELEMENTS


def eight_bit(name: str, *, even: bool, otherwise: str, codes: bool) -> tuple[OptimizerState, ...]:
    """An average in one byte per element with an fp32 scale per block; ``otherwise`` is the dtype
    of a whole one, ``even`` says whether blocks have to divide the tensor."""

    def quantized(tensor: TensorSpec) -> bool:
        if isinstance(tensor, ShardStretch):
            return tensor.quantized
        return is_large(tensor.numel) and not (even and tensor.numel % BLOCK_ELEMENTS)

    def of(elements: Callable[[int], int], *, when: bool) -> Callable[[TensorSpec], int | None]:
        return lambda tensor: elements(tensor.numel) if quantized(tensor) is when else None

    found = (
        OptimizerState(name, of(lambda numel: numel, when=False), otherwise),
        OptimizerState(name, of(lambda numel: numel, when=True), "uint8"),
        OptimizerState(
            f"{name}{SCALE}", of(lambda numel: -(-numel // BLOCK_ELEMENTS), when=True), "fp32"
        ),
    )
    own = OptimizerState(f"{name}_codes", of(lambda _: CODES, when=True), "fp32")
    return (*found, own) if codes else found


# ---- the room of an update in blocks -------------------------------------------------------------

# What our AdamW in 8 bits takes. On a GPU it is as many kernels as torch has for it, which read and
# write 128 bytes of an fp32 element; a chunk of 18 launches is so long that these hide behind them.
# A core computes more than it moves: 12 to 16 times as long as for a fused AdamW, of 7 passes
# (2**22 elements, torch 2.13, 25 November 2026).
UPDATE_PASSES, HOST_UPDATE_PASSES = 32, 98

# Elements whose averages are fp32 at a time: as many as the caches of a core hold; on a device of
# its own so many that its kernels take longer than the host takes to launch them.
CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS = 2**16, 2**22
TAIL_ELEMENTS = 64  # kernels take so many at a time, whatever the width of their vectors


def room_of(tensors: Iterable[TensorSpec], block: int, *, on_gpu: bool) -> dict[str, int]:
    """Bytes of the buffers of an update, as long as the longest quantized tensor asks for: of a
    chunk the averages, of parameters that are cast to fp32 these and their gradients, what finds
    the codes, and scales; and what is left of a tensor after whole vectors."""
    cast, longest = False, 0
    for tensor in tensors:
        quantized, most = is_large(tensor.numel), tensor.numel
        if isinstance(tensor, ShardStretch):
            quantized, most = tensor.quantized, tensor.longest
        cast = cast or tensor.dtype != "fp32"
        if quantized or tensor.dtype != "fp32":
            longest = max(longest, most)
    size = element_bytes("fp32")
    elements = chunk_of(longest, block, on_gpu=on_gpu)
    averages = 2 + 2 * cast
    return {
        "averages": averages * elements * size,
        "indices": 2 * elements * element_bytes("int32"),
        "beyond": elements * element_bytes("bool"),
        "scales": -(-elements // block) * size,
        "tail": 4 * TAIL_ELEMENTS * size,
    }


def chunk_of(longest: int, block: int, *, on_gpu: bool) -> int:
    """Elements of a chunk: whole blocks."""
    most = DEVICE_CHUNK_ELEMENTS if on_gpu else CHUNK_ELEMENTS
    return min(max(most // block, 1), -(-longest // block)) * block
