"""Memory in large pages, whose addresses a CPU has at hand where rows are read at random."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

_PAGE = 2**21
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def use_large_pages(tensor: torch.Tensor) -> None:
    """Ask the system for large pages under a tensor that nothing was written to yet; one that has
    none, or no memory of its own, stays as it is."""
    if _ADVICE is None or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return
    start = tensor.data_ptr()
    first = -(-start // _PAGE) * _PAGE
    size = (start + tensor.nbytes - first) // _PAGE * _PAGE
    if size > 0:
        _system().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _ADVICE)


@cache
def _system() -> Any:
    return ctypes.CDLL(None)
