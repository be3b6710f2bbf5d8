"""A measured machine as a preset: every constant there, known, in its unit and within bounds."""

from __future__ import annotations

from shardwright.core.calibration import Calibration, Figure
from shardwright.core.cluster import Constant
from shardwright.core.errors import InputError, expected
from shardwright.core.strict import unknown_key
from shardwright.cost.presets import LOCAL, Preset

AGAIN = "Run `shardwright calibrate` again."
RATES = ("B/s", "FLOP/s")


def calibrated(found: Calibration, where: str) -> Preset:
    """The preset that a cluster file describes; InputError names the constant that cannot be."""
    for name in found.constants:
        if name not in LOCAL:
            raise unknown_key(where, f"constants.{name}", name, LOCAL)
    missing = next((name for name in LOCAL if name not in found.constants), None)
    if missing:
        raise InputError(expected(f"{where}: constants.{missing}", "a value", "none", AGAIN))
    for name, figure in found.constants.items():
        _check(f"{where}: constants.{name}", figure, LOCAL[name].unit)
    for name, figure in found.capacities.items():
        _check_capacity(f"{where}: capacities.{name}", figure)
    sizes = {name: int(figure.value) for name, figure in found.capacities.items()}
    decisive = "ddr_cap" if found.compute_device == "cpu" else "hbm_cap"
    if not sizes.get(decisive):
        raise InputError(expected(f"{where}: capacities.{decisive}", "bytes per rank", "none"))
    return Preset(
        found.world_size,
        found.compute_device,
        sizes.get("hbm_cap", 0),
        sizes.get("ddr_cap", 0),
        sizes.get("ssd_cap", 0),
        found.capacities[decisive].source,
        {name: _constant(figure) for name, figure in found.constants.items()},
    )


def _check(where: str, figure: Figure, unit: str) -> None:
    """A constant in another unit, a rate of nothing and a share above all are refused."""
    if figure.unit != unit:
        raise InputError(expected(f"{where}.unit", f"'{unit}'", f"'{figure.unit}'"))
    if unit in RATES and figure.value < 1:
        raise InputError(expected(f"{where}.value", f"at least 1 {unit}", f"{figure.value:g}"))
    most = {"share": 1.0, "s": 60.0, "touches": 1e6}.get(unit)
    if most is not None and figure.value > most:
        raise InputError(
            expected(f"{where}.value", f"at most {most:g} {unit}", f"{figure.value:g}")
        )


def _check_capacity(where: str, figure: Figure) -> None:
    if figure.unit != "B":
        raise InputError(expected(f"{where}.unit", "'B'", f"'{figure.unit}'"))
    if figure.value > 2**60 or figure.value != int(figure.value):
        raise InputError(
            expected(f"{where}.value", "whole bytes, at most 2^60", f"{figure.value:g}")
        )


def _constant(figure: Figure) -> Constant:
    source = figure.source
    if figure.median_of:
        source += f"; median of {figure.median_of}, spread {figure.spread * 100:.0f} %"
    return Constant(figure.value, figure.unit, source, figure.date)
