"""``shardwright explain plan.json [--tensor T] [--rank R] [--why-not TYPE]``."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.amount import Step
from shardwright.core.errors import InputError, expected
from shardwright.core.model import ShardingType
from shardwright.core.plan import Plan, read_plan
from shardwright.core.specs import model_spec
from shardwright.core.timeline import PHASES, decode, phase_peaks, phase_seconds
from shardwright.core.units import format_bytes
from shardwright.planner import explain

SHARDING_TYPES = typing.get_args(ShardingType)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``explain``."""
    parser.add_argument("plan", type=Path, metavar="plan.json")
    parser.add_argument("--tensor", metavar="T", help="a table, a unit, or a dense tensor")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank")
    parser.add_argument("--why-not", metavar="TYPE", help="what TYPE would do to --tensor")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Recompute and print; a number that comes out otherwise than stored is exit 4."""
    plan = read_plan(options.plan, model_spec)
    if options.rank is not None and not 0 <= options.rank < plan.world_size:
        raise InputError(expected("--rank", f"0 to {plan.world_size - 1}", str(options.rank)))
    if options.why_not:
        return _why_not(plan, options)
    if options.tensor is not None:
        found = explain.explain_tensor(plan, options.tensor)
        if options.rank is not None:
            found = [e for e in found if f"on rank {options.rank}:" in e.title]
        if options.json:
            shared.print_json([_as_json(e) for e in found])
        else:
            print("\n\n".join(_text(e) for e in found))
        return 0
    explain.draft_of(plan)
    if options.json:
        shared.print_json({"basis": basis(plan), "ranks": plan.ranks})
    else:
        print("\n".join([*basis(plan), "", *_ranks(plan, options.rank)]))
    return 0


def basis(plan: Plan) -> list[str]:
    """What a reader must know first, and where it came from."""
    job, cluster = plan.job, plan.cluster
    lines = [
        f"model       {job.model.kind}, {len(plan.tables)} tables (fp32, one id per sample), "
        f"units {', '.join(u.name for u in plan.units)} (fp32)",
        f"optimizer   {job.train.optimizer} for units; "
        f"{', '.join(sorted({t.optimizer for t in plan.tables}))} for tables, fused in backward",
        f"batch       {job.batch.size} samples per rank, {plan.world_size} ranks",
        f"memory      {cluster.memory_per_rank:,} B per rank "
        f"({format_bytes(cluster.memory_per_rank)}), {cluster.compute_device}",
        "peak        highest live bytes of weights, gradients, states, buffers, activations, "
        "exchanges and batch in a steady step",
        f"constants   preset '{cluster.name}':",
    ]
    for name, c in cluster.constants.items():
        lines.append(f"  {name:<18} {c.value:>10.4g} {c.unit:<7} {c.source}, {c.date}")
    return lines


def _ranks(plan: Plan, wanted: int | None) -> list[str]:
    events = decode(plan.timeline)
    peaks, seconds = phase_peaks(events), phase_seconds(events)
    lines = []
    for totals in plan.ranks:
        rank = totals.rank
        if wanted not in (None, rank):
            continue
        lines.append(f"rank {rank}: peak {totals.peak_bytes:,} B in {totals.peak_phase}")
        parts = " + ".join(f"{kind} {size:,}" for kind, size in totals.at_peak.items() if size)
        lines.append(f"  = {parts}")
        terms = [f"{p} {seconds[rank, p]:.6f}" for p in PHASES if (rank, p) in seconds]
        lines.append(f"rank {rank}: {totals.seconds:.6f} s per step = {' + '.join(terms)}")
        for phase in PHASES:
            if (rank, phase) in peaks:
                total = sum(peaks[rank, phase].values())
                lines.append(f"  {phase:<14} peak {total:>15,} B  ({format_bytes(total)})")
    lines.append("")
    lines.append("Every step of one number: shardwright explain plan.json --tensor NAME")
    return lines


def _text(explanation: explain.Explanation) -> str:
    value = explanation.stored
    shown = f"{value:,} B ({format_bytes(value)})" if explanation.unit == "B" else f"{value:.9g} s"
    lines = [f"{explanation.title} = {shown}"]
    width = max(len(step.name) for step in explanation.steps)
    lines += [f"  {_line(step, width)}" for step in explanation.steps]
    return "\n".join(lines)


def _line(step: Step, width: int) -> str:
    unit = f" {step.unit}" if step.unit else ""
    if not step.formula:
        source = f"   [{step.source}]" if step.source else ""
        return f"{step.name:<{width}} = {step.value}{unit}{source}"
    numbers = f" = {step.numbers}" if step.numbers != step.formula else ""
    same = f" = {step.value}" if step.numbers != repr(step.value) else ""
    return f"{step.name:<{width}} = {step.formula}{numbers}{same}{unit}"


def _as_json(explanation: explain.Explanation) -> dict[str, object]:
    return {
        "title": explanation.title,
        "value": explanation.steps[-1].value,
        "unit": explanation.unit,
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


def _why_not(plan: Plan, options: argparse.Namespace) -> int:
    if options.tensor is None:
        raise InputError(
            expected("--why-not", "a table named by --tensor", "none", "Add --tensor NAME.")
        )
    if options.why_not not in SHARDING_TYPES:
        raise InputError(
            expected("--why-not", f"one of {', '.join(SHARDING_TYPES)}", f"'{options.why_not}'")
        )
    found = explain.why_not(plan, options.tensor, options.why_not)
    if options.json:
        shared.print_json(
            {
                "table": found.table,
                "chosen": found.chosen,
                "wanted": found.wanted,
                "reason": found.reason,
            }
        )
    else:
        print(f"{found.table} is {found.chosen}. {found.reason}")
    return 0
