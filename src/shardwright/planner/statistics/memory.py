"""Where a rank's memory goes: the fullest ranks, and a ledger that leaves no byte out."""

from __future__ import annotations

import typing

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.plan import Plan
from shardwright.core.statistics import Ledger, LedgerLine, PeakTier
from shardwright.core.timeline import Kind
from shardwright.planner.statistics.holdings import Holdings

MOST_TIERS = 5
KINDS: tuple[str, ...] = typing.get_args(Kind)  # in the order in which they are told
TIER_WIDTH = 2**20  # bytes by which ranks of one tier may differ
SET_ASIDE = "set_aside"
DENSE = "dense"
INPUTS = "inputs"
FREE = "free"
# Rules that subtract the dense part and the inputs; others tell the inputs and reserve none.
SUBTRACTING = ("heuristic", "inference")


def decisive(plan: Plan) -> Tier:
    """The memory that weights live in: HBM on an accelerator, its host's on a CPU."""
    return "ddr" if plan.cluster.compute_device == "cpu" else "hbm"


def filled(plan: Plan, tier: Tier) -> list[int]:
    """Bytes of every rank in a tier."""
    return [getattr(totals, f"{tier}_bytes") for totals in plan.ranks]


def peak_tiers(plan: Plan) -> tuple[PeakTier, ...]:
    """The fullest ranks, then the fullest of the others, and so on."""
    left = sorted(enumerate(filled(plan, decisive(plan))), key=lambda pair: (-pair[1], pair[0]))
    tiers: list[PeakTier] = []
    while left and len(tiers) < MOST_TIERS:
        most = left[0][1]
        near = [rank for rank, nbytes in left if nbytes >= most - TIER_WIDTH]
        tiers.append(PeakTier(most, tuple(sorted(near))))
        left = left[len(near) :]
    return tuple(tiers)


def ledgers(plan: Plan, held: Holdings) -> tuple[Ledger, ...]:
    """The fullest rank of every memory that is used, and of the one that weights live in."""
    found = []
    for tier, capacity in zip(TIERS, plan.cluster.capacity, strict=True):
        nbytes = filled(plan, tier)
        if any(nbytes) or tier == decisive(plan):
            rank = nbytes.index(max(nbytes, default=0))
            found.append(Ledger(tier, rank, capacity, _lines(plan, held, tier, rank, capacity)))
    return tuple(found)


def set_aside(plan: Plan, tier: Tier) -> dict[str, int]:
    """Bytes of a tier that tables may not use, by reason."""
    left = getattr(plan.reserved, f"{tier}_left")
    capacity = getattr(plan.cluster, f"{tier}_cap")
    dense = inputs = 0
    if plan.reserved.kind in SUBTRACTING and tier != "ssd":
        index = TIERS.index(tier)
        dense, inputs = plan.reserved.dense[index], plan.reserved.inputs[index]
    return {SET_ASIDE: capacity - left - dense - inputs, DENSE: dense, INPUTS: inputs}


def _lines(
    plan: Plan, held: Holdings, tier: Tier, rank: int, capacity: int
) -> tuple[LedgerLine, ...]:
    totals = plan.ranks[rank]
    kinds = totals.at_peak if tier == decisive(plan) else held.tally.kinds(tier, rank)
    lines = [LedgerLine(what, n) for what, n in set_aside(plan, tier).items() if n]
    ordered = sorted(kinds.items(), key=lambda entry: KINDS.index(entry[0]))
    lines += [LedgerLine(kind, n) for kind, n in ordered if n]
    free = capacity - sum(line.nbytes for line in lines)
    return (*lines, LedgerLine(FREE, free))
