"""``PYTHONPATH=validation python -m published.fit [FILE.json] [-o FILE.json]``: the constants of a
clock, fitted to step times that others published, and what they are worth on rows left out.

Seconds follow from features (:mod:`published.clock`), which are kept in ``--features`` so that a
second fit takes seconds. Constants are fitted on a scale of logarithms to the logarithm of what is
predicted over what was measured. Every source has one vote, however many rows it has, and every
constant a prior that weighs as much as one more row or two: what no row tells stays where it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import shardwright
from published.clock import Array, Rows, features
from published.times import CHANGED, job_of, ordered, read_rows, same_job, why_not
from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_OK, InputError, ShardwrightError, expected
from shardwright.core.outputs import FileKind, check_output
from shardwright.job.job import parse_job

HERE = Path(__file__).parent
FIT = FileKind("fit of a clock", re.compile(rb'\{\s*"shown": \{'))
# Of each constant a prior: where it is expected, by how much its logarithm may lie beside that, and
# the most that it can mean.
PRIORS: dict[str, tuple[float, float, float]] = {
    "product_efficiency": (0.75, 0.15, 1.0),
    "product_half_size": (300.0, 0.7, 4000.0),
    "attention_efficiency": (0.45, 0.4, 1.0),
    "memory_efficiency": (0.8, 0.2, 1.0),
    "launch_latency": (1e-5, 0.7, 1e-4),
    "interleaves": (0.15, 0.6, 1.0),
    "link_efficiency": (0.75, 0.25, 1.0),
    "network_efficiency": (0.7, 0.25, 1.0),
    "replica_efficiency": (0.4, 0.7, 1.0),
    "collective_latency": (15e-6, 0.7, 1e-3),
    "hides": (0.8, 0.2, 1.0),
    "slows": (0.15, 0.6, 1.0),
    "step_latency": (0.02, 0.8, 1.0),
}
NOISE = 0.05  # of one configuration in several versions of a framework
BEYOND = 0.1  # errors above it count by their size and not by its square
WEIGHT = 30.0  # rows that a source counts for
CLASSES = {
    "A100": ("A100-80", "A100-40", "A100-vtrain1"),
    "H100": ("H100-80", "H100-96-500W", "H200"),
}
ANYWHERE = "elsewhere"  # what fits both, for devices of which nobody published enough
FOLDS = 5
WALKS = 3
DRAWS = 10
# What kernels compute or what launches take: a fit may stay on either side of it.
LAUNCHES = (5e-6, 4e-5)
SPAN = 0.8  # of unseen rows that a range is to hold


STATED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "experts": lambda row: bool(row["experts"]),
    "fp8": lambda row: row["dtype"].startswith("fp8") and "200" not in row["gpu"],
    "Blackwell": lambda row: row["gpu"] in ("B200", "GB200"),
}


class Row(NamedTuple):
    """A published row, its features, and where they stand among all."""

    row: Mapping[str, Any]
    told: dict[str, Any]

    @property
    def source(self) -> str:
        """Who measured it, on what."""
        return f"{self.row['source']}, {self.row['gpu']}"

    @property
    def job(self) -> tuple[Any, ...]:
        """What layouts of it have in common."""
        return tuple(self.row[key] for key in ("source", "gpu", "model", "gpus", "seq"))

    @property
    def is_fitted(self) -> bool:
        """Dense and in 16 bits, with all that decides its seconds stated."""
        dense = not self.row["experts"] and self.row["dtype"] in ("bf16", "fp16")
        return dense and "recipe" not in self.row["checkpointing"]


Constants = dict[str, float]


def seconds_of(rows: Sequence[Row], c: Constants) -> Array:
    """What the constants say of rows."""
    table = Rows([row.told for row in rows])
    table.walk(c)
    return table.predicted(c)


def fitted(rows: Sequence[Row], prior: Constants, walks: bool = False) -> Constants:
    """The constants that fit rows best, beside a prior. The longest path of a pipeline depends on
    the constants, too, but little: it is walked anew where ``walks``, else it is the last one."""
    table, c = Rows([row.told for row in rows]), dict(prior)
    measured = np.array([row.row["step_time_s"] for row in rows])
    votes = Counter(row.source for row in rows)
    most = WEIGHT if len(votes) > 1 else len(rows)  # where there is one source its rows have theirs
    weight = np.array([min(most / votes[row.source], 1.0) for row in rows])
    for _ in range(WALKS if walks else 1):
        if walks:
            table.walk(c)
        starts = [{**c, "launch_latency": launch} for launch in LAUNCHES]
        found = [_descended(table, measured, weight, prior, start) for start in starts]
        c = min(found, key=lambda each: each[1])[0]
    return c


def _descended(
    table: Rows, measured: Array, weight: Array, prior: Constants, start: Constants
) -> tuple[Constants, float]:
    """Where Levenberg and Marquardt's way down ends, with the paths as they are, and how high."""
    names = list(PRIORS)
    wide = np.array([PRIORS[name][1] for name in names])
    most = np.log([PRIORS[name][2] for name in names])
    centre = np.log([prior[name] for name in names])

    def constants(x: Array) -> Constants:
        return dict(zip(names, np.exp(np.minimum(x, most)).tolist(), strict=True))

    def residuals(x: Array) -> Array:
        off = np.log(table.predicted(constants(x)) / measured)
        # Pseudo-Huber: far rows pull by their distance, not by its square.
        bent = np.sign(off) * BEYOND * np.sqrt(2 * (np.sqrt(1 + (off / BEYOND) ** 2) - 1))
        return np.concatenate([np.sqrt(weight) * bent / NOISE, (x - centre) / wide])

    x = np.minimum(np.log([start[name] for name in names]), most)
    found, damping = residuals(x), 1e-2
    for _ in range(100):
        # Towards smaller values, for a constant may be the most that it can mean.
        steps = np.eye(len(names)) * 1e-4
        slopes = np.array([(found - residuals(x - step)) / 1e-4 for step in steps]).T
        gradient = slopes.T @ found
        # What is at its most and would rise stays there: others are not moved as if it rose.
        free = ~((x >= most - 1e-9) & (gradient < 0))
        normal = slopes.T @ slopes
        moved = False
        while damping < 1e8:
            step = np.zeros(len(names))
            inner = normal[np.ix_(free, free)]
            damped = inner + damping * np.diag(np.diag(inner))
            step[free] = np.linalg.solve(damped, -gradient[free])
            tried = residuals(np.minimum(x + step, most))
            if tried @ tried < found @ found:
                gain = 1 - (tried @ tried) / (found @ found)
                x, found, damping, moved = np.minimum(x + step, most), tried, damping / 5, True
                break
            damping *= 4
        if not moved or gain < 1e-6:
            break
    return constants(x), float(found @ found)


