"""What the files of a run folder are called; those of the pulses have their names in ``pulse``."""

from __future__ import annotations

from pathlib import Path


def plan_file(folder: Path) -> Path:
    """The plan a run executed."""
    return folder / "plan.json"


def record_file(folder: Path, rank: int) -> Path:
    """What a rank measured."""
    return folder / f"rank-{rank}.record.json"


def scores_file(folder: Path, rank: int) -> Path:
    """A rank's held-out scores: rows of three numbers, as its task has them."""
    return folder / f"rank-{rank}.scores.npy"


def measurement_file(folder: Path) -> Path:
    """What all ranks measured, merged."""
    return folder / "measured.json"


def comparison_file(folder: Path) -> Path:
    """Predicted beside measured."""
    return folder / "comparison.json"


def outcome_file(folder: Path) -> Path:
    """How the run ended."""
    return folder / "outcome.json"


def facts_file(rows: Path) -> Path:
    """Beside generated rows: what is known about them."""
    return rows.with_suffix(".facts.json")


def results_of_a_run(folder: Path) -> list[Path]:
    """What an earlier run left and the next one would mistake for its own."""
    ranks = [*folder.glob("rank-*.record.json"), *folder.glob("rank-*.scores.npy")]
    return [*ranks, measurement_file(folder), comparison_file(folder)]
