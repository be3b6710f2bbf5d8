"""This machine measured by its own ranks: launch them, and make a cluster file of their samples,
each constant by a formula over seconds.
"""

# A constant is a formula over seconds of cases, so that its spread is found by the same formula
# round by round, and the cluster file can say what was timed. What was not timed is carried over
# and named as such. Ranks measure together, for a machine whose ranks all work is slower than one
# at rest.

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec

from shardwright.core.cluster import SCHEMA, Calibration, Constant, SourcedFigure
from shardwright.core.document import read_document, write_document
from shardwright.core.errors import EXIT_BUG, EXIT_RUN_FAILED, InputError, expected
from shardwright.core.work import Product
from shardwright.cost.network import CROSSINGS, Collective
from shardwright.cost.presets import LOCAL, PRESETS
from shardwright.launcher.ending import RunOutcome
from shardwright.launcher.launch import Launch, launch
from shardwright.launcher.load import OtherLoad
from shardwright.train.calibrate.cases import (
    BUFFERS,
    FLOAT,
    OVERLAPPED,
    PARTS,
    WIDTHS,
    Samples,
    Times,
    collective_case,
    overlap_case,
    products_file,
    row_case,
    samples_file,
    spread,
)
from shardwright.train.calibrate.cases import (
    SCHEMA as SAMPLES,
)

MOST_RANKS = 256
TIMEOUT, SETUP_TIMEOUT = 60.0, 180.0


def calibrate(
    world_size: int, stream: TextIO, *, quick: bool = False, products: Sequence[Product] = ()
) -> tuple[RunOutcome, Calibration | None, Path | None]:
    """Measure with ``world_size`` ranks on this machine; messages and progress go to ``stream``.

    Gives how they ended, what they found if they finished, and where their logs are if not. About
    half a minute with two ranks, ``quick`` a few seconds. ``products`` are timed in place of layers
    of usual sizes. InputError: too many ranks or none.
    """
    if not 1 <= world_size <= MOST_RANKS:
        raise InputError(expected("-n", f"from 1 to {MOST_RANKS} ranks", f"{world_size}"))
    folder = Path(tempfile.mkdtemp(prefix="shardwright-calibrate-"))
    request = Launch(
        module=f"{__name__}.worker",
        arguments=(str(folder), *(["--quick"] if quick else [])),
        world_size=world_size,
        folder=folder,
        timeout=TIMEOUT,
        setup_timeout=SETUP_TIMEOUT,
        stop_grace=2.0,
    )
    kept, load = False, OtherLoad()
    if products:
        write_document(list(products), products_file(folder))
    try:
        outcome = launch(request, stream)
        kept = outcome.code in (EXIT_BUG, EXIT_RUN_FAILED)
        if outcome.code:
            return outcome, None, folder if kept else None
        ranks = [
            read_document(samples_file(folder, rank), Samples, SAMPLES, "shardwright calibrate")
            for rank in range(world_size)
        ]
        found = calibration(ranks, time.strftime("%Y-%m-%d"))
        machine = found.machine | {"load": f"{load.ended():.1f}"}
        return outcome, msgspec.structs.replace(found, machine=machine), None
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


# ---- constants -----------------------------------------------------------------------------------


SMALL = 16 * 2**10  # a buffer up to which latency is nearly all there is
_TURNS = 10  # latency and rate are found in turns, and stand still at once
_LEAST_SLOPE = 1e-15  # seconds per byte; no link is faster


@dataclass(frozen=True, slots=True)
class FittedLine:
    """Seconds, bytes per second, and how far a size lies from the line at most, as a share."""

    latency: float
    rate: float
    misfit: float


def fit(
    buffers: Sequence[float], crossing: Sequence[float], seconds: Sequence[float]
) -> FittedLine:
    """The line for ``crossing`` bytes of full ``buffers`` bytes that took ``seconds``.

    The latency is that of the small buffers, for large ones drown it, and no more than any size
    took; the rate is the one of the least sum of relative errors, so that every size counts the
    same and no outlier much.
    """
    points = list(zip(crossing, seconds, strict=True))
    small = [k for k, nbytes in enumerate(buffers) if nbytes <= SMALL]
    # Latency from small buffers and rate from all of them need each other, so they are found in
    # turns.
    slope, least = 0.0, min(seconds)
    for _ in range(_TURNS):
        near = statistics.median(points[k][1] - slope * points[k][0] for k in small)
        latency = min(max(near, 0.0), least)
        slopes = [((t - latency) / x, x / t) for x, t in points]
        # Weighted by bytes per second, which makes it the least sum of relative errors: least
        # squares would fit the largest buffer alone.
        slope = max(_weighted_median(slopes), _LEAST_SLOPE)
    misfit = max(abs(latency + slope * x - t) / t for x, t in points)
    return FittedLine(latency, 1 / slope, misfit)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """The value below and above which half of the weight lies."""
    half = sum(weight for _, weight in pairs) / 2
    ordered = sorted(pairs)
    reached = itertools.accumulate(weight for _, weight in ordered)
    return next(value for (value, _), total in zip(ordered, reached, strict=True) if total >= half)


