"""A module's tensors, and those that it is given, as tensors of a fake mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map


class FakeMode(FakeTensorMode):
    """Torch's mode, with what its kernels compute that its fake ones refuse: grouped products of
    experts in fp32 and fp16, which run on a CPU and on accelerators since torch 2.9."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = super().__torch_dispatch__
        if func is not _GROUPED or args[0].dtype not in (torch.float32, torch.float16):
            return run(func, types, args, kwargs)

        def bf16(mat: torch.Tensor) -> torch.Tensor:
            """As many bytes from row to row, which have to be a multiple of 16."""
            more = mat.element_size() // 2
            strides = [stride if stride == 1 else stride * more for stride in mat.stride()]
            how = {"dtype": torch.bfloat16, "device": mat.device}
            return run(_EMPTY, types, (mat.shape, strides), how)

        given = (bf16(args[0]), bf16(args[1]), *args[2:])
        asked = kwargs or {}
        found = run(func, types, given, {**asked, "out_dtype": None})
        return run(_MADE, types, (args[0], found.shape), {"dtype": asked.get("out_dtype")})


_GROUPED = torch.ops.aten._grouped_mm.default
_EMPTY = torch.ops.aten.empty_strided.default
_MADE = torch.ops.aten.new_empty.default


def settle(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
    """Every tensor of the module becomes one of the mode, on the CPU; parameters compute in
    ``dtype``, or where it is None in their own."""
    done: dict[int, torch.Tensor] = {}

    def once(tensor: Any, make: Callable[..., Any], *how: Any) -> Any:
        if id(tensor) not in done:
            done[id(tensor)] = make(tensor, mode, *how)
        return done[id(tensor)]

    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and once(parameter, _parameter, dtype) is not parameter:
                setattr(part, name, once(parameter, _parameter, dtype))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = once(buffer, faked)
        for name, value in list(vars(part).items()):
            if _has_strange(value, mode):
                vars(part)[name] = tree_map(lambda leaf: once(leaf, faked), value)


def _has_strange(value: Any, mode: FakeTensorMode) -> bool:
    if not isinstance(value, (torch.Tensor, list, tuple)):
        return False
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return any(not _is_ours(tensor, mode) for tensor in tensors)


def _parameter(
    parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype | None
) -> nn.Parameter:
    wanted = dtype if dtype and parameter.is_floating_point() else parameter.dtype
    own = _is_ours(parameter, mode)
    if own and parameter.dtype == wanted:
        return parameter
    cast = torch.empty_strided(parameter.shape, parameter.stride(), dtype=wanted, device="cpu")
    if own:
        parameter.data = cast
        return parameter
    fresh = nn.Parameter(cast, requires_grad=parameter.requires_grad)
    if not isinstance(parameter, FakeTensor):  # which keeps its mode among its attributes
        vars(fresh).update(vars(parameter))
    return fresh


def _is_ours(leaf: torch.Tensor, mode: FakeTensorMode) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.fake_mode is mode and leaf.device.type == "cpu"


def faked(leaf: Any, mode: FakeTensorMode) -> Any:
    """A tensor of the mode on the CPU, itself where it is one."""
    if not isinstance(leaf, torch.Tensor) or _is_ours(leaf, mode):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return made.requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else made


def likeness(module: nn.Module) -> nn.Module:
    """A copy of a module with tensors that have its tensors' shapes and no numbers."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        made = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    return copy.deepcopy(module, memo)
