"""``shardwright explain plan.json|MODEL [--unit U] [--statistic NAME] [--why-not WAY]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET

from shardwright.cli import options as shared
from shardwright.cli.planning import SearchListener, planned
from shardwright.core.amount import Step
from shardwright.core.cluster import TIERS
from shardwright.core.errors import InputError, expected
from shardwright.core.model import ModelSpec
from shardwright.core.quantities import exact_bytes, format_bytes, format_seconds
from shardwright.core.timeline import PHASES, decode, phase_peaks
from shardwright.job.job import Job
from shardwright.job.model_of_job import model_of
from shardwright.job.plan import Plan, RankTotals, read_plan
from shardwright.planner import explain
from shardwright.planner.search.watch import Watch
from shardwright.planner.statistics.ranks import parts_of
from shardwright.planner.variation import ModelOf
from shardwright.report.plan_sheets import fits_line
from shardwright.report.wording import (
    NO_BREAK,
    TEXT_LIMIT,
    printable,
    ranks_text,
    unbroken,
    unit_words,
)

MOST_GROUPS = 8  # of ranks that are alike
SCREEN = 40  # lines of a statistic, unless all steps are asked for
MOST_INPUTS = 3  # of each number of a statistic that takes more
FORMULA_LIMIT = 20 * TEXT_LIMIT
DIGITS = 4  # of numbers that are not exact
INEXACT = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")
NOISE = 1e-12  # shares below this are rounding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``explain``."""
    shared.job_argument(parser, also_plan=True)
    parser.add_argument("--tensor", "--unit", metavar="T", help="a table, a unit, a dense tensor")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank")
    parser.add_argument(
        "--why-not",
        metavar="WAY",
        help="what WAY would do to --tensor: a sharding type or a kernel to a table; to a unit "
        + ", ".join(explain.WAYS),
    )
    parser.add_argument(
        "--statistic", metavar="NAME", help=f"one of {', '.join(explain.STATISTICS)}"
    )
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run the function that model.python of the plan names, where --why-not or a table "
        "needs the model: a plan of somebody else's can name any",
    )
    parser.add_argument("--full", action="store_true", help="every step of a long statistic")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Recompute and print; a number that comes out otherwise than stored is exit 4."""
    plan = _plan_of(options)
    if options.rank is not None and not 0 <= options.rank < plan.world_size:
        raise InputError(expected("--rank", f"0 to {plan.world_size - 1}", str(options.rank)))
    if options.why_not and options.statistic:
        raise InputError(expected("--why-not", "no --statistic beside it", options.statistic))
    if options.why_not:
        _why_not(plan, options)
    elif options.statistic is not None:
        found = explain.explain_statistic(
            plan, options.statistic, rank=options.rank, table=options.tensor
        )
        _show(found, options)
    elif options.tensor is not None:
        found = explain.explain_tensor(plan, options.tensor, _again(plan, options))
        if options.rank is not None:
            lies = sorted({rank for e in found for rank in e.ranks})
            found = [e for e in found if options.rank in e.ranks]
            if not found and not options.json:
                where = ranks_text(lies, plan.world_size)
                print(f"{printable(options.tensor)} has nothing on rank {options.rank}: {where}.")
                return 0
        _show(found, options)
    else:
        _overview(plan, options)
    return 0


def _plan_of(options: argparse.Namespace) -> Plan:
    """The plan of a file, or of a job that is planned for it, whose code may then run again."""
    if options.job.suffix == ".json":
        return read_plan(options.job, check=True)
    options.allow_code = True
    return planned(shared.job_of(options))


def _show(found: Sequence[explain.Explanation], options: argparse.Namespace) -> None:
    if options.json:
        shared.print_json([_as_json(e) for e in found])
        return
    from shardwright.report.table import equations

    texts = ["\n\n".join(equations(_lines(e)) for e in found)]
    if options.statistic is not None and not options.full and _height(texts[0]) > SCREEN:
        texts = [_short(found, most) for most in (*range(MOST_INPUTS, -1, -1), None)]
    print(next((text for text in texts if _height(text) <= SCREEN), texts[-1]))


def _height(text: str) -> int:
    return text.count("\n") + 1


def _short(found: Sequence[explain.Explanation], most: int | None) -> str:
    """Each number with its ``most`` largest inputs, or where that is None as many numbers as a
    screen takes."""
    from shardwright.report.table import equations

    parts, room = [], SCREEN - 2
    for each in found:
        text = equations([_heading(each), *_inputs(each, most or 0)])
        room -= _height(text)
        if most is None and room < 0:
            break
        parts.append(text)
    left = f"{len(found) - len(parts):,} more numbers and e" if len(parts) < len(found) else "E"
    return "\n".join([*parts, "", f"{left}very step: --full. All digits: --json."])


def _inputs(explanation: explain.Explanation, most: int) -> list[str]:
    """The largest of what adds up to a number, and how many others there are."""
    inputs = [s for s in explanation.steps if not s.formula and s.unit == explanation.unit]
    inputs.sort(key=lambda step: -abs(step.value))
    shown = inputs[:most]
    width = max((len(step.name) for step in shown), default=0)
    lines = [f"  {_line(step, width)}" for step in shown]
    left = len(inputs) - len(shown)
    return [*lines, f"  and {left:,} smaller"] if shown and left else lines


def _overview(plan: Plan, options: argparse.Namespace) -> None:
    explain.draft_of(plan)
    facts = explain.basis(plan)
    if options.json:
        shared.print_json(
            {"basis": facts, "constants": plan.cluster.constants, "ranks": plan.ranks}
        )
        return
    lines = [*_basis(facts), *_constants(plan), "", *_ranks(plan, options.rank), ""]
    lines.append("Every step of one number: shardwright explain plan.json --tensor NAME")
    lines.append("Of a statistic: --statistic NAME. Another way to shard: --tensor NAME --why-not")
    from shardwright.report.table import equations

    print(equations(lines))


def _basis(facts: Iterable[explain.Fact]) -> list[str]:
    """What a reader must know first, and where it came from."""
    facts = tuple(facts)
    width = max(len(fact.what) for fact in facts)
    return [
        f"{fact.what:<{width}}  {printable(fact.value, TEXT_LIMIT)}   "
        f"[{printable(fact.origin, TEXT_LIMIT)}]"
        for fact in facts
    ]


def _constants(plan: Plan) -> list[str]:
    names = plan.cluster.constants
    width = max(map(len, names), default=0)
    unit = max((len(c.unit) for c in names.values()), default=0)
    return [
        f"  {printable(name):<{width}} {c.value:>12.6g} {printable(c.unit):<{unit}} "
        f"{printable(c.source)}, {printable(c.date)}"
        for name, c in names.items()
    ]


def _ranks(plan: Plan, wanted: int | None) -> list[str]:
    """Each rank's seconds and bytes as sums; what is alike on several ranks is shown once."""
    peaks, order = phase_peaks(decode(plan.timeline)), tuple(parts_of(plan))
    ranks = [totals for totals in plan.ranks if wanted in (None, totals.rank)]
    slowest = sorted(ranks, key=lambda totals: (-totals.seconds, totals.rank))
    fullest = sorted(ranks, key=lambda totals: (-totals.peak_bytes, totals.rank))
    fits = [] if plan.needs is UNSET else [fits_line(plan)]  # else the peak below is all there is
    return [
        *fits,
        *_grouped([(totals.rank, _seconds(totals, order)) for totals in slowest], "are faster"),
        *_grouped(
            [(totals.rank, _bytes(plan, totals, peaks)) for totals in fullest], "have lower peaks"
        ),
    ]