# ---- what is left out ----------------------------------------------------------------------------


def left_out_rows(rows: Sequence[Row], prior: Constants) -> dict[int, tuple[Row, float]]:
    """Every row with what other sources predict of it."""
    found = {}
    for source in dict.fromkeys(row.source for row in rows):
        kept = [row for row in rows if row.source != source]
        out = [row for row in rows if row.source == source]
        for row, seconds in zip(out, seconds_of(out, fitted(kept, prior)), strict=True):
            found[id(row)] = row, float(seconds)
    return found


def by_jobs(rows: Sequence[Row], prior: Constants) -> dict[int, tuple[Row, float]]:
    """Every row of a source with several jobs, predicted by what fits other sources and then its
    other jobs."""
    found = {}
    for source in dict.fromkeys(row.source for row in rows):
        its = [row for row in rows if row.source == source]
        jobs = list(dict.fromkeys(row.job for row in its))
        if len(jobs) < 3:
            continue
        elsewhere = fitted([row for row in rows if row.source != source], prior)
        fold = {job: place % FOLDS for place, job in enumerate(jobs)}
        for part in range(min(FOLDS, len(jobs))):
            kept = [row for row in its if fold[row.job] != part]
            out = [row for row in its if fold[row.job] == part]
            for row, seconds in zip(out, seconds_of(out, fitted(kept, elsewhere)), strict=True):
                found[id(row)] = row, float(seconds)
    return found


