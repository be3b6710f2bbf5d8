"""Recordings of a chain of units, made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.core.model import ModelSpec
from shardwright.core.optimizers import OptimizerName
from shardwright.core.recording import Piece, Point, RecordedUnit, Recording, Touch
from shardwright.core.tensor import TensorSpec
from shardwright.core.work import Work

At = tuple[Point, str]  # where a unit gets to a point
BUSY = Work(calls=1)


def unit(name: str, numel: int = 1, series: str = "") -> RecordedUnit:
    """A unit of one vector."""
    return RecordedUnit(name, (TensorSpec(f"{name}.w", (numel,)),), series, (name,))


def layers(count: int, numel: int = 1) -> tuple[RecordedUnit, ...]:
    """Units alike, which may be merged."""
    return tuple(unit(f"layers.{index}", numel, "layers") for index in range(count))


def chain(
    units: Sequence[RecordedUnit],
    *,
    tables_after: str | Mapping[str, str] = "",
    works: Mapping[At, Work] | None = None,
    touches: Mapping[At, tuple[Touch, ...]] | None = None,
    inputs: int = 0,
    buffers: int = 0,
) -> Recording:
    """Forward through ``units``, a loss, and backward; rows of tables come after one of them, or
    after several those of the modules that ``tables_after`` has.

    Where ``works`` says nothing, every unit and the loss compute, in both directions. The first
    unit's inputs have no gradient: nothing says when its backward is over.
    """
    works, touches = works or {}, touches or {}
    busy: set[str] = {"enter", "enter_backward", "loss", "backward"}

    def pieces(where: Iterator[At]) -> Iterator[Piece]:
        for at in where:
            work = works.get(at, BUSY if at[0] in busy else Work())
            yield Piece(*at, touches.get(at, ()), work)

    names = [each.name for each in units]
    after = {tables_after: "tables"} if isinstance(tables_after, str) else tables_after
    return Recording(
        tuple(pieces(_moments(names, after))),
        tuple(units),
        inputs=inputs,
        buffers=buffers,
    )


def _moments(names: Sequence[str], tables: Mapping[str, str]) -> Iterator[At]:
    yield "begin", ""
    for name in names:
        yield "enter", name
        yield "leave", name
        if name in tables:
            yield "lookup", tables[name]
            yield "rows", tables[name]
    yield "finish", ""
    yield "loss", ""
    yield "backward", ""
    for name in reversed(names):
        if name in tables:
            yield "row_gradients", tables[name]
        yield "enter_backward", name
        if name != names[0]:
            yield "leave_backward", name


def model_of_chain(recording: Recording, optimizer: OptimizerName = "sgd") -> ModelSpec:
    """A model without tables that takes such a step."""
    return ModelSpec("chain", (), recording, optimizer)
