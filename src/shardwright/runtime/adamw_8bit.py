"""AdamW whose averages are codes of 8 bits, over whole, sharded or flat parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.optimizer_states import (
    BLOCK_ELEMENTS,
    CODES,
    SCALE,
    TAIL_ELEMENTS,
    chunk_of,
    is_large,
)
from shardwright.runtime.checkpoint.region import as_range
from shardwright.runtime.flat_tensors import FlatTensor, flat_tensor_of
from shardwright.runtime.optimizer_dict import RANGES
from shardwright.runtime.torch_private import fused_adamw, local_of
from shardwright.runtime.units.shard_tensor import ShardTensor

AVERAGES = ("exp_avg", "exp_avg_sq")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN: Any = {"requires_grad": False, "memory_format": torch.contiguous_format}
DECADES = 7  # of a dynamic code: from 1e-7 to 1

State = dict[str, Any]


class AdamW8bit(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with both averages in 8 bits, as bitsandbytes and torchao have it.

    An average is a code per element and a scale per block, the largest magnitude of ``block_size``
    elements: 2.03 bytes of state for an element in place of 8. Codes are dynamic: as many for each
    decade below the scale as for all decades below that, with a sign for the first average. Of
    parameters of fewer than 4,096 elements averages are whole, in fp32.

    Blocks are counted from a parameter's first element, and no rank has a part of one: states and
    weights are those of one process bit for bit where gradients are, and nothing travels in a step.
    Parameters are whole ones, those of a sharded model, or ``optimizer_parameters`` of one, sharded
    with ``block_size`` for flat cuts. A step has fp32 averages of 65,536 elements at a time, on an
    accelerator of 4,194,304.

    InputError where a cut divides a block, UnsupportedError for DTensors of others.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = BLOCK_ELEMENTS,
    ) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise InputError("block_size", "1 or more elements", repr(block_size))
        self._forms: dict[nn.Parameter, Form] = {}
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "block_size": block_size})

    def __setstate__(self, state: State) -> None:
        super().__setstate__(state)
        self._forms = {}

    @property
    def block(self) -> int:
        """Elements that are quantized together."""
        return self.defaults["block_size"]

    @property
    def blocks(self) -> dict[str, int]:
        """States that have one number for so many elements of a parameter."""
        return {f"{name}{SCALE}": self.block for name in AVERAGES}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those that cannot be quantized are refused here, on every rank."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for key in ("lr", "eps", "weight_decay", "betas"):
            _check_range(key, group[key])
        if group["block_size"] != self.block:
            wanted = f"{self.block}, as for all groups"
            raise InputError("block_size of a group", wanted, repr(group["block_size"]))
        for parameter in group["params"]:
            self._form(parameter)

    def initial_state(self, parameter: nn.Parameter) -> State:
        """The state before a first step: averages of zero, padding's among them, which stays so."""
        local = local_of(parameter)
        quantized = self._form(parameter).quantized
        dtype = torch.uint8 if quantized else torch.float32
        state: State = {"step": torch.zeros((), dtype=torch.float32, device=local.device)}
        for name in AVERAGES:
            state[name] = torch.zeros_like(parameter, dtype=dtype, **_PLAIN)
            if quantized:
                local_of(state[name]).fill_(ZERO[name])
                count = -(-local.numel() // self.block)
                scales = torch.zeros(count, dtype=torch.float32, device=local.device)
                state[f"{name}{SCALE}"] = scales
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; no rank waits for another."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rooms = self._rooms()
        for group, parameter in self._learning():
            state = self.state[parameter]
            if not state:
                state.update(self.initial_state(parameter))
            state["step"] += 1
            local = local_of(parameter)
            if local.numel():
                rooms[local.device].update(local, local_of(parameter.grad), state, group)
            increment_version(local)  # a fused kernel does not: units are gathered once written
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; torch would make codes numbers of the parameter's
        dtype."""
        super().load_state_dict(state_dict)
        saved, groups = state_dict["state"], state_dict["param_groups"]
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        keys = chain.from_iterable(group["params"] for group in groups)
        for key, parameter in zip(keys, own, strict=True):
            for name, value in saved.get(key, {}).items():
                device = local_of(parameter).device
                self.state[parameter][name] = value.detach().to(device, copy=True)

    def _learning(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.is_sparse:
                        raise UnsupportedError("AdamW8bit", "dense gradients", "a sparse one")
                    yield group, parameter

    def _rooms(self) -> dict[torch.device, _Room]:
        """Buffers for a step, on every device that has parameters."""
        found: dict[torch.device, list[nn.Parameter]] = {}
        for _, parameter in self._learning():
            found.setdefault(local_of(parameter).device, []).append(parameter)
        return {
            device: _Room(
                device,
                self.block,
                max(self._form(p).longest * self._form(p).in_chunks for p in its),
                cast=any(p.dtype != torch.float32 for p in its),
                on_gpu=device.type != "cpu",
            )
            for device, its in found.items()
        }

    def _form(self, parameter: nn.Parameter) -> Form:
        found = self._forms.get(parameter)
        if found is None:
            found = self._forms[parameter] = Form.of(parameter, self.block)
        return found


def _check_range(key: str, value: Any) -> None:
    least, below = RANGES[key]
    for number in value if isinstance(value, tuple | list) else (value,):
        if not least <= float(number) < below:
            wanted = f"numbers from {least:g} to {below:g}"
            raise InputError(f"{key} of AdamW8bit", wanted, repr(value))


# ---- how a parameter lies ------------------------------------------------------------------------


class Form(NamedTuple):
    """Whether averages of a parameter are quantized, its elements on the rank that has most, and
    whether it is updated in chunks."""

    quantized: bool
    longest: int
    in_chunks: bool

    @classmethod
    def of(cls, parameter: nn.Parameter, block: int) -> Form:
        """That of a whole, sharded or flat parameter; refuses what divides blocks."""
        if parameter.dtype not in DTYPES:
            wanted = "parameters of fp32, bf16 or fp16"
            raise UnsupportedError("AdamW8bit", wanted, str(parameter.dtype))
        flat = flat_tensor_of(parameter)
        if flat is not None:
            quantized = _check_flat(flat, block)
            lengths = [flat.parameter.numel()]
            if flat.cut is not None:
                ranks = range(flat.cut.comm.size)
                lengths = [flat.cut.region_of(rank)[1][0] for rank in ranks]
        elif isinstance(parameter, ShardTensor):
            quantized = is_large(parameter.numel())
            lengths = _check_cut(parameter, block if quantized else 1)
        elif isinstance(parameter, DTensor):
            wanted = "whole parameters, or those of fully_shard_flat"
            remedy = f"Shard with fully_shard_flat(..., block_size={block}), or use torchao's."
            raise UnsupportedError("AdamW8bit", wanted, "a DTensor of another runtime", remedy)
        else:
            quantized, lengths = is_large(parameter.numel()), [parameter.numel()]
        in_chunks = quantized or parameter.dtype != torch.float32
        return cls(quantized, max(lengths), in_chunks)


def _check_flat(flat: FlatTensor, block: int) -> bool:
    """Whether a flat tensor is of large parameters, which are cut between blocks."""
    if flat.block > 1 and flat.block % block == 0:
        return True
    for home in flat.homes:
        shape = home.sizes if home.cut is None else home.cut.shape
        if is_large(shape.numel()):
            found = f"multiples of {flat.block}" if flat.block > 1 else "cuts anywhere"
            raise _divided(home.where, block, found)
    return False


def _check_cut(parameter: ShardTensor, block: int) -> list[int]:
    """Elements of every rank, which are whole blocks of the parameter."""
    cut, lengths = parameter.cut, []
    for rank in range(cut.comm.size):
        offsets, sizes = cut.region_of(rank)
        found = as_range(tuple(cut.shape), offsets, sizes)
        begin, end = found or (0, 0)
        if block > 1 and (
            found is None or begin % block or (end % block and end != cut.shape.numel())
        ):
            shown = f"elements {begin} to {end}" if found else f"a part {sizes} from {offsets}"
            shown += f" of {tuple(cut.shape)} on rank {cut.comm.global_rank(rank)}"
            raise _divided(cut.fqn, block, shown, joint=cut.is_joint)
        lengths.append(torch.Size(sizes).numel())
    return lengths


def _divided(where: str, block: int, found: str, *, joint: bool = False) -> InputError:
    wanted = f"cuts between blocks of {block} elements, which AdamW8bit quantizes together"
    remedy = f"Shard with fully_shard_flat(..., block_size={block})."
    if joint:
        remedy = "Tensor parallelism cut it before: give it to another optimizer, such as AdamW."
    return InputError(where, wanted, found, remedy)


# ---- the step ------------------------------------------------------------------------------------


def dynamic_code(*, signed: bool) -> list[float]:
    """The 256 numbers of a dynamic code from the smallest on: zero, one, and in every decade below
    one twice as many, evenly spaced, as in the next lower one."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        for place in range(count):
            value = (0.1 + 0.9 * (place + 0.5) / count) * 10.0 ** (decade - DECADES + 1)
            found += [value, -value] if signed else [value]
    assert len(found) == CODES
    return sorted(found)


class _Codes(NamedTuple):
    """A code's ``values`` in order, and how to find the nearest one: by the ``edges`` between them;
    or, much faster on a core, numbers with the same sign, exponent and 7 bits of a mantissa are a
    cell, in which at most one of these lies. Of every cell this is the code of its least number,
    and the edge, infinite where there is none. Cells go from ``LEAST`` to 1, after them those of
    negative numbers."""

    values: torch.Tensor
    edges: torch.Tensor
    codes: torch.Tensor
    middles: torch.Tensor


ZERO = {name: dynamic_code(signed=name == AVERAGES[0]).index(0.0) for name in AVERAGES}
CELL_BITS = 16  # of an fp32 number, which a cell leaves open
LEAST = (127 - 23) << 7  # the cell from 2^-23 on; what is less is as near to zero
MOST = 127 << 7  # that of 1
CELLS = MOST - LEAST + 1


@cache
def codes_of(name: str, device: torch.device) -> _Codes:
    """The codes of an average: with a sign for the first one."""
    signed = name == AVERAGES[0]
    values = torch.tensor(dynamic_code(signed=signed), dtype=torch.float64)
    middles = ((values[1:] + values[:-1]) / 2).float()
    first = torch.arange(LEAST, MOST + 1, dtype=torch.int32) << CELL_BITS
    last = first + (1 << CELL_BITS) - 1
    last[-1] = first[-1]  # nothing is beyond 1
    ends = torch.stack((first, last)).view(torch.float32)
    if signed:
        ends = torch.cat((ends, -ends.flip(0)), 1)
    low, high = torch.bucketize(ends, middles, right=True)
    assert (high - low).max() <= 1
    beyond = torch.tensor(torch.inf)
    found = torch.where(high > low, middles[low.clamp(max=len(middles) - 1)], beyond)
    tables = (values.float(), middles, low.to(torch.uint8), found)
    return _Codes(*(table.to(device) for table in tables))


class _Room:
    """The buffers of a step, and what is done in them: a chunk of averages at a time."""

    def __init__(
        self, device: torch.device, block: int, longest: int, *, cast: bool, on_gpu: bool
    ) -> None:
        self.block, self.on_gpu = block, on_gpu
        self.size = chunk_of(longest, block, on_gpu=on_gpu)
        floats = {"dtype": torch.float32, "device": device}
        self.averages = torch.empty((4 if cast else 2, self.size), **floats)
        self.indices = torch.empty((2, self.size), dtype=torch.int32, device=device)
        self.beyond = torch.empty(self.size, dtype=torch.bool, device=device)
        self.scales = torch.empty(self.size // block, **floats)
        self.tail = torch.empty((4, TAIL_ELEMENTS), **floats)
        self.codes = [codes_of(name, device) for name in AVERAGES]

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Mapping[str, Any]
    ) -> None:
        """Update a rank's part of a parameter, and its averages."""
        values, gradients = weight.reshape(-1), gradient.reshape(-1)
        averages = [local_of(state[name]).view(-1) for name in AVERAGES]
        quantized = averages[0].dtype == torch.uint8
        numel = values.numel()
        chunk = self.size if quantized or values.dtype != torch.float32 else numel
        for begin in range(0, numel, chunk):
            part = slice(begin, min(begin + chunk, numel))
            own = [average[part] for average in averages]
            work = own
            if quantized:
                work = [self._read(place, own[place], state, begin) for place in (0, 1)]
            self._learn(values[part], gradients[part], work, state["step"], group)
            if quantized:
                for place in (0, 1):
                    self._write(place, own[place], state, begin)
        if values.data_ptr() != weight.data_ptr():  # of a weight that is not contiguous
            weight.copy_(values.view(weight.shape))

    def _learn(
        self,
        values: torch.Tensor,
        gradients: torch.Tensor,
        averages: list[torch.Tensor],
        step: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        """AdamW's update in fp32, in whole vectors: what is left of a tensor after them is in a
        vector with zeros, so that no element is computed otherwise for where its tensor ends."""
        numel, dtype = values.numel(), values.dtype
        kept = values
        if dtype != torch.float32:
            values = self.averages[2][:numel].copy_(values)
            gradients = self.averages[3][:numel].copy_(gradients)
        elif gradients.dtype != torch.float32:
            gradients = gradients.float()
        every = (values, gradients, *averages)
        rest = numel % TAIL_ELEMENTS
        if numel > rest:
            fused_adamw(*(tensor[: numel - rest] for tensor in every), step, group)
        if rest:
            self.tail.zero_()
            ends = [tensor[numel - rest :] for tensor in every]
            for row, end in zip(self.tail, ends, strict=True):
                row[:rest].copy_(end)
            fused_adamw(*self.tail, step, group)
            for row, end in zip(self.tail, ends, strict=True):
                end.copy_(row[:rest])
        if dtype != torch.float32:
            kept.copy_(values)

    def _read(self, place: int, codes: torch.Tensor, state: State, begin: int) -> torch.Tensor:
        """An average in fp32; what is missing of its last block is zero."""
        numel, (blocks, scales) = codes.numel(), self._blocks(place, codes, state, begin)
        found = self.averages[place]
        index = self.indices[0, :numel].copy_(codes)
        torch.index_select(self.codes[place].values, 0, index, out=found[:numel])
        found[numel : blocks.numel()].zero_()
        blocks.mul_(scales[:, None])
        return found[:numel]

    def _write(self, place: int, codes: torch.Tensor, state: State, begin: int) -> None:
        """Quantize an average: its blocks over their largest magnitudes, to the nearest codes."""
        numel, (blocks, scales) = codes.numel(), self._blocks(place, codes, state, begin)
        index, other = self.indices[:, : blocks.numel()]
        magnitudes, signed = blocks, place == 0
        if signed:
            magnitudes = torch.abs(blocks, out=other.view(torch.float32).view(blocks.shape))
        torch.amax(magnitudes, 1, out=scales)
        tiny = torch.finfo(torch.float32).tiny
        blocks.div_(torch.clamp(scales, min=tiny, out=self.scales[: len(scales)])[:, None])
        values, near = blocks.view(-1), self.codes[place]
        if self.on_gpu:  # a search takes a thread, cells more kernels
            index = index[:numel]
            torch.bucketize(values[:numel], near.edges, out_int32=True, right=True, out=index)
            codes.copy_(index)
            return
        bits = values.view(torch.int32)
        torch.bitwise_right_shift(bits, CELL_BITS, out=index)
        if signed:
            index.bitwise_and_(2 ** (31 - CELL_BITS) - 1)
        index.clamp_(LEAST, MOST).sub_(LEAST)
        if signed:
            index.sub_(torch.bitwise_right_shift(bits, 31, out=other), alpha=CELLS)
        index, values = index[:numel], values[:numel]
        middles = other[:numel].view(torch.float32)
        torch.index_select(near.middles, 0, index, out=middles)
        torch.index_select(near.codes, 0, index, out=codes)
        codes.add_(torch.ge(values, middles, out=self.beyond[:numel]))

    def _blocks(
        self, place: int, codes: torch.Tensor, state: State, begin: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer of an average, a row for each block, and their scales."""
        rows, first = -(-codes.numel() // self.block), begin // self.block
        blocks = self.averages[place][: rows * self.block].view(rows, self.block)
        return blocks, state[f"{AVERAGES[place]}{SCALE}"][first : first + rows]
