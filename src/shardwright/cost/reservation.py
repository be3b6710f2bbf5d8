"""Memory of each rank that tables may not use, by the rules of TorchRec's planner (1.9.2).

The formulas take numbers or Amounts; :func:`reserve` applies them to the ranks of a job. An
accelerator reserves HBM, a CPU the memory of its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.core.amount import ceil, maximum, minimum, named, rounded, summed
from shardwright.core.batch import INDEX_BYTES, Batch, feature_batches
from shardwright.core.cluster import Device
from shardwright.core.errors import NoPlanError, UnsupportedError, expected
from shardwright.core.model import TableSpec
from shardwright.core.quantities import exact_bytes
from shardwright.job.planner import ReservationSection

PIPELINED_BATCHES = 2  # batches alive at once in training
BATCH_COPIES = 10  # copies of each that the pipeline makes
DENSE_COPIES_IN_INFERENCE = 1

Bytes = tuple[int, int, int]  # HBM, DDR, SSD


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is left for tables on each rank, and what was set aside or foreseen on every rank.

    ``dense`` and ``kjt`` (the inputs of a step, TorchRec's keyed jagged tensors) are bytes of HBM
    and DDR; None where a rule does not look at them. Fixed rules give ``kjt`` and reserve none.
    """

    capacities: tuple[Bytes, ...]
    dense: tuple[int, int] | None = None
    kjt: tuple[int, int] | None = None


def share_left(capacity: Any, share: Any) -> Any:
    """Whole bytes of ``capacity`` that are left when ``share`` (0 to 1) of it is set aside."""
    return named("left_by_share", ceil((1 - share) * capacity // 1), "B")


def amount_left(capacity: Any, nbytes: Any) -> Any:
    """Bytes of ``capacity`` that are left without ``nbytes``, at least none."""
    return named("left_by_amount", maximum(capacity - nbytes, 0), "B")


def batch_ids(lengths: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Ids in one rank's batch over all features: ids per bag times samples, one bag each."""
    return summed("batch_ids", [a * b for a, b in zip(lengths, sizes, strict=True)], "ids")


def input_bytes(ids: Any, batches: Any, copies: Any) -> Any:
    """Bytes of the inputs alive at once: ``ids`` in ``copies`` of each of ``batches``."""
    return named("kjt_bytes", ceil(ids * float(INDEX_BYTES)) * (batches * copies), "B")


def dense_bytes(nbytes: Any, multiplier: Any) -> Any:
    """Bytes reserved for dense parameters of ``nbytes``, their gradients and states included."""
    return named("dense_bytes", rounded(multiplier * nbytes), "B")


def left_for_tables(capacity: Any, dense: Any, inputs: Any) -> Any:
    """Bytes of ``capacity`` without dense parameters and inputs; may be negative."""
    return named("left_for_tables", capacity - dense - inputs, "B")


def shortage(capacity: Any) -> Any:
    """Bytes that are missing where what is left is negative, else 0."""
    return named("shortage", 0 - minimum(capacity, 0), "B")


def reserve(
    section: ReservationSection,
    capacities: Sequence[Bytes],
    device: Device,
    tables: Sequence[TableSpec],
    batch: Batch,
) -> Reservation:
    """Set memory aside on every rank; a section without a kind means TorchRec's, heuristic.

    :raises NoPlanError: a heuristic leaves a rank less than no HBM.
    :raises UnsupportedError: the kind needs more than numbers of the job.
    """
    match section.kind or "heuristic":
        case "none":
            return Reservation(tuple(capacities))
        case "percentage":
            left = _with_share(capacities, section.percentage)
            return Reservation(left, kjt=_tiers(device, _training_inputs(tables, batch)))
        case "absolute":
            left = tuple((amount_left(h, section.nbytes), d, s) for h, d, s in capacities)
            return Reservation(left, kjt=_tiers(device, _training_inputs(tables, batch)))
        case "heuristic":
            dense = dense_bytes(section.dense_bytes, section.multiplier)
            inputs = _training_inputs(tables, batch)
            found = _model(section, capacities, device, dense, inputs)
            _check(section, found, capacities)
            return found
        case "inference":
            dense = dense_bytes(section.dense_bytes, DENSE_COPIES_IN_INFERENCE)
            inputs = input_bytes(ids_of_batch(tables, batch), 1, 1)
            return _model(section, capacities, device, dense, inputs)
        case kind:
            wanted = "a reservation that is worked out of numbers"
            raise UnsupportedError(expected("planner.reservation.kind", wanted, f"'{kind}'"))


def ids_of_batch(tables: Sequence[TableSpec], batch: Batch) -> float:
    """Ids in one rank's batch as TorchRec reserves for them: pooled tables first, one bag each."""
    lengths: list[float] = []
    sizes: list[int] = []
    for table in sorted(tables, key=lambda table: not table.pooled):
        lengths += table.pooling_factors
        sizes += feature_batches(table, batch)
    found: float = batch_ids(lengths, sizes) if lengths else 0.0
    return found


def _training_inputs(tables: Sequence[TableSpec], batch: Batch) -> int:
    ids = ids_of_batch(tables, batch)
    nbytes: int = input_bytes(ids, PIPELINED_BATCHES, BATCH_COPIES)
    return nbytes


def _tiers(device: Device, nbytes: int) -> tuple[int, int]:
    """HBM and DDR bytes of what lies in the memory that a rank computes in."""
    return (0, nbytes) if device == "cpu" else (nbytes, 0)


def _with_share(capacities: Sequence[Bytes], share: float) -> tuple[Bytes, ...]:
    return tuple((share_left(hbm, share), ddr, ssd) for hbm, ddr, ssd in capacities)


def _model(
    section: ReservationSection,
    capacities: Sequence[Bytes],
    device: Device,
    dense: int,
    inputs: int,
) -> Reservation:
    """A share, then dense parameters and inputs, which may take more than there is."""
    dense_tiers, input_tiers = _tiers(device, dense), _tiers(device, inputs)
    left = []
    for hbm, ddr, ssd in _with_share(capacities, section.percentage):
        hbm = left_for_tables(hbm, dense_tiers[0], input_tiers[0])
        left.append((hbm, left_for_tables(ddr, dense_tiers[1], input_tiers[1]), ssd))
    return Reservation(tuple(left), dense_tiers, input_tiers)


def _check(section: ReservationSection, found: Reservation, capacities: Sequence[Bytes]) -> None:
    """Refuse what leaves a rank less than nothing, on whichever rank that is most."""
    missing = [shortage(hbm) for hbm, _, _ in found.capacities]
    rank = max(range(len(missing)), key=missing.__getitem__, default=0)
    if not missing or not missing[rank]:
        return
    assert found.dense is not None
    assert found.kjt is not None
    most = capacities[rank][0]
    raise NoPlanError(
        f"planner.reservation: nothing is left for tables on rank {rank}: of {exact_bytes(most)} "
        f"of HBM {section.percentage:.0%} is set aside, {exact_bytes(found.dense[0])} for dense "
        f"parameters and {exact_bytes(found.kjt[0])} for inputs, {exact_bytes(missing[rank])} too "
        "much. Set aside less, give dense_bytes or multiplier as they are, or use a smaller batch."
    )
