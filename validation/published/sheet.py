"""The comparison as a page: figures only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from published.fit import LEFT_OUT, table

MIB = 2**20
INTRODUCTION = """# Predicted beside published memory

Made by `PYTHONPATH=validation python -m published FILE.json -o DIR` from measurements that others
have published; this page carries figures only. Sizes are MiB, errors signed shares of the
measurement.
"""


def page(result: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> str:
    """The whole page in Markdown; ``others`` are results that stand beside it, by their files."""
    parts = [INTRODUCTION, "## Errors", _distributions(result["distribution"])]
    floor = result["noise_floor"]
    if floor["tests"]:
        parts.append(
            f"Noise floor: {floor['tests']} tests were measured more than once; their spread is "
            f"{_percent(floor['median'])} in the median, {_percent(floor['p90'])} at the 90th "
            f"percentile, {_percent(floor['worst'])} at worst."
        )
    fit = result["fit_check"]
    parts.append(
        f"{fit['measured_above_device']} of {fit['checked']} rows measured above their device's "
        f"memory; {len(fit['called_a_fit'])} of them are called a fit."
    )
    parts += ["## Taken from measurements", _fitted(result["fitted_on"])]
    parts += ["## Caveats", "\n".join(f"- {caveat}" for caveat in result["caveats"])]
    for name, section in SECTIONS.items():
        if others and name in others:
            parts += section(others[name])
    parts += ["## Rows", _rows(result["rows"]), "## Left out"]
    parts += [_counted(result), _left_out(result["left_out"])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _percent(share: float | None, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{share * 100:+.1f} %" if signed else f"{share * 100:.1f} %"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    out = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    out += ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
    return "\n".join(out)


def _seconds(fit: Mapping[str, Any]) -> list[str]:
    """What a clock is worth on rows that were left out, and its constants."""
    classes = fit["classes"]
    names = {key: None for each in classes.values() for key in each["constants"]}
    lines = [
        (name, *(f"{each['constants'][name]:.3g}" for each in classes.values())) for name in names
    ]
    lines.append(("range", *(f"{each['range']:.3g}" for each in classes.values())))
    told = [
        (title, name, str(its["rows"]), *(_percent(its[key]) for key in ("median", "p90")))
        for left, title in LEFT_OUT.items()
        for each in classes.values()
        for name, its in each.get(left, {}).get("sources", {}).items()
    ]
    return [
        "## Seconds of steps",
        "Made by `PYTHONPATH=src:validation python -m published.fit -o clock_fit.json` from the "
        "steps in `time_rows.json`; medians of sources, and every source:",
        table(fit["shown"]),
        _table(("left out", "source", "rows", "median", "90th percentile"), told),
        "Constants of a class of devices:",
        _table(("constant", *classes), lines),
    ]


def _fits(found: Mapping[str, Any]) -> list[str]:
    """Layouts that are told right, and of the others why each is not."""
    lines = [
        (title, str(found[key]["rows"]), str(found[key]["right"]), _percent(found[key]["share"]))
        for key, title in (("ran", "ran"), ("ran_out", "ran out of memory"))
    ]
    kinds = found["kinds"].items()
    return [
        "## Layouts that ran or ran out of memory",
        "Made by `PYTHONPATH=src:validation python -m published.fits -o fits.json` from the "
        "layouts in `fits_rows.json`. No peak of what ran is predicted above "
        f"{found['highest_that_ran']:.3f} of its card.",
        _table(("layouts that", "n", "told right", "share"), lines),
        "The others, by what they are:",
        _table(("kind", "layouts"), ((kind, str(count)) for kind, count in kinds)),
    ]


SECTIONS = {"clock_fit": _seconds, "fits": _fits}


def _distributions(distribution: Mapping[str, Any]) -> str:
    named = [("all", distribution["all"])]
    named += distribution["by_framework"].items()
    named += distribution["by_family"].items()
    return _table(
        ("rows", "n", "median", "90th percentile", "worst", "worst row"),
        (
            (
                name,
                str(d["n"]),
                _percent(d["median"]),
                _percent(d["p90"]),
                _percent(d["worst"]),
                _short(d["worst_row"] or ""),
            )
            for name, d in named
        ),
    )


def _fitted(fitted: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ("what", "value", "rows"),
        ((f["what"], f["value"], ", ".join(f["rows"])) for f in fitted),
    )


def _rows(rows: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ("row", "measured", "predicted", "error", "verdict"),
        (
            (
                _short(row["source"]),
                f"{row['measured_bytes'] / MIB:,.0f}",
                f"{row['predicted_bytes'] / MIB:,.0f}",
                _percent(row["error"], signed=True),
                row["verdict"],
            )
            for row in rows
        ),
    )


def _counted(result: Mapping[str, Any]) -> str:
    told, left = (Counter(row["framework"] for row in result[k]) for k in ("rows", "left_out"))
    return "\n".join(
        f"- {name}: {told[name]} of {told[name] + left[name]} rows are predicted" for name in told
    )


def _left_out(rows: Iterable[Mapping[str, Any]]) -> str:
    return _table(("row", "reason"), ((_short(row["source"]), row["reason"]) for row in rows))


def _short(source: str) -> str:
    """A source without what all of them share."""
    path = source.split("/test_cases/", 1)[-1]
    return path.replace("golden_values_", "").removesuffix(".json")
