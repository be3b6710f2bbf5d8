"""What a unit is before it has memory: in which dtypes, cut how, called what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwright.core.errors import InputError
from shardwright.core.placement import Placement, Zero


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
                raise InputError(f"precision.{name}", "a floating-point dtype or None", repr(dtype))

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a parameter of ``dtype`` is gathered in."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the gradient of a parameter of ``dtype`` is summed in."""
        # Complex gradients are summed as they are: a real dtype would drop their imaginary half.
        wanted = self.reduce_dtype if dtype.is_floating_point else None
        return wanted or self.computed(dtype)


def as_precision(given: object) -> MixedPrecision:
    """Ours, nothing, or anything with the same four fields."""
    if given is None:
        return MixedPrecision()
    if isinstance(given, MixedPrecision):
        return given
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    # By its fields and not by its class, so that torch's policy is taken without importing FSDP2.
    if not all(hasattr(given, name) for name in fields):
        raise InputError("precision", "a MixedPrecision", type(given).__name__)
    return MixedPrecision(*(getattr(given, name) for name in fields))


FULL_PRECISION = MixedPrecision()


@dataclass(frozen=True, slots=True)
class Cutting:
    """What a unit's memory looks like: who has which part of it, in which dtypes, and where."""

    placements: Mapping[str, Placement]
    precision: MixedPrecision = FULL_PRECISION
    zero: Zero = 3
    offloaded: bool = False
    block_size: int = 1


class UnitNames(NamedTuple):
    """What a unit is called, that of its modules as a step shows them, and which bucket it is of
    several units of the same modules."""

    name: str
    modules: tuple[str, ...]
    bucket: str = ""

    @property
    def full(self) -> str:
        """With the bucket."""
        return f"{self.name} {self.bucket}".strip()

    def by_paths(self, paths: Sequence[str]) -> UnitNames:
        """By the paths of the unit's modules: ``layers.0-3`` for neighbours."""
        first, last = paths[0], paths[-1]
        parent, _, number = last.rpartition(".")
        alike = number.isdigit() and first.rpartition(".")[0] == parent
        name = first if len(paths) == 1 else f"{first}-{number}" if alike else "+".join(paths)
        return UnitNames(name, tuple(paths), self.bucket)
