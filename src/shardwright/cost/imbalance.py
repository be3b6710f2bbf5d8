"""How something lies on ranks: its mean, and how uneven it is by TorchRec's measures (1.9.2).

A measure looks at each rank's share of the sum and at the even share 1/k of k ranks; 0 is even.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardwright.core.amount import Fold, largest, log, maximum, named, noted, plain, summed, times
from shardwright.core.statistics import Measure, Unevenness


class Ranks(NamedTuple):
    """``ranks`` that have the same ``value``; ``label`` is what a derivation calls them."""

    value: Any
    ranks: Sequence[int]
    label: str = ""

    def times(self, each: Any) -> Any:
        """What they have together of which each has ``each``."""
        return times(each, len(self.ranks))


def each_rank(values: Iterable[float]) -> list[Ranks]:
    """Every rank by itself."""
    return [Ranks(value, (rank,)) for rank, value in enumerate(values)]


def unit_of(measure: Measure) -> str:
    """Seconds or bytes."""
    return "s" if measure == "seconds" else "B"


def number_of(groups: Sequence[Ranks]) -> Any:
    """How many ranks there are."""
    count = sum(len(group.ranks) for group in groups)
    return noted(count, "ranks", "", "cluster.world_size", like=groups[0].value)


def mean(name: str, groups: Sequence[Ranks], unit: str, adds: Fold = math.fsum) -> Any:
    """The arithmetic mean over ranks; ``adds`` adds plain numbers."""
    terms = [group.times(group.value) for group in groups]
    whole = summed(f"{name}_of_all_ranks", terms, unit, adds)
    return named(f"mean_{name}", whole / number_of(groups), unit)


def unevenness(of: Measure, groups: Sequence[Ranks]) -> Unevenness | None:
    """All measures of values of which none is negative; None if their sum is 0.

    ``largest_deviation`` is TorchRec's total variation: the largest deviation of a share from the
    even one, not half of their sum. ``chi`` and ``relative_entropy`` are divided by what they are
    where one rank has all: k - 1 and ln k. A share of 0 adds no entropy.
    """
    added = [group.times(group.value) for group in groups]
    whole = summed(f"{of}_of_all_ranks", added, unit_of(of))
    if not plain(whole):
        return None
    ranks = number_of(groups)
    even = named("even_share", 1 / ranks)
    shares = [group._replace(value=_share(group, whole)) for group in groups]
    away = [share._replace(value=_deviation(share, even)) for share in shares]
    highest = (plain(ranks) - 1) / plain(ranks)
    return Unevenness(
        of,
        largest("largest_deviation", [group.value for group in away], ""),
        summed("total_distance", [group.times(group.value) for group in away], ""),
        _chi(away, ranks),
        _relative_entropy(shares, ranks),
        highest,
        2 * highest,
    )


def _share(group: Ranks, whole: Any) -> Any:
    return named(f"share[{group.label}]", group.value / whole)


def _deviation(share: Ranks, even: Any) -> Any:
    return named(f"deviation[{share.label}]", maximum(share.value - even, even - share.value))


def _chi(away: Sequence[Ranks], ranks: Any) -> Any:
    """The chi-square divergence from even shares, by that of one rank that has all."""
    count = plain(ranks)
    if count == 1:
        return noted(0.0, "chi", "", "one rank is always even", like=ranks)
    furthest = each_rank([1 - 1 / count] + [1 / count] * (count - 1))
    most = noted(
        _chi_square(furthest, count),
        "chi_of_one_rank_with_all",
        "",
        "ranks - 1, rounding apart",
        like=ranks,
    )
    return named("chi", _chi_square(away, ranks) / most)


def _chi_square(away: Sequence[Ranks], ranks: Any) -> Any:
    squares = [
        group.times(named(f"square[{group.label}]", group.value * group.value * ranks))
        for group in away
    ]
    return summed("chi_square", squares, "")


def _relative_entropy(shares: Sequence[Ranks], ranks: Any) -> Any:
    """The relative entropy to even shares, by that of one rank that has all."""
    if plain(ranks) == 1:
        return noted(0.0, "relative_entropy", "", "one rank is always even", like=ranks)
    products = []
    for group in shares:
        if plain(group.value) > 0:
            ratio = named(f"by_even_share[{group.label}]", group.value * ranks)
            product = group.value * named(f"log[{group.label}]", log(ratio))
            products.append(group.times(named(f"product[{group.label}]", product)))
    most = named("entropy_of_one_rank_with_all", log(ranks))
    found = named("entropy_by_most", summed("entropy", products, "") / most)
    return named("relative_entropy", maximum(found, 0.0))  # below 0 by rounding alone
