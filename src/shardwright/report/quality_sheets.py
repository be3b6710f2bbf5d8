"""How good the predictions of a run are: on rows that are held out, and while it trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import UNSET

from shardwright.core.measurement import Measurement, Quality, Scores
from shardwright.report.sheet import Column, Sheet, number, sheet_of
from shardwright.report.wording import counted, percent

MOST_SCORES = 20


def quality_sheets(measurement: Measurement) -> tuple[Sheet, ...]:
    """Held-out rows, those for validation, and what was trained on."""
    found = []
    if measurement.quality:
        found.append(_held_out_sheet(measurement.quality))
    if measurement.validation is not UNSET:
        found.append(_held_out_sheet(measurement.validation, " for validation"))
    if measurement.scores:
        found.append(_scores_sheet(measurement.scores))
    return tuple(found)


def _scores_sheet(scores: tuple[Scores, ...]) -> Sheet:
    """In order; of many every so many, and the last."""
    stride = -(-len(scores) // MOST_SCORES)
    shown = scores[::-1][::stride][::-1]
    worst = max((each.auc_error or 0.0 for each in scores), default=0.0)
    left = f" {len(shown)} of {len(scores):,} are shown." if len(shown) < len(scores) else ""
    return sheet_of(
        "While training",
        shown,
        (
            number("up to step", lambda s: f"{s.step:,}"),
            number("rows", lambda s: f"{s.rows:,}"),
            number("AUC", lambda s: _figure(s.auc)),
            number("log-loss", lambda s: _figure(s.log_loss)),
            number("normalized\nentropy", lambda s: _figure(s.normalized_entropy)),
            number("calibration", lambda s: _figure(s.calibration)),
            number("accuracy", lambda s: _figure(s.accuracy)),
            number("commoner\nlabel", lambda s: _figure(s.majority)),
        ),
        "Rows of all ranks since the line before, each as it was predicted before it was learned. "
        f"AUC is off by {worst:.1g} at most.{left}",
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def reached(quality: Quality) -> Iterator[tuple[str, float, float | None, str]]:
    """Each figure of held-out rows with the best that is known, and how far it is from there."""
    if (auc := quality.auc) is not None:
        yield "AUC", auc, quality.best_auc, _share_of_way(auc, 0.5, quality.best_auc)
    loss, best = quality.log_loss, quality.best_log_loss
    if (bits := quality.bits_per_byte) is not None:
        best_bits = None if best is None else best / math.log(2)
        yield "Nats per token", loss, best, _beyond(loss, best, "nats")
        yield "Bits per byte", bits, best_bits, _beyond(bits, best_bits, "bits")
        return
    yield "Log-loss", loss, best, _beyond(loss, best, "nats")
    if (share := quality.accuracy) is not None and quality.majority is not None:
        best = quality.best_accuracy
        yield "Accuracy", share, best, _share_of_way(share, quality.majority, best)
    if (entropy := quality.normalized_entropy) is not None:
        yield "Normalized entropy", entropy, None, "1 is the share of clicks alone"
    if (clicks := quality.calibration) is not None:
        yield "Calibration", clicks, 1.0, f"{percent(clicks - 1, signed=True)} of clicks"


def _share_of_way(reached: float, start: float, best: float | None) -> str:
    if best is None or best <= start:
        return "-"
    return f"{percent((reached - start) / (best - start))} of the way from {start:.4g} to the best"


def _beyond(reached: float, best: float | None, unit: str) -> str:
    return "-" if best is None else f"{reached - best:+.4f} {unit} from the best"


def _held_out_sheet(quality: Quality, of: str = "") -> Sheet:
    """Held-out figures beside the optimum; AUC also as a share of the way from chance."""
    of_text = quality.bits_per_byte is not None
    note = (
        "The best possible is known where the text was made up: no model of what came before can "
        "do better."
        if of_text
        else "AUC does not depend on how rare clicks are: 0.5 is guessing. The best possible is "
        "known where the rows were generated from a known click model."
    )
    return Sheet(
        f"On {counted(quality.rows, 'held-out token' if of_text else 'held-out row')}{of}",
        (
            Column("figure"),
            Column("reached", numeric=True),
            Column("best possible", numeric=True),
            Column("how far"),
        ),
        tuple(
            (name, f"{reached:.4f}", "not known" if best is None else f"{best:.4f}", far)
            for name, reached, best, far in reached(quality)
        ),
        note,
    )