def scaled(told: Iterable[tuple[Row, float]]) -> list[tuple[Row, float]]:
    """Rows, each predicted with the factor that one other row of its source and model sets: every
    other in turn, up to ten, each a draw of its own."""
    groups = defaultdict(list)
    for row, seconds in told:
        groups[row.source, row.row["model"]].append((row, seconds))
    found = []
    for its in groups.values():
        for draw, (sets, seconds) in enumerate(its[:: max(len(its) // DRAWS, 1)][:DRAWS]):
            factor = sets.row["step_time_s"] / seconds
            for row, other in its:
                if row is not sets:
                    drawn = {**row.row, "framework": f"{row.row['framework']}, draw {draw}"}
                    found.append((Row(drawn, row.told), other * factor))
    return found


def judged(told: Iterable[tuple[Row, float]]) -> dict[str, Any]:
    """Errors, pairs in order and what choosing costs, source by source, and medians of sources."""
    sources = defaultdict(list)
    for row, seconds in told:
        sources[row.source].append((row, seconds))
    each = {name: _of_source(its) for name, its in sorted(sources.items())}
    middle = {
        key: round(statistics.median(values), 4)
        for key in ("median", "p90", "in_order", "chosen", "chosen_p90")
        if (values := [found[key] for found in each.values() if found.get(key) is not None])
    }
    return {"median_of_sources": middle, "sources": each}


def _of_source(told: Sequence[tuple[Row, float]]) -> dict[str, Any]:
    off = [abs(seconds / row.row["step_time_s"] - 1) for row, seconds in told]
    beside = [
        {**row.row, "measured": row.row["step_time_s"], "predicted": seconds}
        for row, seconds in told
    ]
    right, pairs = ordered(beside)
    found: dict[str, Any] = {
        "rows": len(off),
        "median": round(statistics.median(off), 4),
        "p90": round(float(np.quantile(off, 0.9)), 4),
        "bias": round(statistics.median(s / r.row["step_time_s"] - 1 for r, s in told), 4),
        "pairs": pairs,
    }
    if pairs >= 5:
        found["in_order"] = round(right / pairs, 4)
    costs = _chosen(beside)
    if costs:
        found["choices"] = len(costs)
        found["chosen"] = round(statistics.median(costs), 4)
        found["chosen_p90"] = round(float(np.quantile(costs, 0.9)), 4)
    return found


def _chosen(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of jobs with at least three layouts: by how much the one predicted fastest is slower than the
    fastest."""
    jobs = defaultdict(list)
    for row in rows:
        jobs[same_job(row)].append(row)
    return [
        min(its, key=lambda row: row["predicted"])["measured"] / min(r["measured"] for r in its) - 1
        for its in jobs.values()
        if len(its) >= 3
    ]


def range_of(told: Iterable[tuple[Row, float]], share: float) -> float:
    """By which rows are faster or slower than predicted at most, but for 1 - ``share`` of them,
    each source with one vote."""
    rows = list(told)
    votes = Counter(row.source for row, _ in rows)
    off = sorted(
        (abs(float(np.log(seconds / row.row["step_time_s"]))), 1 / votes[row.source])
        for row, seconds in rows
    )
    left = share * len(votes)
    for each, vote in off:
        left -= vote
        if left <= 1e-9:
            return float(np.exp(each) - 1)
    return float(np.exp(off[-1][0]) - 1)


def held(told: Iterable[tuple[Row, float]], most: float) -> dict[str, float]:
    """Which share of rows lies within a range: of all, and of every source in the mean."""
    sources = defaultdict(list)
    for row, seconds in told:
        sources[row.source].append(
            float(abs(np.log(seconds / row.row["step_time_s"])) <= np.log(1 + most))
        )
    every = [inside for its in sources.values() for inside in its]
    mean = statistics.mean(statistics.mean(its) for its in sources.values())
    return {"rows": round(statistics.mean(every), 3), "sources": round(mean, 3)}


# ---- the command ---------------------------------------------------------------------------------


def told_of(document: Any, where: str, kept: Path | None) -> tuple[list[Row], dict[str, int]]:
    """Rows with their features, and why others have none; features are read from where they were
    ``kept`` as far as they are there, and added."""
    known: dict[str, Any] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            known |= json.loads(line)
    found, left_out, new = [], Counter[str](), []
    code = _code()
    for row in read_rows(document, where):
        why = why_not(row)
        if why:
            left_out[why] += 1
            continue
        job, changed = job_of(row), CHANGED.get(row["gpu"], {})
        key = hashlib.sha256(json.dumps([code, job, changed]).encode()).hexdigest()
        if key not in known:
            try:
                known[key] = features(parse_job(job), changed)
            except ShardwrightError as error:
                known[key] = {"why": re.sub(r"\d+", "N", str(error))}
            new.append(json.dumps({key: known[key]}))
            if len(new) % 50 == 0:
                print(f"{len(new)} rows recorded", file=sys.stderr)
        if "why" in known[key]:
            left_out[known[key]["why"]] += 1
        else:
            found.append(Row(row, known[key]))
    if kept is not None and new:
        with kept.open("a", encoding="utf-8") as file:
            file.write("\n".join(new) + "\n")
    return found, dict(left_out)


def _code() -> str:
    """Of all that recordings and prices are made by."""
    package = Path(shardwright.__file__).parent
    folders = ("core", "cost", "estimate", "heap", "job", "models", "trace")
    digest = hashlib.sha256((HERE / "clock.py").read_bytes())
    for path in sorted(path for each in folders for path in (package / each).rglob("*.py")):
        if path.name != "presets.py":  # whose fitted constants are what is looked for
            digest.update(path.read_bytes())
    return digest.hexdigest()


def result(rows: Sequence[Row], left_out: Mapping[str, int]) -> dict[str, Any]:
    """The constants of each class of devices, and what they are worth on rows left out."""
    usual = {name: prior for name, (prior, *_) in PRIORS.items()}
    dense = [row for row in rows if row.is_fitted]
    of_class = {
        name: [row for row in dense if row.row["gpu"] in gpus] for name, gpus in CLASSES.items()
    }
    everywhere = fitted(dense, usual, walks=True)
    classes: dict[str, Any] = {}
    for name, its in of_class.items():
        others = [row for row in dense if row.row["gpu"] not in CLASSES[name]]
        # What other devices say is the prior of this one: each says something of kernels, too.
        prior = fitted(others, usual)
        unseen = left_out_rows(its, prior)
        own = by_jobs(its, prior)
        # A run that nobody measured may be of a source like these, or of another one: of both kinds
        # there are as many here.
        most = range_of([*unseen.values(), *own.values()], SPAN)
        classes[name] = {
            "devices": list(CLASSES[name]),
            "rows": dict(Counter(row.source for row in its)),
            "constants": fitted(its, prior),
            "range": most,
            "held": {"source": held(unseen.values(), most), "job": held(own.values(), most)},
            "source": judged(unseen.values()),
            "scaled": judged(scaled(unseen.values())),
            "job": judged(own.values()),
            "fitted": judged(zip(its, seconds_of(its, fitted(its, prior)), strict=True)),
        }
    classes[ANYWHERE] = {"constants": everywhere, **_elsewhere(rows, of_class, usual, everywhere)}
    return {"shown": shown(classes), "classes": classes, "left_out": dict(left_out)}


def _elsewhere(
    rows: Sequence[Row],
    of_class: Mapping[str, Sequence[Row]],
    usual: Constants,
    everywhere: Constants,
) -> dict[str, Any]:
    """The range of a device that no row is of, from rows of each class by the other's constants,
    and what is predicted of rows that nothing is fitted to."""
    crossed = []
    for name, its in of_class.items():
        others = [row for other, rest in of_class.items() if other != name for row in rest]
        crossed += list(zip(its, seconds_of(its, fitted(others, usual)).tolist(), strict=True))
    rest = [row for row in rows if not row.is_fitted or not _class_of(row)]
    fits = {name: fitted(its, usual) for name, its in of_class.items()}
    stated = {}
    for name, chosen in STATED.items():
        its = [row for row in rest if chosen(row.row)]
        if its:
            own = [fits.get(_class_of(row), everywhere) for row in its]
            told = [(r, float(seconds_of([r], c)[0])) for r, c in zip(its, own, strict=True)]
            stated[name] = judged(told)
    return {
        "range": range_of(crossed, SPAN),
        "crossed": judged(crossed)["median_of_sources"],
        "stated": stated,
    }


def _class_of(row: Row) -> str:
    return next((name for name, gpus in CLASSES.items() if row.row["gpu"] in gpus), "")


LEFT_OUT = {
    "source": "the source left out whole",
    "scaled": "and one of its rows a model sets the scale",
    "job": "fitted on other jobs of the source",
}


def shown(classes: Mapping[str, Any]) -> dict[str, Any]:
    """By what is left out the medians of sources of all classes, each with one vote, in percent."""
    found = {}
    for key in LEFT_OUT:
        values = defaultdict(list)
        for each in classes.values():
            for its in each.get(key, {}).get("sources", {}).values():
                for name, value in its.items():
                    values[name].append(value)
        middle = {name: 100 * statistics.median(its) for name, its in values.items()}
        keys = ("median", "p90", "in_order", "chosen", "chosen_p90")
        found[key] = {name: middle[name] for name in keys if name in middle}
        found[key] |= {"sources": len(values["rows"]), "rows": sum(values["rows"])}
    return found


def table(found: Mapping[str, Any]) -> str:
    """The lines of :func:`shown`; a dash where no source has as many layouts of a job."""
    lines = ["| left out | error: median / p90 | pairs in order | chosen over best: median / p90 |"]
    lines.append("| --- | --- | --- | --- |")
    for key, title in LEFT_OUT.items():
        its = defaultdict(lambda: float("nan"), found[key])
        lines.append(
            f"| {title} ({its['sources']} sources) | {its['median']:.1f} / {its['p90']:.1f} % "
            f"| {its['in_order']:.1f} % | {its['chosen']:.1f} / {its['chosen_p90']:.1f} % |"
        )
    return "\n".join(lines).replace("nan", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m published.fit", description=__doc__)
    rows = HERE / "time_rows.json"
    parser.add_argument("file", type=Path, nargs="*", default=[rows], help="JSON with rows")
    parser.add_argument("-o", "--out", type=Path, help="file for constants and errors")
    parser.add_argument("--features", type=Path, help="file that keeps features for another fit")
    options = parser.parse_args(arguments)
    try:
        if options.out:
            check_output(options.out, FIT, options.file, "--out")
        told: list[Row] = []
        left_out = Counter[str]()
        for path in options.file:
            document = json.loads(path.read_text(encoding="utf-8"))
            its, others = told_of(document, path.name, options.features)
            told += its
            left_out.update(others)
        found = _rounded(result(told, left_out))
        if options.out:
            write_atomically(options.out, (json.dumps(found, indent=1) + "\n").encode())
    except (OSError, ValueError) as error:
        if not isinstance(error, ShardwrightError):
            error = InputError(expected("file", "JSON with rows that can be read", str(error)))
        print(f"shardwright: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    print(table(found["shown"]))
    return EXIT_OK


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