def _grouped(texts: Sequence[tuple[int, list[str]]], rest: str) -> list[str]:
    """What is shown of each rank; only the first groups where there are many."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in texts:
        groups.setdefault(tuple(lines), []).append(rank)
    shown = list(groups.items())[:MOST_GROUPS]
    found: list[str] = []
    for (first, *more), ranks in shown:
        many = f"ranks {ranks_text(ranks, world_size=0)}"
        found.append(f"{many if len(ranks) > 1 else f'rank {ranks[0]}'}: {first}")
        found += [f"  {line}" for line in more]
    left = len(texts) - sum(len(ranks) for _, ranks in shown)
    if left:
        found.append(f"{left} more ranks {rest}; one of them: --rank R")
    return found


def _seconds(totals: RankTotals, order: Sequence[str]) -> list[str]:
    parts = [f"{part} {totals.parts[part]:.9f}" for part in order if totals.parts.get(part)]
    return [f"{totals.seconds:.9f} s per step = {' + '.join(parts)}"]


def _bytes(
    plan: Plan, totals: RankTotals, peaks: Mapping[tuple[int, str], dict[str, int]]
) -> list[str]:
    """Bytes at the peak by kind, what is filled of each memory, and the peak of each phase."""
    phases = {p: sum(peaks[totals.rank, p].values()) for p in PHASES if (totals.rank, p) in peaks}
    where = f" in {printable(totals.peak_phase)}" if phases else ""
    kinds = " + ".join(f"{kind} {size:,}" for kind, size in totals.at_peak.items() if size)
    size = exact_bytes(totals.peak_bytes)
    lines = [f"peak {size}{where} = {kinds or 0}"]
    for tier in TIERS:
        filled = getattr(totals, f"{tier}_bytes")
        if filled:
            left = getattr(plan.reserved, f"{tier}_left")
            lines.append(f"{tier.upper()} {filled:,} B of {left:,} B that may be filled")
    lines += [f"{p:<14} peak {n:>15,} B  ({format_bytes(n)})" for p, n in phases.items()]
    return lines


def _heading(explanation: explain.Explanation) -> str:
    return f"{printable(explanation.title, TEXT_LIMIT)} ={NO_BREAK}{_value(explanation)}"


def _lines(explanation: explain.Explanation) -> list[str]:
    lines = [_heading(explanation)]
    lines += [f"  ({printable(note, TEXT_LIMIT)})" for note in explanation.notes]
    width = max(len(step.name) for step in explanation.steps)
    lines += [f"  {_line(step, width)}" for step in explanation.steps]
    return lines


def _value(explanation: explain.Explanation) -> str:
    value = explanation.stored
    if explanation.unit == "B" and value == int(value):
        return unbroken(exact_bytes(value))
    noise = not explanation.unit and abs(value) < NOISE
    return _figure(0.0 if noise else value, explanation.unit)


def _figure(value: object, unit: str) -> str:
    """A number with its unit; one that is not exact to a few digits."""
    if not isinstance(value, float):
        return unbroken(f"{value} {unit}" if unit else f"{value}")
    if unit == "s":
        return unbroken(format_seconds(value, DIGITS))
    words = unit_words(unit)
    return unbroken(f"{value:.{DIGITS}g} {words}" if unit else f"{value:.{DIGITS}g}")


def _line(step: Step, width: int) -> str:
    name, figure = printable(f"{step.name:<{width}}", TEXT_LIMIT), _figure(step.value, step.unit)
    if not step.formula:
        source = f"   [{printable(step.source, TEXT_LIMIT)}]" if step.source else ""
        return f"{name} = {figure}{source}"
    sides = [printable(step.formula, FORMULA_LIMIT)]
    if step.numbers != step.formula:
        sides.append(_rounded(step.numbers))
    if step.numbers != repr(step.value):
        return " = ".join([name, *sides, figure])
    return " = ".join([name, *sides]) + unbroken(f" {step.unit}" if step.unit else "")


def _rounded(numbers: str) -> str:
    """An expression of numbers, those that are not exact to a few digits."""
    return INEXACT.sub(lambda found: f"{float(found[0]):.{DIGITS}g}", numbers)


def _as_json(explanation: explain.Explanation) -> dict[str, object]:
    return {
        "title": explanation.title,
        "value": explanation.steps[-1].value,
        "unit": explanation.unit,
        "ranks": explanation.ranks,
        "notes": explanation.notes,
        "steps": [
            {
                "name": s.name,
                "formula": s.formula,
                "numbers": s.numbers,
                "value": s.value,
                "unit": s.unit,
                "source": s.source,
            }
            for s in explanation.steps
        ],
    }


def _check_code(plan: Plan, options: argparse.Namespace) -> None:
    """InputError where the plan's model is a function of somebody's, and nobody allowed it."""
    named = plan.job.model.python
    if isinstance(named, str) and not options.allow_code:
        raise InputError(
            expected(
                f"{options.job}: model.python",
                "a model that is recorded without code of others",
                f"'{named}', which this would import and call",
                "Add --allow-code if you trust it.",
            )
        )


def _again(plan: Plan, options: argparse.Namespace) -> ModelOf:
    """Records the plan's model, with the plan's tables, as a job says."""

    def described(job: Job) -> ModelSpec:
        _check_code(plan, options)
        from shardwright.estimate.recordings import recorded  # only such a question needs the model

        tables = (plan.recording.tables or ()) if plan.recording else ()
        return model_of(job, recorded(job, tuple(table.path for table in tables)))

    return described


def _why_not(plan: Plan, options: argparse.Namespace) -> None:
    if options.tensor is None:
        raise InputError(
            expected("--why-not", "a table or unit named by --tensor", "none", "Add --tensor NAME.")
        )
    _check_code(plan, options)  # a search takes what it cannot record for impossible
    with SearchListener(sys.stderr) as listener:
        again, watch = _again(plan, options), Watch(hear=listener)
        found = explain.why_not(plan, options.tensor, options.why_not, again, watch)
    if options.json:
        shared.print_json(
            {
                "unit" if found.wanted in explain.WAYS else "table": found.name,
                "chosen": found.chosen,
                "wanted": found.wanted,
                "verdict": found.verdict,
                "reason": found.reason,
                "option": found.option,
                "max_rank_seconds": found.seconds,
                "missing_bytes": found.missing,
                "replanned": _replanned(found),
            }
        )
    else:
        from shardwright.report.table import prose

        for line in found.lines:
            shared.show(prose(printable(line, 2 * TEXT_LIMIT)))


def _replanned(found: explain.WhyNot) -> dict[str, object] | None:
    """The plan with the rest free to move, by the names users script against."""
    anew = found.replanned
    return anew and {
        "max_rank_seconds": anew.seconds,
        "lower_bound_seconds": anew.bound,
        "option": anew.option,
        "cut_short": anew.cut,
        "reason": anew.reason,
    }
