"""Tensors by name, shape and dtype, without any data."""

# Our dtype names are short because users write them in jobs and read them in tables; torch's
# appear only where something is handed to torch or read from a checkpoint.

from __future__ import annotations

import math

import msgspec

from shardwright.core.errors import InputError, not_one_of

ELEMENT_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,  # e4m3fn
    "fp8_e5m2": 1,
    "complex128": 16,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
# As torch spells them.
TORCH_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def element_bytes(dtype: str, where: str = "dtype") -> int:
    """Bytes of one element of ``dtype``."""
    if dtype not in ELEMENT_BYTES:
        raise InputError(not_one_of(where, dtype, ELEMENT_BYTES))
    return ELEMENT_BYTES[dtype]


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter: fully qualified name, shape, dtype."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str = "fp32"

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * element_bytes(self.dtype)
