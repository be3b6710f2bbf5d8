"""What was done, unit by unit: the same figures as in a plan."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.core.placement import describe
from shardwright.core.quantities import format_bytes
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.unit import Unit


class UnitTraffic(NamedTuple):
    """Collectives of a unit in a step with one forward and one backward, and their bytes."""

    collectives: int
    nbytes: int


def traffic(unit: Unit, reshards: bool) -> UnitTraffic:
    """What the unit moves in a step: bytes of the full buffer of each call."""
    buffers, gradients = unit.buffers, unit.gradients
    gathers = len(buffers.direct) + bool(buffers.chunked)
    gathered = buffers.stage.nbytes + sum(target.nbytes for _, target, _ in buffers.direct)
    passes = 1 + reshards
    sums = [gradient for gradient in gradients.segments if gradient.trains]
    summed = sum(gradient.send.nbytes for gradient in sums)
    return UnitTraffic(passes * gathers + len(sums), passes * gathered + summed)


def table(flow: Flow) -> str:
    """Units, one per line: parameters, bytes per rank, padding, collectives and bytes per step."""
    rows = [("unit", "cut", "params", "per rank", "padding", "collectives", "per step", "dtypes")]
    notes: list[str] = []
    for unit in flow.units():
        layout, moved = unit.layout, traffic(unit, flow.reshards(unit.key))
        placements = {describe(info.placements[0]) for info in unit.param_infos.values()}
        rows.append(
            (
                unit.name,
                placements.pop() if len(placements) == 1 else f"{len(placements)} placements",
                str(len(unit.param_infos)),
                format_bytes(layout.shard_bytes),
                f"{layout.padding_bytes(unit.comm.rank)} B",
                str(moved.collectives),
                format_bytes(moved.nbytes),
                ", ".join(dict.fromkeys(segment.dtype for segment in layout.segments)),
            )
        )
        notes.extend(f"{unit.name}: {fqn} ignored, not reduced" for fqn in unit.ignored)
        notes.extend(f"{unit.name}: {note}" for note in unit.notes)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, *notes])