HOST_SHARE = 0.8  # of a host's memory that ranks may fill: the rest is the system's and torch's
DEVICE_SHARE = 0.9  # of an accelerator's: the rest is the driver's and the libraries'
ACCELERATED = "h100-8"  # whose constants an accelerator takes over where nothing was measured
READS = {row_case(width): width * FLOAT for width in WIDTHS}  # bytes of a row
# More touches of a row than row-wise Adagrad's, for states as wide as the row.
WIDER = {"adagrad_passes": (2.0, "one state"), "adam_passes": (4.0, "two states")}

Seconds = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Formula:
    """A constant as a function of the seconds of cases; ``source`` says what was timed."""

    cases: tuple[str, ...]
    value: Callable[[Seconds], float]
    source: str


def calibration(ranks: Sequence[Samples], date: str) -> Calibration:
    """The cluster file of what ``ranks`` timed; what they could not time is carried over."""
    first, times = ranks[0], Times(ranks)
    preset = "local" if first.device == "cpu" else ACCELERATED
    found = {
        name: _measured(f, times, LOCAL[name].unit, date) for name, f in _formulas(first, times)
    }
    for name, (more, what) in WIDER.items():
        base = found["rowwise_adagrad_passes"].value
        source = f"assumed: row-wise Adagrad as measured, and read and write {what}"
        found[name] = SourcedFigure(base + more, LOCAL[name].unit, source, date)
    constants = {
        name: found.get(name) or _carried(constant, preset)
        for name, constant in PRESETS[preset].constants.items()
    }
    return Calibration(
        schema=SCHEMA,
        date=date,
        world_size=first.world_size,
        compute_device=first.device,
        backend=first.backend,
        machine=first.machine,
        capacities={name: _capacity(name, first, date) for name in first.memory},
        constants=constants,
    )


def _measured(formula: Formula, times: Times, unit: str, date: str) -> SourcedFigure:
    values = [formula.value(seconds) for seconds in times.rounds(formula.cases)]
    value = formula.value(times.medians())
    source = f"measured: {formula.source}"
    return SourcedFigure(value, unit, source, date, len(values), round(spread(values, value), 4))


def _carried(constant: Constant, preset: str) -> SourcedFigure:
    source = f"carried over from preset '{preset}': {constant.source}"
    return SourcedFigure(constant.value, constant.unit, source, constant.date)


def _capacity(name: str, samples: Samples, date: str) -> SourcedFigure:
    """A rank's share of what the system says there is, less a margin."""
    total = samples.memory[name]
    if name == "hbm_cap":
        share = f"{DEVICE_SHARE * 100:.0f} %"
        source = f"{share} of the {total:,} B of one accelerator; the margin is assumed"
        return SourcedFigure(float(int(total * DEVICE_SHARE)), "B", source, date, 1)
    source = (
        f"{HOST_SHARE * 100:.0f} % of the host's {total:,} B, shared by the ranks; "
        "the margin is assumed"
    )
    size = int(total * HOST_SHARE / samples.world_size)
    return SourcedFigure(float(size), "B", source, date, 1)


def _formulas(first: Samples, times: Times) -> Iterator[tuple[str, Formula]]:
    yield from _own(times)
    yield from _rows(times)
    if first.world_size > 1:
        yield from _links(first, times)
        yield "overlap", _overlap(first.backend)
    yield from _host(first, times)


def _rate(times: Times, names: Sequence[str]) -> Callable[[Seconds], float]:
    amount = sum(times.amounts[name] for name in names)
    return lambda seconds: amount / sum(seconds[name] for name in names)


def _cost(times: Times, name: str) -> Callable[[Seconds], float]:
    return lambda seconds: seconds[name] / times.amounts[name]


MEMORY = ("update", "copy")


