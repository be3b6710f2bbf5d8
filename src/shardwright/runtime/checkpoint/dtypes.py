"""The dtypes that a checkpoint stores, and which may be read into which."""

from __future__ import annotations

import torch

from shardwright.core.errors import InputError, MismatchError, expected

# torch's name and safetensors' code
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CODES}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """torch's name of a dtype that can be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(expected(where, f"a dtype of {', '.join(DTYPES)}", name))
    return name


def dtype_of(name: str, where: str) -> torch.dtype:
    """The dtype that a manifest names."""
    if name not in DTYPES:
        raise InputError(expected(where, f"a dtype of {', '.join(DTYPES)}", f"'{name}'"))
    return DTYPES[name]


def check_readable(
    where: str, saved: torch.dtype, wanted: torch.dtype, allow_smaller: bool
) -> None:
    """Raise MismatchError unless ``wanted`` holds every value of ``saved``.

    A smaller floating-point dtype rounds and has to be asked for; an integer is never narrowed.
    """
    floating = saved.is_floating_point and wanted.is_floating_point
    if _is_exact(saved, wanted) or (floating and allow_smaller):
        return
    remedy = "Pass allow_smaller_dtype=True to round." if floating else ""
    raise MismatchError(
        expected(where, f"a dtype that holds every value of {_name(saved)}", _name(wanted), remedy)
    )


def _is_exact(saved: torch.dtype, wanted: torch.dtype) -> bool:
    if saved == wanted:
        return True
    if saved.is_floating_point and wanted.is_floating_point:
        small, large = torch.finfo(saved), torch.finfo(wanted)
        return (
            large.eps <= small.eps
            and large.max >= small.max
            and large.tiny * large.eps <= small.tiny * small.eps  # the smallest subnormal
        )
    if torch.bool in (saved, wanted) or saved.is_floating_point or wanted.is_floating_point:
        return False
    return (
        torch.iinfo(wanted).min <= torch.iinfo(saved).min
        and torch.iinfo(wanted).max >= torch.iinfo(saved).max
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
