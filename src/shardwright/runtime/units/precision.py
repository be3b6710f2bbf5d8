"""In which dtypes a unit computes and reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.core.errors import InputError, expected


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Dtypes of a unit whose shards stay in their parameters' own; None leaves a dtype as it is.

    Floating-point parameters are gathered in ``param_dtype``, their gradients summed over ranks and
    micro-batches in ``reduce_dtype`` (None: as ``param_dtype`` makes them), floating-point outputs
    returned in ``output_dtype``. Floating-point inputs are cast to ``param_dtype`` if
    ``cast_forward_inputs``. torch's own ``MixedPrecisionPolicy`` has the same fields and is
    accepted wherever this is.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
            ):
                raise InputError(
                    expected(f"precision.{name}", "a floating-point dtype or None", repr(dtype))
                )

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a parameter of ``dtype`` is gathered in."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the gradient of a parameter of ``dtype`` is summed in."""
        wanted = self.reduce_dtype if dtype.is_floating_point else None
        return wanted or self.computed(dtype)


def as_precision(given: object) -> MixedPrecision:
    """Ours, nothing, or anything with the same four fields."""
    if given is None:
        return MixedPrecision()
    if isinstance(given, MixedPrecision):
        return given
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(given, name) for name in fields):
        raise InputError(expected("precision", "a MixedPrecision", type(given).__name__))
    return MixedPrecision(*(getattr(given, name) for name in fields))
