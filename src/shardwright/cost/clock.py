"""Seconds of recorded operators on an accelerator, by class, and of what a model's ranks send.

A product takes its FLOPs at the peak rate of its dtype times an efficiency that grows with the
product: ``e / (1 + h (1/m + 1/n + 1/k))``. Attention has a share of the peak of its own; every
other operator takes the bytes that it reads and writes at a share of the memory's rate. Kernels
are launched one after the other beside them: a piece takes whatever is longer, what its kernels
compute or what their launches take, and a share of the other.
"""

# Why so few constants: each says something of the machine that another model on it shares, and is
# fitted to runs that others published (``validation/published``); a constant for one framework or
# one model would make its own rows right and everyone else's wrong.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwright.core.amount import maximum, minimum, named, noted, plain, summed
from shardwright.core.recording import Piece
from shardwright.core.work import AttentionCalls, OperatorShapes, Product, Sent
from shardwright.cost import dense, network
from shardwright.cost.dense import product_rate

NARROW_HEAD = 128  # attention kernels are at their best from here on


class WorkSeconds(NamedTuple):
    """Seconds of the operators of a piece, by class, and of what launching all of them takes."""

    products: Any
    attention: Any
    elementwise: Any
    launches: Any

    @property
    def computing(self) -> Any:
        """The device's own seconds."""
        return self.products + self.attention + self.elementwise


def has_clock(c: Mapping[str, Any]) -> bool:
    """Whether constants tell operators by class."""
    return "launch_latency" in c


def between(seconds: float, c: Mapping[str, Any]) -> tuple[float, float]:
    """How short and how long most steps are that are predicted to take so many seconds."""
    return seconds / (1 + c["range"]), seconds * (1 + c["range"])


def reached(c: Mapping[str, Any]) -> Mapping[str, Any]:
    """Constants with the rates that runs reach in place of those of data sheets, for whoever prices
    by rates and latencies; as they are of a machine without a clock."""
    if not has_clock(c):
        return c
    found = dict(c)

    def reach(name: str, share: str) -> None:
        found[name] = named(f"{name}_reached", c[name] * c[share], "B/s")

    found["replica_rate"] = named(
        "replica_rate", c["inter_host_rate"] * c["replica_efficiency"], "B/s"
    )
    reach("memory_rate", "memory_efficiency")
    reach("inter_host_rate", "network_efficiency")
    for collective in network.CROSSINGS:
        reach(f"{collective}_rate", "link_efficiency")
        found[f"{collective}_latency"] = c["collective_latency"]
    found["operation_latency"] = c["launch_latency"]
    found["overlap"] = named("overlap", 1 - c["slows"], "share")
    return found


def computed_seconds(piece: Piece, c: Mapping[str, Any], dtype: str) -> Any:
    """Seconds of a piece whose unit computes in ``dtype``, with constants as they are reached."""
    if not has_clock(c):
        work = piece.work
        return dense.compute_seconds(work.calls, work.flops, work.moved, c, dtype)
    found = piece_seconds(piece, c)
    return beside_launches(named("computing", found.computing, "s"), found.launches, c)


def beside_launches(computing: Any, launches: Any, c: Mapping[str, Any]) -> Any:
    """Seconds of kernels and of their launches together: some wait for the host and others for the
    device, so that both take more than the longer of them."""
    return maximum(computing, launches) + c["interleaves"] * minimum(computing, launches)


def piece_seconds(piece: Piece, c: Mapping[str, Any]) -> WorkSeconds:
    """What a piece computes, with the constants of an accelerator's clock, rates as reached."""
    work, operators = piece.work, piece.operators or OperatorShapes()
    told = sum(each.flops for each in operators.products)
    told += sum(call.calls * call.flops for call in operators.attention)
    # What has FLOPs but no shape goes at the best that products reach. Of attention the sums of
    # FLOPs count what is masked, too, so beside it nothing is left over.
    products = summed("products", [_product(each, c) for each in operators.products], "s")
    if not operators.attention and plain(work.flops) > told:
        untold = named("flops_without_shapes", work.flops - told, "FLOP")
        products = products + untold / (c["compute_rate"] * c["product_efficiency"])
    attention = summed("attention", [_attention(each, c) for each in operators.attention], "s")
    # A collective's buffers are no kernel's: they take the seconds of what is sent.
    sent = sum(each.calls * each.nbytes for each in operators.sent)
    elementwise = maximum(work.moved - sent, 0) / c["memory_rate"]
    launches = named("launches", work.calls * c["launch_latency"], "s")
    return WorkSeconds(products, attention, named("elementwise", elementwise, "s"), launches)


def _product(its: Product, c: Mapping[str, Any]) -> Any:
    rate = product_rate(its.dtype, c) * c["product_efficiency"]
    what = f"[{its.calls} x {its.dtype} {its.m} x {its.n} x {its.k}]"
    sides = noted(1 / its.m + 1 / its.n + 1 / its.k, f"sides{what}", "", "1/m + 1/n + 1/k", rate)
    flops = noted(its.flops, f"flops{what}", "FLOP", "calls x 2 m n k", rate)
    half = c["product_half_size"] * sides
    return named(f"product{what}", flops / rate * (1 + half), "s")


def _attention(its: AttentionCalls, c: Mapping[str, Any]) -> Any:
    rate = product_rate(its.dtype, c) * c["attention_efficiency"]
    what = f"[{its.calls} x {its.dtype}, heads of {its.head_dim}]"
    narrow = min(its.head_dim / NARROW_HEAD, 1.0) ** 0.5
    why = f"heads narrower than {NARROW_HEAD} reach less"
    share = noted(narrow, f"share{what}", "", why, rate)
    flops = noted(its.calls * its.flops, f"flops{what}", "FLOP", "what is not masked", rate)
    return named(f"attention{what}", flops / (rate * share), "s")


def near_of(ranks: int, beside: int, host: int) -> int | None:
    """How many of ``ranks`` that lie ``beside`` apart share a host; None where all do."""
    return None if ranks * beside <= host else max(min(host // beside, ranks), 1)


def ring_seconds(
    nbytes: Any, ranks: int, beside: int, host: int, c: Mapping[str, Any], times: int = 1
) -> Any:
    """Seconds of a collective among ``ranks`` that moves a full buffer of ``nbytes`` ``times``
    (twice for an all-reduce), ``beside`` apart from each other on hosts of ``host`` ranks."""
    near = near_of(ranks, beside, host)
    collective: network.Collective = "all_gather" if times == 1 else "all_reduce"
    return network.collective_seconds(collective, nbytes, ranks, c, near)


def sent_seconds(sent: Sent, ranks: int, beside: int, host: int, c: Mapping[str, Any]) -> Any:
    """Seconds of all calls of a collective of a model's own."""
    times = 2 if sent.collective == "all_reduce" else 1
    return sent.calls * ring_seconds(sent.nbytes, ranks, beside, host, c, times)