def _own(times: Times) -> Iterator[tuple[str, Formula]]:
    """Constants of one rank, all ranks at work."""
    layers = tuple(name for name in times.amounts if name.startswith("layer "))
    source = f"{len(layers)} sizes of fp32 products, {layers[0].removeprefix('layer ')} first"
    yield "compute_rate", Formula(layers, _rate(times, layers), source)
    source = "update and copy of arrays of 64 MiB, bytes of both arrays"
    yield "memory_rate", Formula(MEMORY, _rate(times, MEMORY), source)
    source = "a new buffer of 80 MiB written once and let go"
    yield "fresh_memory_rate", Formula(("fresh",), _rate(times, ["fresh"]), source)
    for name, case, source in (
        ("operation_latency", "operations", "linear and ReLU of width 16, forward and backward"),
        ("index_cost", "ids addressed", "one id of a table on one rank"),
        ("sort_cost", "ids sorted", "one id of a table cut by rows, and its order undone"),
        ("parse_cost", "click rows", "one click-log row of text"),
    ):
        yield name, Formula((case,), _cost(times, case), source)


def _rows(times: Times) -> Iterator[tuple[str, Formula]]:
    """What a row costs beyond its bytes, and updates in touches of a row."""
    rate = _rate(times, MEMORY)

    def latency(seconds: Seconds) -> float:
        # What a row costs beyond its bytes: a wide row and a narrow one miss a cache equally often.
        excess = [seconds[c] / times.amounts[c] - b / rate(seconds) for c, b in READS.items()]
        return max(sum(excess) / len(excess), 0.0)

    reads = (*MEMORY, *READS)
    source = "random rows of 64 and 256 B of a 64 MiB table, less their bytes at memory_rate"
    yield "row_latency", Formula(reads, latency, source)
    for kind in ("sgd", "rowwise_adagrad"):

        def passes(seconds: Seconds, kind: str = kind) -> float:
            touch = READS[row_case(WIDTHS[0])] / rate(seconds) + latency(seconds)
            return seconds[kind] / times.amounts[kind] / touch

        source = "fused update of random rows of 64 B, in touches of one row"
        yield f"{kind}_passes", Formula((kind, *reads), passes, source)


def _links(first: Samples, times: Times) -> Iterator[tuple[str, Formula]]:
    """Latency and rate of each collective."""
    ranks = first.world_size
    sizes = f"{BUFFERS[0] // 2**10} KiB to {BUFFERS[-1] // 2**20} MiB"
    for collective in CROSSINGS:
        cases = tuple(collective_case(collective, nbytes) for nbytes in BUFFERS)
        line = partial(_line, collective, ranks)
        source = f"{collective} over {first.backend}, {ranks} ranks, buffers of {sizes}"
        yield f"{collective}_latency", Formula(cases, partial(_latency, line), source)
        misfit = line(times.medians()).misfit
        source += f", each within {misfit * 100:.0f} % of the line"
        yield f"{collective}_rate", Formula(cases, partial(_rate_of, line), source)


def _line(collective: Collective, ranks: int, seconds: Seconds) -> FittedLine:
    """The line through all sizes, over the bytes that cross a rank's link."""
    share = CROSSINGS[collective] * (ranks - 1) / ranks
    times = [seconds[collective_case(collective, nbytes)] for nbytes in BUFFERS]
    return fit(BUFFERS, [nbytes * share for nbytes in BUFFERS], times)


def _latency(line: Callable[[Seconds], FittedLine], seconds: Seconds) -> float:
    return line(seconds).latency


def _rate_of(line: Callable[[Seconds], FittedLine], seconds: Seconds) -> float:
    return line(seconds).rate


def _overlap(backend: str) -> Formula:
    """Of two things that take as long, the share of one that both at once save."""

    def share(seconds: Seconds) -> float:
        saved = least = 0.0
        for collective, nbytes in OVERLAPPED:
            alone, work, both = (seconds[overlap_case(collective, nbytes, p)] for p in PARTS)
            saved += alone + work - both
            least += min(alone, work)
        return min(max(saved / least, 0.0), 1.0)

    cases = tuple(overlap_case(*what, part) for what in OVERLAPPED for part in PARTS)
    source = f"collectives over {backend} of 1 and 8 MiB beside matrix products that take as long"
    return Formula(cases, share, source)


def _host(first: Samples, times: Times) -> Iterator[tuple[str, Formula]]:
    """The host's memory and the way to it; on a CPU there is one memory."""
    if first.device == "cpu":
        one = Formula(MEMORY, _rate(times, MEMORY), "one memory, as memory_rate")
        yield "host_link_rate", one
        yield "ddr_rate", one
        return
    yield "host_link_rate", Formula(("link",), _rate(times, ["link"]), "copy from pinned memory")
    yield "ddr_rate", Formula(("host",), _rate(times, ["host"]), "copy of 64 MiB in host memory")
