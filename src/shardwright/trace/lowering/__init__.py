"""What the kernels of a device keep and take where the CPU's would be traced.

A model is traced on fake CPU tensors, because a torch without CUDA can make no others. Inside
``lowering("cuda")`` the functions whose CUDA kernels differ are replaced by operators that
allocate, save and free what those kernels do; everything else runs as it is.
"""

from shardwright.trace.lowering.kernels import unknown_operators
from shardwright.trace.lowering.lowered import lowering

__all__ = ["lowering", "unknown_operators"]
