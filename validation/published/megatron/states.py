"""What a rank keeps from step to step: parameters, gradients and optimizer states, exactly.

A bf16 parameter costs 2 bytes, its fp32 gradient 4, and Adam 12 (an fp32 copy and two moments):
18 bytes in all, or 6 + 12/d where the distributed optimizer cuts the last over d ranks
(``megatron/core/optimizer``, ``megatron/core/distributed``, commit d98e8a64). Shares are rounded up
to whole elements as the padded buffers of the distributed optimizer are.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import msgspec

from published.megatron.description import Run
from published.megatron.weights import Weight
from shardwright.core.footprint import Certainty
from shardwright.core.timeline import Kind

"""Elements that a gradient buffer of the distributed optimizer is padded to for each rank, so that
every shard starts at 256 bytes (``param_and_grad_buffer.py``)."""
BYTES_FP32 = 4
REMAINDER = 2
"""Bytes by which an fp32 copy exceeds its bf16 parameter (``store_param_remainders``)."""


class Part(msgspec.Struct, frozen=True):
    """Bytes of one kind with what they rest on. ``stays``: also between two steps; ``forward``:
    also while the layers run."""

    name: str
    kind: Kind
    bytes: int
    certainty: Certainty
    source: str
    stays: bool = True
    forward: bool = True


class StateBytes(msgspec.Struct, frozen=True):
    """Bytes that one element costs, each as a fraction where ranks share it. ``copied`` is the fp32
    copy of the gradient between the optimizer step and the next forward."""

    weight: Fraction
    gradient: Fraction
    optimizer: Fraction
    copied: Fraction

    @property
    def total(self) -> Fraction:
        """Bytes of an element while the layers run."""
        return self.weight + self.gradient + self.optimizer


def state_bytes(run: Run, weight: Weight) -> StateBytes:
    """Bytes of an element of a parameter: 18, or 6 + 12/d with a distributed Adam."""
    shards = run.parallel.expert_shards if weight.expert else run.parallel.dense_shards
    optimizer, precision = run.optimizer, run.precision
    shards = max(1, shards // optimizer.instances)
    cut = shards if optimizer.sharded or optimizer.fsdp else 1
    kept = Fraction(_optimizer_bytes(run, weight), cut) * (1 - Fraction(optimizer.offloaded))
    copied = Fraction(0)
    if precision.gradient < BYTES_FP32 and not optimizer.precision_aware and not optimizer.fsdp:
        copied = Fraction(BYTES_FP32, cut)
    gradient = Fraction(precision.gradient)
    parameter = Fraction(_parameter_bytes(run, weight))
    if optimizer.fsdp in ("optim_grads", "optim_grads_params"):
        gradient /= shards
    if optimizer.fsdp == "optim_grads_params":
        parameter /= shards
    return StateBytes(parameter, gradient, kept, copied)


def _parameter_bytes(run: Run, weight: Weight) -> int:
    """fp8 parameters; those of mxfp8 are gathered in bf16 unless the gradients' buffer serves."""
    if not (run.precision.fp8_parameters and weight.quantized):
        return run.precision.parameter
    gathered = run.precision.fp8 == "mxfp8" and not run.optimizer.reuses_gradients
    return fp8_bytes(run) + (run.precision.parameter if gathered else 0)


def fp8_bytes(run: Run) -> int:
    """Bytes of an fp8 weight: by rows and, before Blackwell or where scales go by block, also by
    columns."""
    return 2 if run.precision.fp8 in ("mxfp8", "blockwise") or not run.device.blackwell else 1


def fp8_copies(run: Run, weights: Iterable[Weight]) -> tuple[Part, ...]:
    """The fp8 copies that Transformer Engine keeps of bf16 matrices (``_fp8_workspaces``)."""
    if not run.precision.fp8 or run.precision.fp8_parameters:
        return ()
    elements = sum(weight.elements for weight in weights if weight.quantized)
    return (
        Part(
            "fp8 copies of the parameters",
            "weight",
            fp8_bytes(run) * elements,
            "modelled",
            "kept from the first micro-batch on",
        ),
    )


def _optimizer_bytes(run: Run, weight: Weight) -> int:
    precision, kind = run.precision, run.optimizer.kind
    moments = sum(precision.moments)
    if kind == "sgd":
        moments = 0
    if kind == "muon" and weight.matrix and not weight.lookup:
        moments = precision.moments[0]
    if precision.compute == "fp32":
        return moments
    main = precision.main_parameter
    keeps_rest = run.optimizer.precision_aware and precision.compute == "bf16"
    if keeps_rest and main == BYTES_FP32 and not (precision.fp8_parameters and weight.quantized):
        main = REMAINDER
    return main + moments


def state_parts(run: Run, weights: Iterable[Weight]) -> tuple[Part, ...]:
    """Parameters, gradients and optimizer states of a rank."""
    totals = {"weight": Fraction(0), "gradient": Fraction(0), "optimizer_state": Fraction(0)}
    copied = Fraction(0)
    for weight in weights:
        each = state_bytes(run, weight)
        totals["weight"] += each.weight * weight.elements
        totals["gradient"] += each.gradient * weight.elements
        totals["optimizer_state"] += each.optimizer * weight.elements
        copied += each.copied * weight.elements
    source = "bytes per element times elements"
    parts = [
        Part("parameters", "weight", _whole(totals["weight"]), "exact", source),
        Part("gradients", "gradient", _whole(totals["gradient"]), "exact", source),
        Part("optimizer", "optimizer_state", _whole(totals["optimizer_state"]), "exact", source),
    ]
    if copied:
        parts.append(
            Part(
                "fp32 copies of the gradients",
                "gradient",
                _whole(copied),
                "exact",
                "set by the optimizer step, freed before the next forward",
                forward=False,
            )
        )
    return tuple(parts)


def _whole(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
