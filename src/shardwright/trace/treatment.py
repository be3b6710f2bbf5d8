"""How a model is run while it is recorded: kernels, checkpointing, compiled, in fp8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor, nn

from shardwright.core.errors import InputError
from shardwright.job.memory import Float8
from shardwright.trace.checkpointing import Applied, apply_checkpointing, policy
from shardwright.trace.lowering import lowering
from shardwright.trace.lowering.kernels import kernels

# Input and weight of a layer in fp8 are kept for backward in their own dtype and cast again there,
# so activations do not shrink; nor do gathered weights, which FSDP gathers in their own dtype.
# Casts are written in operators of torch, so that a compiled trace fuses them as Inductor does and
# an eager one takes their fp32 values as torchao does. Which factors are cast where: pytorch/ao
# float8/float8_linear.py, matmul_with_hp_or_float8_args; weights are gathered as without
# enable_fsdp_float8_all_gather.

RECIPES: tuple[Float8, ...] = get_args(Float8)

MULTIPLE = 16  # of both sizes of a weight, or it stays as it is; torch._scaled_mm
SKIPPED = {"output", "lm_head"}  # TorchTitan and Hugging Face leave the head alone
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2  # pytorch/ao float8/config.py
_SMALLEST = 1e-12  # EPS, pytorch/ao float8/float8_utils.py


def apply_float8(model: nn.Module, recipe: str = "tensorwise") -> Applied:
    """Run the linear layers of ``model`` in fp8, in place, but those whose sizes do not allow it
    and a head. Call it before compiling or checkpointing blocks."""
    if recipe not in RECIPES:
        raise InputError(
            "memory.float8", " or ".join(RECIPES), f"'{recipe}'", "Choose one of them."
        )
    converted = Applied()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or set(name.split(".")) & SKIPPED:
            continue
        if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
            converted.exchange(module, partial(_linear, module, recipe == "rowwise"))
    return converted


def _linear(layer: nn.Linear, rowwise: bool, x: Tensor) -> Tensor:
    result: Tensor = _Product.apply(x, layer.weight.t(), rowwise)
    return result if layer.bias is None else result + layer.bias


class _Product(torch.autograd.Function):
    """x @ weight in fp8, torchao's ``matmul_with_hp_or_float8_args``."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, rowwise: bool) -> Tensor:
        context.save_for_backward(x, weight)
        context.rowwise = rowwise
        rows = x.reshape(-1, x.shape[-1])
        product = _multiply(rows, _FORWARD, weight, _FORWARD, rowwise)
        return product.reshape(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        x, weight = context.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        of_input = _multiply(rows, _BACKWARD, weight.t(), _FORWARD, context.rowwise)
        flat = x.reshape(-1, x.shape[-1])
        of_weight = _multiply(rows.t(), _BACKWARD, flat, _FORWARD, context.rowwise)
        return of_input.reshape(x.shape), of_weight.t(), None


def _multiply(
    left: Tensor, left_dtype: torch.dtype, right: Tensor, right_dtype: torch.dtype, rowwise: bool
) -> Tensor:
    """left @ right; the hardware wants the first by rows and the second by columns."""
    first, first_scale = _cast(left, left_dtype, 1 if rowwise else None)
    second, second_scale = _cast(right, right_dtype, 0 if rowwise else None)
    return torch._scaled_mm(
        first.contiguous(),
        second.t().contiguous().t(),
        first_scale,
        second_scale,
        out_dtype=left.dtype,
        use_fast_accum=right_dtype == left_dtype,
    )


def _cast(tensor: Tensor, dtype: torch.dtype, axis: int | None) -> tuple[Tensor, Tensor]:
    """A tensor in fp8 and what to multiply it with to get it back, one for all or for a row."""
    size = tensor.abs()
    largest = size.max() if axis is None else size.amax(axis, keepdim=True)
    limit = torch.finfo(dtype).max
    # Clamped, for a tensor of zeros would have an infinite scale.
    scale = limit / largest.float().clamp(min=_SMALLEST)
    return (tensor.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


class Treatment(msgspec.Struct, frozen=True):
    """Names as a job writes them; ``float8`` is a recipe, empty for none. ``attention`` and
    ``rms_norm`` are kernels of an accelerator."""

    device: str = "cuda"
    checkpointing: str = "none"
    compile: bool = False
    compiled_loss: bool = False
    float8: str = ""
    attention: str = "flash"
    rms_norm: str = "fused"

    @contextmanager
    def applied(
        self, model: nn.Module, blocks: Sequence[nn.Module], treated: Sequence[int]
    ) -> Iterator[AppliedTreatment]:
        """``model`` treated so inside; ``treated`` are the blocks that a policy picks."""
        chosen = policy(self.checkpointing).of_a_block
        picked = [blocks[place] for place in treated]
        others = [block for place, block in enumerate(blocks) if place not in treated]
        result = AppliedTreatment(self)
        if chosen.kind != "none":
            result.checkpointed = dict.fromkeys(picked, chosen.name)
        with ExitStack() as stack:
            if self.float8:
                stack.enter_context(apply_float8(model, self.float8))
            if self.compile:
                from shardwright.trace.compiled import apply_compile  # seconds of imports

                own = kernels(self.device, self.attention, self.rms_norm)
                for its, name in ((picked, chosen), (others, policy("none"))):
                    done = stack.enter_context(apply_compile(its, name, own))
                    result.compiled.append(done)
            else:
                stack.enter_context(apply_checkpointing(picked, chosen))
            yield result


@dataclass(slots=True)
class AppliedTreatment:
    """A treatment at work. ``checkpointed`` blocks each have a policy's name."""

    treatment: Treatment
    compiled: list[Any] = field(default_factory=list)
    checkpointed: dict[nn.Module, str] = field(default_factory=dict)

    def around(self) -> AbstractContextManager[Any]:
        """The context of a forward and a backward."""
        if self.treatment.device == "cpu":
            return nullcontext()
        own = self.treatment
        return lowering(own.device, own.attention, own.rms_norm)

    @property
    def notes(self) -> list[str]:
        """What could not be done as asked."""
        return list(dict.fromkeys(note for each in self.compiled for note in each.notes))
